"""Weight sync policies: the limit and order of rolling updates, every n versions, and divergence."""

import pytest

from flowrt.controller.policies.weight_sync import DelayedUpdate, Divergence, EveryN, Receiver, Receivers, Rolling
from flowrt.errors import ConfigError
from flowrt.ids import WorkerId
from flowrt.roles.trainer import measured_kl


def receivers(*versions: tuple[int, int], first: int = 0) -> Receivers:
    return Receivers(
        Receiver(WorkerId(f"r{number}"), applied, staged) for number, (applied, staged) in enumerate(versions, first)
    )


def test_rolling_limits_the_number_of_concurrent_updates() -> None:
    assert Rolling(2).due(1, receivers((0, 0), (0, 0), (0, 0), (0, 0)), 0) == ["r0", "r1"]
    assert Rolling(2).due(1, receivers((0, 0), (0, 0), (0, 0), first=1), 1) == ["r1"]
    assert Rolling(2).due(1, receivers((0, 0), (0, 0), first=2), 2) == []


def test_a_receiver_counts_as_updating_until_it_activates_the_version() -> None:
    assert Rolling(1).due(1, receivers((0, 1), (0, 0)), 0) == []
    assert Rolling(1).due(1, receivers((1, 1), (0, 0)), 0) == ["r1"]
    assert Rolling(2).due(1, receivers((0, 1), (0, 0), (0, 0)), 0) == ["r1"]


def test_the_receiver_with_the_oldest_version_is_due_first() -> None:
    assert Rolling(1, max_behind=9).due(5, receivers((4, 4), (3, 3), (4, 4)), 0) == ["r1"]


def test_a_receiver_beyond_max_behind_does_not_wait_for_its_turn() -> None:
    assert Rolling(1, max_behind=1).due(5, receivers((4, 5), (3, 3), (4, 4), (3, 3)), 0) == ["r1", "r3"]


def test_rolling_with_max_behind_0_equals_the_default_policy() -> None:
    for versions in ([(0, 0), (1, 1), (0, 2)], [(2, 2)], [(0, 1), (1, 1)]):
        some = receivers(*versions)
        assert sorted(Rolling(1, max_behind=0).due(2, some, 3)) == sorted(DelayedUpdate().due(2, some, 3))


def test_rolling_updates_reach_every_receiver() -> None:
    state = {f"r{number}": [0, 0] for number in range(5)}
    policy = Rolling(2)
    for latest in range(1, 6):
        for _ in range(20):
            now = Receivers(Receiver(WorkerId(worker), *versions) for worker, versions in state.items())
            for worker in policy.due(latest, now, 0):
                state[worker][1] = latest
            assert sum(applied < staged for applied, staged in state.values()) <= 2
            updating = next((versions for versions in state.values() if versions[0] < versions[1]), None)
            if updating is not None:
                updating[0] = updating[1]
        assert all(versions == [latest, latest] for versions in state.values())


def test_invalid_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="use 1 or more"):
        Rolling(0)
    with pytest.raises(ConfigError, match="use 0 or more"):
        Rolling(1, max_behind=-1)
    with pytest.raises(ConfigError, match="use 1 or more"):
        EveryN(0)
    with pytest.raises(ConfigError, match="max_age is 0"):
        Divergence(0.1, 0)


def test_every_n_waits_until_a_receiver_is_n_versions_behind() -> None:
    assert EveryN(3).due(5, receivers((3, 3)), 0) == []
    assert EveryN(3).due(6, receivers((3, 3)), 0) == ["r0"]
    assert EveryN(3).due(6, receivers((4, 4), (3, 3), (0, 0), (6, 6)), 0) == ["r2", "r1"]


def test_every_n_counts_from_the_staged_version_not_the_active_one() -> None:
    assert EveryN(3).due(6, receivers((0, 6), (0, 4), (0, 3)), 0) == ["r2"]


def due_with(lag: int, measured: float | None) -> list[WorkerId]:
    """Receivers that are due with this lag behind the latest version and this measured divergence."""
    divergence = {} if measured is None else {9 - lag: measured}
    return Divergence(0.1, 4).due(9, Receivers([Receiver(WorkerId("r"), 9 - lag, 9 - lag)], divergence), 0)


def test_without_a_measured_divergence_the_latest_is_fetched_at_max_age() -> None:
    assert [due_with(lag, None) for lag in (0, 1, 3, 4, 5)] == [[], [], [], ["r"], ["r"]]


def test_the_latest_is_fetched_above_the_divergence_threshold_or_at_max_age() -> None:
    assert [due_with(1, measured) for measured in (0.0, 0.05, 0.1, 0.2)] == [[], [], [], ["r"]]
    assert [due_with(lag, 0.05) for lag in (3, 4)] == [[], ["r"]]
    assert due_with(0, 0.2) == []  # it has the latest version


def test_divergence_metrics_by_age_are_reported_by_version() -> None:
    metrics = {"loss": 1.0, "divergence_0": 0.01, "divergence_1": 0.02, "divergence_4": 0.3, "clipped": 0.5}
    assert measured_kl(metrics, 7) == {7: 0.01, 6: 0.02, 3: 0.3}
    assert measured_kl({"loss": 1.0}, 7) == {}
