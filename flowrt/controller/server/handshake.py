"""Handshake: the check of a worker's hello, and the answer if it is rejected."""

from flowrt.controller.core import Core
from flowrt.errors import EXIT_DISMISSED
from flowrt.ids import OBSERVER
from flowrt.protocol import messages as m

MAX_NAME_CHARS = 200
MAX_HOST_CHARS = 1000
HANDLED_BY_SERVER = (m.Hello, m.Report, m.SampleRecords, m.Leave)
NOT_CONNECTED = m.Stop(
    "this worker is not in the run, or was removed from it and its leases given back; connect again",
    EXIT_DISMISSED,
)


def rejection_reason(hello: m.Hello, core: Core, is_taken: bool) -> str:
    """Why this worker cannot join; empty if it can. ``is_taken``: its name or connection is in use."""
    if hello.protocol != m.PROTOCOL:
        return f"the worker speaks protocol {hello.protocol}, the controller {m.PROTOCOL}; install the same flowrt"
    if not all(0 < len(name) <= MAX_NAME_CHARS and name.isprintable() for name in (hello.worker, hello.role)):
        return f"a name or role is empty, not printable or over {MAX_NAME_CHARS} characters; choose another"
    if len(hello.host) > MAX_HOST_CHARS:
        return f"the name of its host has {len(hello.host)} characters, over the limit of {MAX_HOST_CHARS}"
    if is_taken:
        return f"a worker named {hello.worker} is here already; give each worker its own --name"
    if core.ended is not None:
        return f"the run has ended: {core.ended.reason}"
    if core.state.recovery.is_too_late(hello.worker, hello.term):
        return f"{hello.worker} counts as gone, and its samples were generated again or leased to others; restart it"
    return "" if hello.role == OBSERVER else core.state.lanes.fault(hello.lanes)


def rejection(hello: m.Hello, core: Core, reason: str) -> m.Message:
    """The answer to a worker that cannot join for this reason."""
    if hello.term and core.ended is not None:
        return m.Stop(core.ended.reason, core.ended.code)
    return m.Rejected(m.PERMANENT if hello.term and not core.state.recovery.is_active else 0, reason)


def dismissal(reason: str) -> m.Stop:
    """The message to a dismissed worker. It exits with this code, and its supervisor may restart it."""
    return m.Stop(f"you were dismissed: {reason}; your leases were given back", EXIT_DISMISSED)
