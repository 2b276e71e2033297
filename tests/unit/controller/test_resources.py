"""The account of resources: bounded numbers of any number of workers, and their sums over time."""

import json
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.controller.attribution.resources import (
    HOLD_S,
    MAX_WORST,
    WINDOW_S,
    WORST_IS_LEAST,
    ResourceAccount,
    figures_of,
    merged_use,
)
from flowrt.protocol.resources import MAX_RECORD_BYTES, ResourceUse, pack_use, unpack_use

GIB = float(1 << 30)
ANY = st.floats(allow_nan=True, allow_infinity=True)
WHOLE = st.integers(-(2**63), 2**63 - 1)
USES = st.builds(
    ResourceUse,
    seconds=st.floats(0.1, 20),
    processors=st.floats(0, 64),
    memory=st.floats(0, 1e12),
    tokens=st.integers(-1, 10**9),
    cache_tokens=st.integers(0, 10**7),
    cache_size=st.integers(0, 10**7),
    devices=st.integers(0, 8),
    device_allocated=st.floats(0, 1e12),
    device_reserved=st.floats(0, 1e12),
    device_total=st.floats(0, 1e12),
    device_use=st.sampled_from([-1.0, 0.0, 0.25, 1.0]),
)


@given(USES)
def test_a_record_is_small_and_read_as_it_was_packed(use: ResourceUse) -> None:
    record = pack_use(use)
    assert len(record) <= MAX_RECORD_BYTES
    assert unpack_use(record) == use


@pytest.mark.parametrize("record", [b"", b"\x00", b"\x93\x01\x02", b"\x92\xa1x\xa1y", b"\xff" * 200, b"\x90"])
def test_bytes_that_are_no_record_are_refused(record: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        unpack_use(record)


@given(st.lists(USES, min_size=1, max_size=40))
def test_numbers_of_a_window_are_those_of_its_workers(uses: list[ResourceUse]) -> None:
    account = ResourceAccount(10.0)
    for number, use in enumerate(uses):
        account.add(f"w{number}", f"role-{number % 3}", use)
    account.advance(10.0 + WINDOW_S / 2)
    assert account.latest is None
    account.advance(10.0 + WINDOW_S)
    line = account.take(5.0)
    assert line is not None
    assert (line["from_s"], line["to_s"]) == (5.0, 5.0 + WINDOW_S)
    assert account.take(5.0) is None
    for role in {number % 3 for number in range(len(uses))}:
        of = [use for number, use in enumerate(uses) if number % 3 == role]
        merged = line["roles"][f"role-{role}"]
        assert merged["workers"] == len(of)
        assert merged["devices"] == sum(use.devices for use in of)
        for name, (least, middle, largest) in merged["figures"].items():
            values = [value for use in of if (value := figures_of(use).get(name)) is not None]
            expected = (min(values), median(values), max(values))
            assert (least, middle, largest) == pytest.approx(expected, rel=1e-3, abs=1e-9)
        rates = [use.tokens / use.seconds for use in of if use.tokens >= 0]
        assert merged.get("tokens_per_s", 0.0) == pytest.approx(sum(rates), rel=1e-3)
    for name, listed in line["worst"].items():
        everyone = [value for use in uses if (value := figures_of(use).get(name)) is not None]
        ordered = sorted(everyone, reverse=not WORST_IS_LEAST[name])[:MAX_WORST]
        assert [value for _, value in listed] == pytest.approx(ordered, rel=1e-3, abs=1e-9)


@given(st.lists(st.lists(USES, min_size=1, max_size=4), min_size=1, max_size=6))
def test_windows_are_merged_into_their_extremes_and_means_over_time(windows: list[list[ResourceUse]]) -> None:
    account, lines = ResourceAccount(0.0), []
    for number, uses in enumerate(windows):
        for worker, use in enumerate(uses):
            account.add(f"w{worker}", "rollout", use)
        account.advance((number + 1) * WINDOW_S)
        assert account.latest is not None
        lines.append(account.latest)
    merged = account.take(0.0)
    assert merged is not None
    assert merged == json.loads(json.dumps(merged))
    assert (merged["from_s"], merged["to_s"]) == (0.0, len(windows) * WINDOW_S)
    memory = [line["roles"]["rollout"]["figures"]["memory"] for line in lines]
    least, middle, largest = merged["roles"]["rollout"]["figures"]["memory"]
    assert (least, largest) == (min(window[0] for window in memory), max(window[2] for window in memory))
    assert middle == pytest.approx(sum(window[1] for window in memory) / len(memory), rel=0.01, abs=1e-6)
    again = merged_use([merged_use(lines[:2]), *lines[2:]])["roles"]["rollout"]
    assert again["figures"]["memory"][::2] == [least, largest]


def test_a_worker_counts_until_it_was_silent_for_a_while() -> None:
    account = ResourceAccount(0.0)
    use = ResourceUse(seconds=5.0, processors=1.0, memory=GIB, tokens=500)
    account.add("rollout-0", "rollout", use)
    account.add("rollout-1", "rollout", use)
    account.add("stranger", "", use)
    now = 0.0
    while now < HOLD_S:
        now += WINDOW_S
        account.add("rollout-0", "rollout", use)
        account.advance(now)
        assert account.latest is not None
        assert account.latest["roles"]["rollout"]["workers"] == 2
        assert account.latest["roles"]["rollout"]["tokens_per_s"] == 200.0
    account.add("rollout-0", "rollout", use)
    account.advance(now + WINDOW_S)
    assert account.latest is not None
    assert account.latest["roles"]["rollout"]["workers"] == 1
    assert account.latest["roles"]["rollout"]["tokens_per_s"] == 100.0


def test_size_does_not_grow_with_the_workers() -> None:
    account = ResourceAccount(0.0)
    for number in range(4096):
        use = ResourceUse(5.0, 1.0 + number / 4096, GIB, 100 + number, number, 5000, 1, GIB, 2 * GIB, 80 * GIB, 0.5)
        account.add(f"rollout-{number}", "rollout", use)
        account.add(f"reward-{number}", "reward", use._replace(tokens=-1, cache_size=0, devices=0, device_total=0.0))
    account.advance(WINDOW_S)
    assert len(json.dumps(account.take(0.0))) < 1500


@given(st.builds(ResourceUse, ANY, ANY, ANY, WHOLE, WHOLE, WHOLE, WHOLE, ANY, ANY, ANY, ANY))
def test_any_numbers_of_a_worker_give_numbers_for_json(use: ResourceUse) -> None:
    account = ResourceAccount(0.0)
    account.add("rollout-0", "rollout", use)
    account.finish(1.0)
    json.dumps(account.take(0.0), allow_nan=False)
