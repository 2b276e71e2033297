"""Checks of a connection detect that the peer process is stopped, or that the link is cut, or is repaired.

Times are in milliseconds since the last message. The local kernel sends a probe a second after the last segment, and
every second without one; the peer sends a message within HEARTBEAT_MS, and retransmits it as TCP does.
"""

from itertools import chain, count

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flowrt.net.liveness import CUT_MS, HEARTBEAT_MS, STOPPED_MS, TcpInfo, WatchedConnection
from tests.effort import examples

PROBE_AFTER_MS = 1000
CHECK_EVERY_MS = 500
FIRST_RETRANSMISSION_MS = 210  # the tail loss probe comes first, and does not double
GIVE_UP_MS = 15_000
MAX_DETECTION_MS = 5000
first_checks = st.integers(0, CHECK_EVERY_MS - 1)
send_times = st.integers(HEARTBEAT_MS * 2 // 3, HEARTBEAT_MS)


def kernel_answers(cut: range) -> list[int]:
    """When the kernel of the peer answered; probes during the cut are lost."""
    probe_ms, answered = 0, [0]
    while probe_ms < 2 * GIVE_UP_MS:
        probe_ms += PROBE_AFTER_MS
        if probe_ms not in cut:
            answered.append(probe_ms)
    return answered


def arrival(sent_ms: int, cut: range) -> int:
    """When a message arrives that was sent at ``sent_ms``."""
    retransmissions = (sent_ms + FIRST_RETRANSMISSION_MS * (1 << attempt) for attempt in count())
    return next(ms for ms in chain([sent_ms], retransmissions) if ms not in cut)


def detect(until_ms: int, first_check_ms: int, cut: range, ours_ms: int = 0) -> tuple[int | None, int | None]:
    """When the process is first detected as stopped, and the link as cut; at ``ours_ms`` we sent a message."""
    watched, answered, stopped, cut_seen = WatchedConnection(), kernel_answers(cut), None, None
    for at_ms in range(first_check_ms, until_ms, CHECK_EVERY_MS):
        if at_ms / 1000 < watched.next_check_s:
            continue
        received = [ms for ms in (*answered, *([ours_ms] if ours_ms not in cut else [])) if ms <= at_ms]
        if watched.update(TcpInfo(at_ms, at_ms - max(received), 0, 0), at_ms / 1000) and stopped is None:
            stopped = at_ms
        if watched.cut and cut_seen is None:
            cut_seen = at_ms
    return stopped, cut_seen


@given(first_checks, st.integers(0, STOPPED_MS))
def test_a_stopped_process_is_detected_within_five_seconds(first_check_ms: int, ours_ms: int) -> None:
    stopped_ms, cut_ms = detect(2 * STOPPED_MS, first_check_ms, range(0), ours_ms)
    assert stopped_ms is not None
    assert STOPPED_MS < stopped_ms < MAX_DETECTION_MS
    assert cut_ms is None


@settings(max_examples=examples(1000))
@given(
    send_times,
    st.integers(1, HEARTBEAT_MS),
    st.integers(1, 3000) | st.integers(1, GIVE_UP_MS),
    first_checks,
    st.integers(0, 6000),
)
def test_a_process_behind_a_repaired_link_is_not_taken_for_stopped(
    sent_ms: int, cut_from_ms: int, cut_for_ms: int, first_check_ms: int, ours_ms: int
) -> None:
    assume(cut_from_ms <= sent_ms)
    cut = range(cut_from_ms, cut_from_ms + cut_for_ms)
    stopped_ms, _ = detect(min(arrival(sent_ms, cut), GIVE_UP_MS), first_check_ms, cut, ours_ms)
    assert stopped_ms is None


@given(st.integers(1, HEARTBEAT_MS), first_checks)
def test_a_cut_link_is_detected_within_five_seconds(cut_from_ms: int, first_check_ms: int) -> None:
    stopped_ms, cut_ms = detect(GIVE_UP_MS, first_check_ms, range(cut_from_ms, 2 * GIVE_UP_MS))
    assert stopped_ms is None
    assert cut_ms is not None
    assert (
        CUT_MS
        < cut_ms - max(ms for ms in kernel_answers(range(cut_from_ms, 2 * GIVE_UP_MS)) if ms < cut_from_ms)
        < MAX_DETECTION_MS
    )


def test_a_repaired_link_does_not_stay_cut() -> None:
    watched = WatchedConnection()
    assert not watched.update(TcpInfo(CUT_MS + 1, CUT_MS + 1, 0, 0), 10.0)
    assert watched.cut
    assert not watched.update(TcpInfo(10, 10, 0, 0), 11.0)
    assert not watched.cut
