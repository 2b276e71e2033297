"""The whole state of a mind as text: what a refusal must not change, and what a message that comes twice must not."""

from flowrt.controller.core import Core


def snapshot(core: Core) -> str:
    """Everything but the time at which a worker was heard."""
    members = [(one.id, one.role, one.finished) for one in core.roster.members()]
    samples, weights = core.samples, core.weights
    board = samples.board
    slots = [{name: getattr(slot, name) for name in slot.__slots__ if name != "group"} for slot in board.slots.values()]
    groups = [(group.id, len(group.slots), group.tensors) for group in board.groups.values()]
    leases = [(lease.id, lease.worker, list(lease.slots)) for lease in board.leases.values()]
    ready = [[slot in queue for slot in board.slots.values()] for queue in board.ready.values()]
    waits = [(parked.worker, parked.request) for parked in samples.room.all()]
    parts = (members, slots, groups, leases, ready, board.undone, board.rows, board.bytes, waits)
    window = (samples.window.step, list(samples.window.taken), samples.window.waiting, samples.window.exhausted)
    opening, training, regroup = samples.opening, samples.training, core.regroup
    ends = (opening._exhausted, opening._ender, training._told, training._last, sorted(samples.leaving))
    back = (regroup._until_s, regroup._awaited, sorted(regroup._returned), regroup._deferred)
    others = (core.models.of, sorted(core.departures._released), core.suspension.__dict__.get("_order"))
    rest = (samples.lanes._state, dict(samples.retreat.dropped), weights, core.ended)
    return repr((parts, window, ends, back, others, *rest))
