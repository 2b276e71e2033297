"""Warnings about waits, disks and evaluations: their conditions and their frequency."""

from hypothesis import given
from hypothesis import strategies as st

from flowrt.controller.diagnostics.health import MIN_LOOKS, Health

Wait = list[tuple[str, str, float]]


def waits(age_s: float, now: float) -> Wait:
    return [("rollout-0", "slots", now - age_s), ("trainer", "groups", now)]


def test_an_unusually_long_wait_is_reported_once_in_fifty_steps() -> None:
    health = Health()
    for check in range(MIN_LOOKS):
        assert not health.oldest_wait(waits(10.0, check), check, step=1 + check)
    assert not health.oldest_wait(waits(59.0, 100.0), 100.0, step=30)
    text = health.oldest_wait(waits(61.0, 100.0), 100.0, step=30)
    assert text == "rollout-0 has waited 61 s for slots; the oldest wait is usually 10.0 s"
    assert not health.oldest_wait(waits(90.0, 100.0), 100.0, step=79)
    assert health.oldest_wait(waits(90.0, 100.0), 100.0, step=80)
    assert [step for step, _ in health.log] == [30, 80]


@given(st.lists(st.floats(0, 29.9), max_size=60))
def test_a_wait_below_30_s_is_never_reported(ages: list[float]) -> None:
    health = Health()
    assert not any(health.oldest_wait(waits(age_s, 1000.0), 1000.0, step=1) for age_s in ages)


def test_no_wait_is_reported_before_the_first_step() -> None:
    health = Health()
    assert not any(health.oldest_wait(waits(1.0, at), at, step=0) for at in range(2 * MIN_LOOKS))
    assert not health.oldest_wait(waits(600.0, 1000.0), 1000.0, step=0)


def test_a_disk_with_less_than_5_percent_free_is_reported() -> None:
    health = Health()
    assert not health.disk(50, 1000, "/run", step=0)
    assert health.disk(49 * 10**9, 10**12, "/run", step=0) == "the disk of /run has 49.0 GB left, 4.9 %"
    assert not health.disk(1, 1000, "/run", step=49)


def history(*means: float, error: float = 0.01) -> dict[tuple[str, int], dict[str, int | float]]:
    lines: list[dict[str, int | float]] = [
        {"version": 10 * at, "avg@4": mean, "avg@4_error": error} for at, mean in enumerate(means)
    ]
    return {("aime", 10 * at): line for at, line in enumerate(lines)}


def test_two_consecutive_evaluations_below_the_best_are_reported() -> None:
    assert not Health().evaluation("aime", history(0.5, 0.9, 0.7), 30)
    assert not Health().evaluation("aime", history(0.5, 0.9, 0.7, 0.89), 30)
    assert not Health().evaluation("aime", history(0.5, 0.9, 0.7, 0.7, error=0.1), 30)
    assert not Health().evaluation("other", history(0.5, 0.9, 0.7, 0.7), 30)
    health = Health()
    text = health.evaluation("aime", history(0.5, 0.9, 0.7, 0.6), 30)
    assert text.startswith("evaluation aime: avg@4 is 0.6 in version 30, and was 0.9 in version 10; the last two")
    assert not health.evaluation("aime", history(0.5, 0.9, 0.7, 0.6, 0.5), 40)
