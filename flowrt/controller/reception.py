"""Who is let in: what speaks against a hello, in words that say what to do about it."""

from flowrt.controller.core import Core
from flowrt.controller.waitgraph import OBSERVER
from flowrt.errors import EXIT_DISMISSED
from flowrt.wire import messages as m

LONGEST_NAME = 200
LONGEST_HOST = 1000
NOT_FOR_THE_MIND_ALONE = (m.Hello, m.Report, m.Bye)
NOT_IN = m.Stop(
    "you are not in this run, or counted as gone and lost your leases; say hello first, under a new connection",
    EXIT_DISMISSED,
)


def refusal(hello: m.Hello, core: Core, is_taken: bool) -> str:
    """Why this worker cannot come in; empty when it can. ``is_taken``: somebody of its name is in."""
    if hello.protocol != m.PROTOCOL:
        return f"it speaks protocol {hello.protocol}, the controller {m.PROTOCOL}; install the same flowrt"
    if not all(0 < len(word) <= LONGEST_NAME and word.isprintable() for word in (hello.worker, hello.role)):
        return f"a name or role is empty, not printable or over {LONGEST_NAME} characters; choose another"
    if len(hello.host) > LONGEST_HOST:
        return f"the name of its host has {len(hello.host)} characters, over the limit of {LONGEST_HOST}"
    if is_taken:
        return f"a worker named {hello.worker} is here already; give each its own --name"
    if core.ended is not None:
        return f"the run has ended: {core.ended.reason}"
    if core.regroup.is_too_late(hello.worker, hello.term):
        return f"{hello.worker} counts as gone, and what it had is with others or made again; start it anew"
    return "" if hello.role == OBSERVER else core.samples.lanes.fault(hello.lanes)


def turned_away(hello: m.Hello, core: Core, fault: str) -> m.Message:
    """What is said to a worker that is not let in."""
    if hello.term and core.ended is not None:
        return m.Stop(core.ended.reason, core.ended.code)
    return m.Refused(m.FOR_GOOD if hello.term and not core.regroup.is_open else 0, fault)


def dismissal(reason: str) -> m.Stop:
    """What a worker is told that counts as gone: it ends, and whoever started it may start another one."""
    return m.Stop(f"you were {reason}; your leases were given back", EXIT_DISMISSED)
