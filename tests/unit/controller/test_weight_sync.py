"""Refresh policies: how many at a time and who goes first, every so many versions, how far a version has moved."""

import pytest

from flowrt.controller.policies.weight_sync import DelayedUpdate, Divergence, EveryN, Receiver, Rolling
from flowrt.errors import ConfigError
from flowrt.ids import WorkerId
from flowrt.roles.trainer import measured_kl


def receivers(*versions: tuple[int, int]) -> list[Receiver]:
    return [Receiver(WorkerId(f"r{number}"), applied, staged) for number, (applied, staged) in enumerate(versions)]


def test_so_many_at_once() -> None:
    four = receivers((0, 0), (0, 0), (0, 0), (0, 0))
    assert Rolling(2).due(1, four, 0) == ["r0", "r1"]
    assert Rolling(2).due(1, four[1:], 1) == ["r1"]
    assert Rolling(2).due(1, four[2:], 2) == []


def test_a_worker_takes_its_place_until_it_generates_with_the_new_weights() -> None:
    assert Rolling(1).due(1, receivers((0, 1), (0, 0)), 0) == []
    assert Rolling(1).due(1, receivers((1, 1), (0, 0)), 0) == ["r1"]
    assert Rolling(2).due(1, receivers((0, 1), (0, 0), (0, 0)), 0) == ["r1"]


def test_whoever_is_oldest_goes_first() -> None:
    assert Rolling(1, max_behind=9).due(5, receivers((4, 4), (3, 3), (4, 4)), 0) == ["r1"]


def test_whoever_could_begin_nothing_does_not_wait_for_its_turn() -> None:
    assert Rolling(1, max_behind=1).due(5, receivers((4, 5), (3, 3), (4, 4), (3, 3)), 0) == ["r1", "r3"]


def test_at_zero_it_is_the_default() -> None:
    for versions in ([(0, 0), (1, 1), (0, 2)], [(2, 2)], [(0, 1), (1, 1)]):
        some = receivers(*versions)
        assert sorted(Rolling(1, max_behind=0).due(2, some, 3)) == sorted(DelayedUpdate().due(2, some, 3))


def test_everybody_gets_every_version_sooner_or_later() -> None:
    state = {f"r{number}": [0, 0] for number in range(5)}
    policy = Rolling(2)
    for latest in range(1, 6):
        for _ in range(20):
            now = [Receiver(WorkerId(worker), *versions) for worker, versions in state.items()]
            for worker in policy.due(latest, now, 0):
                state[worker][1] = latest
            assert sum(applied < staged for applied, staged in state.values()) <= 2
            moving = next((versions for versions in state.values() if versions[0] < versions[1]), None)
            if moving is not None:
                moving[0] = moving[1]
        assert all(versions == [latest, latest] for versions in state.values())


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="use 1 or more"):
        Rolling(0)
    with pytest.raises(ConfigError, match="use 0 or more"):
        Rolling(1, max_behind=-1)
    with pytest.raises(ConfigError, match="use 1 or more"):
        EveryN(0)
    with pytest.raises(ConfigError, match="max_age is 0"):
        Divergence(0.1, 0)


def test_every_n_waits_until_it_is_n_versions_behind() -> None:
    assert EveryN(3).due(5, receivers((3, 3)), 0) == []
    assert EveryN(3).due(6, receivers((3, 3)), 0) == ["r0"]
    assert EveryN(3).due(6, receivers((4, 4), (3, 3), (0, 0), (6, 6)), 0) == ["r1", "r2"]


def test_every_n_counts_from_what_is_staged_not_from_what_is_in_use() -> None:
    assert EveryN(3).due(6, receivers((0, 6), (0, 4), (0, 3)), 0) == ["r2"]


def moved(lag: int, measured: float | None) -> list[WorkerId]:
    """Who is due when the latest version is so far ahead, and has moved away so far."""
    return Divergence(0.1, 4).due(9, [Receiver(WorkerId("r"), 9 - lag, 9 - lag, measured)], 0)


def test_what_nobody_has_measured_is_fetched_when_it_is_too_old() -> None:
    assert [moved(lag, None) for lag in (0, 1, 3, 4, 5)] == [[], [], [], ["r"], ["r"]]


def test_what_has_moved_over_the_threshold_is_fetched_at_once_and_the_rest_when_it_is_too_old() -> None:
    assert [moved(1, measured) for measured in (0.0, 0.05, 0.1, 0.2)] == [[], [], [], ["r"]]
    assert [moved(lag, 0.05) for lag in (3, 4)] == [[], ["r"]]
    assert moved(0, 0.2) == []  # it has the latest: there is nothing to fetch


def test_the_trainer_tells_by_version_what_its_step_measured_by_age() -> None:
    metrics = {"loss": 1.0, "divergence_0": 0.01, "divergence_1": 0.02, "divergence_4": 0.3, "clipped": 0.5}
    assert measured_kl(metrics, 7) == {7: 0.01, 6: 0.02, 3: 0.3}
    assert measured_kl({"loss": 1.0}, 7) == {}
