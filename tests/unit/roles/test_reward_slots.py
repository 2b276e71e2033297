"""The number of samples that a reward worker holds: as many as it scores at a time, more if they are scored soon."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from flowrt.recipes.config_io import parse
from flowrt.roles.reward import LEASE_SHARE, MAX_PULL_SLOTS, most_slots

CUSTOM = parse(["custom", "--reward", "exact"])
ROUNDING = 1 + 1e-12


@given(st.floats(0.1, 1e5), st.integers(1, 64), st.floats(1, 1e4), st.integers(1, 3))
def test_the_scoring_time_of_all_slots_fits_the_lease(
    timeout_s: float, workers: int, lease_s: float, functions: int
) -> None:
    names = tuple(f"f{index}=exact" for index in range(functions))
    reward = replace(CUSTOM.reward, functions=names, timeout_s=timeout_s, workers=workers)
    slots = most_slots(replace(CUSTOM, reward=reward, controller=replace(CUSTOM.controller, lease_s=lease_s)))
    assert 1 <= slots <= MAX_PULL_SLOTS
    at_once = max(workers // functions, 1)
    assert slots <= at_once or slots * functions * timeout_s / workers <= LEASE_SHARE * lease_s * ROUNDING


def test_slots_depend_on_request_concurrency_and_on_workers() -> None:
    slow = ["--reward.timeout-s", "100", "--reward.retries", "4", "--reward.concurrency", "10"]
    assert most_slots(parse(["custom", "--reward", "http:http://x", *slow])) == 10
    assert most_slots(parse(["custom", "--reward", "exact"])) == 30
    assert most_slots(parse(["custom", "--reward", "exact", "--reward.workers", "16"])) == MAX_PULL_SLOTS
