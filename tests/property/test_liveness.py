"""What looks at a connection say: the process there is stopped, or the link is cut, or it was and is mended.

Times in milliseconds since the last word that came. Our kernel asks a second after the last sign, and every second
when none comes; the other end has something to say within HEARTBEAT_MS, and repeats it as TCP does.
"""

from itertools import chain, count

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flowrt.net.liveness import CUT_MS, HEARTBEAT_MS, STOPPED_MS, TcpInfo, WatchedConnection
from tests.effort import examples

ASK_AFTER_MS = 1000
LOOK_EVERY_MS = 500
FIRST_AGAIN_MS = 210  # a probe for a lost tail comes first, and does not double
GIVEN_UP_MS = 15_000
NOTICED_MS = 5000
looks = st.integers(0, LOOK_EVERY_MS - 1)
words = st.integers(HEARTBEAT_MS * 2 // 3, HEARTBEAT_MS)


def signs(cut: range) -> list[int]:
    """When the kernel of the other end answered; what is asked while the link is cut is lost."""
    asked, answered = 0, [0]
    while asked < 2 * GIVEN_UP_MS:
        asked += ASK_AFTER_MS
        if asked not in cut:
            answered.append(asked)
    return answered


def says(spoken_ms: int, cut: range) -> int:
    """When a word comes that was said then."""
    repeats = (spoken_ms + FIRST_AGAIN_MS * (1 << again) for again in count())
    return next(ms for ms in chain([spoken_ms], repeats) if ms not in cut)


def judged(until_ms: int, first_look_ms: int, cut: range, ours_ms: int = 0) -> tuple[int | None, int | None]:
    """When the process counts as stopped, and the link as cut, for the first time; at ``ours_ms`` we said something."""
    watched, answered, stopped, noticed = WatchedConnection(), signs(cut), None, None
    for at_ms in range(first_look_ms, until_ms, LOOK_EVERY_MS):
        if at_ms / 1000 < watched.next_check_s:
            continue
        heard = [ms for ms in (*answered, *([ours_ms] if ours_ms not in cut else [])) if ms <= at_ms]
        if watched.update(TcpInfo(at_ms, at_ms - max(heard), 0, 0), at_ms / 1000) and stopped is None:
            stopped = at_ms
        if watched.cut and noticed is None:
            noticed = at_ms
    return stopped, noticed


@given(looks, st.integers(0, STOPPED_MS))
def test_a_process_that_is_stopped_is_noticed_within_five_seconds(first_look_ms: int, ours_ms: int) -> None:
    stopped_ms, cut_ms = judged(2 * STOPPED_MS, first_look_ms, range(0), ours_ms)
    assert stopped_ms is not None
    assert STOPPED_MS < stopped_ms < NOTICED_MS
    assert cut_ms is None


@settings(max_examples=examples(1000))
@given(
    words, st.integers(1, HEARTBEAT_MS), st.integers(1, 3000) | st.integers(1, GIVEN_UP_MS), looks, st.integers(0, 6000)
)
def test_a_link_that_is_mended_has_time_to_speak(
    spoken_ms: int, cut_from_ms: int, cut_for_ms: int, first_look_ms: int, ours_ms: int
) -> None:
    assume(cut_from_ms <= spoken_ms)
    cut = range(cut_from_ms, cut_from_ms + cut_for_ms)
    stopped_ms, _ = judged(min(says(spoken_ms, cut), GIVEN_UP_MS), first_look_ms, cut, ours_ms)
    assert stopped_ms is None


@given(st.integers(1, HEARTBEAT_MS), looks)
def test_a_link_that_is_cut_is_noticed_within_five_seconds(cut_from_ms: int, first_look_ms: int) -> None:
    stopped_ms, cut_ms = judged(GIVEN_UP_MS, first_look_ms, range(cut_from_ms, 2 * GIVEN_UP_MS))
    assert stopped_ms is None
    assert cut_ms is not None
    assert (
        CUT_MS < cut_ms - max(ms for ms in signs(range(cut_from_ms, 2 * GIVEN_UP_MS)) if ms < cut_from_ms) < NOTICED_MS
    )


def test_a_link_that_is_mended_is_cut_no_more() -> None:
    watched = WatchedConnection()
    assert not watched.update(TcpInfo(CUT_MS + 1, CUT_MS + 1, 0, 0), 10.0)
    assert watched.cut
    assert not watched.update(TcpInfo(10, 10, 0, 0), 11.0)
    assert not watched.cut
