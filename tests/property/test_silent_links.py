"""What looks at a connection say: the process there is stopped, or the link is cut, or it was and is mended."""

from hypothesis import given
from hypothesis import strategies as st

from flowrt.wire.silence import STOPPED_MS, Look, Watched

ASK_EVERY_MS = 2000
LOOK_EVERY_MS = 250
FIRST_AGAIN_MS = 200
GIVEN_UP_MS = 15_000
times = st.integers(0, ASK_EVERY_MS - 1), st.integers(0, LOOK_EVERY_MS - 1)


@given(*times)
def test_a_process_that_is_stopped_is_noticed_within_five_seconds(first_asked_ms: int, first_look_ms: int) -> None:
    looks = []
    for at_ms in range(first_look_ms, 10_000, LOOK_EVERY_MS):
        asked = range(first_asked_ms, at_ms + 1, ASK_EVERY_MS)
        looks.append((at_ms, Look(at_ms, at_ms - asked[-1] if asked else at_ms, 0, 0)))
    noticed_ms = first_verdict(looks)
    assert noticed_ms is not None
    assert STOPPED_MS < noticed_ms < 5000


@given(st.integers(100, GIVEN_UP_MS - 1), *times)
def test_a_link_that_is_mended_has_time_to_speak(cut_ms: int, first_asked_ms: int, first_look_ms: int) -> None:
    """The other end had something to say when the link was cut, and repeats it; so do we."""
    speaks_ms = next(ms for ms in repeats(0) if ms >= cut_ms)
    through_ms = next(ms for ms in repeats(first_asked_ms) if ms >= cut_ms)
    looks = []
    for at_ms in range(first_look_ms, min(speaks_ms, GIVEN_UP_MS), LOOK_EVERY_MS):
        sent = sum(ms <= min(at_ms, through_ms) for ms in repeats(first_asked_ms))
        cut = at_ms < through_ms
        looks.append(
            (at_ms, Look(at_ms, at_ms if cut else at_ms - through_ms, int(cut and sent > 0), max(sent - 1, 0)))
        )
    assert first_verdict(looks) is None


def first_verdict(looks: list[tuple[int, Look]]) -> int | None:
    """When, in milliseconds, the process counts as stopped for the first time."""
    watched = Watched()
    return next((at_ms for at_ms, look in looks if watched.judge(look, at_ms / 1000)), None)


def repeats(sent_ms: int) -> list[int]:
    """When something that was sent then is sent, as TCP does it: after 0.2 s again, then after twice as long, ..."""
    return [sent_ms + FIRST_AGAIN_MS * (2**count - 1) for count in range(9)]
