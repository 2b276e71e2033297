"""How many samples a reward worker holds: all are scored within their leases, however slow the functions are."""

from hypothesis import given
from hypothesis import strategies as st

from flowrt.recipes.config_io import parse
from flowrt.roles.reward import LEASE_SHARE, MAX_PULL_SLOTS, most_slots


@given(st.floats(0.1, 1e5), st.integers(1, 64), st.floats(1, 1e4), st.integers(1, 3))
def test_slots_fit_their_leases(timeout_s: float, workers: int, lease_s: float, functions: int) -> None:
    names = [word for index in range(functions) for word in ("--reward", f"f{index}=exact")]
    limits = ["--reward.timeout-s", str(timeout_s), "--reward.workers", str(workers)]
    config = parse(["custom", *names, *limits, "--controller.lease-s", str(lease_s)])
    most = most_slots(config)
    assert 1 <= most <= MAX_PULL_SLOTS
    assert most == 1 or most * functions * timeout_s / workers <= LEASE_SHARE * lease_s


def test_requests_share_their_concurrency() -> None:
    slow = ["--reward.timeout-s", "100", "--reward.retries", "4", "--reward.concurrency", "10"]
    assert most_slots(parse(["custom", "--reward", "http:http://x", *slow])) == 6
    assert most_slots(parse(["custom", "--reward", "exact"])) == 30
    assert most_slots(parse(["custom", "--reward", "exact", "--reward.workers", "16"])) == MAX_PULL_SLOTS
