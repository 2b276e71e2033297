"""The state of a core as text, to compare before and after a message, or between a core and its copy."""

import dataclasses
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from flowrt.controller.core import Core
from flowrt.protocol.messages import ProtocolRecord


def canonical(value: Any) -> Any:
    """The value with its sets sorted: two equal sets may iterate in different orders, depending on the hash seed."""
    if isinstance(value, AbstractSet):
        return ("set", sorted(repr(canonical(member)) for member in value))
    if isinstance(value, Mapping):
        return [(canonical(key), canonical(content)) for key, content in value.items()]
    if isinstance(value, list | tuple):
        return [canonical(member) for member in value]
    if isinstance(value, ProtocolRecord):
        return (type(value).__name__, canonical(msgspec.structs.astuple(value)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [
            (field.name, canonical(getattr(value, field.name))) for field in dataclasses.fields(value) if field.repr
        ]
        return (type(value).__name__, fields)
    return value


def snapshot(core: Core) -> str:
    """The whole state without the time of the last message of each worker."""
    state = core.state
    members = [(member.id, member.role, member.finished, member.standing) for member in state.membership.members()]
    table, window, recovery, requests = state.table, state.window, state.recovery, state.requests
    slots = [{name: getattr(slot, name) for name in slot.__slots__ if name != "group"} for slot in table.slots.values()]
    groups = [(group.id, len(group.slots), group.tensors) for group in table.groups.values()]
    leases = [(lease.id, lease.worker, list(lease.slots)) for lease in table.leases.values()]
    ready = [[slot in queue for slot in table.slots.values()] for queue in table.ready.values()]
    waits = [(parked.worker, parked.request) for parked in requests.all()]
    parts = (members, slots, groups, leases, ready, table.undone, table.rows, table.bytes, waits)
    training = (window.step, list(window.taken), window.waiting, window.exhausted)
    filtering = (window.filtered, window.skipped, window.decided, state.history._of, state.history._in_training)
    ends = (table.exhausted, window.ender, window.share_ended_step, window.last)
    back = (recovery.until_s, recovery.awaited, recovery.returned, recovery.deferred)
    asked = (requests.pullers, requests.offerers, state.lanes.last_failure)
    rest = (
        filtering,
        state.models.of,
        state.preemption.order,
        asked,
        state.lanes._state,
        dict(state.dropped),
        state.ended,
    )
    return repr(canonical((parts, training, ends, back, *rest)))
