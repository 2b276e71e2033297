"""Every invariant of the mind's state, asserted. For tests and simulations: nothing of a run calls it."""

from collections import Counter

from flowrt.controller.admission import Admission
from flowrt.controller.board import Board
from flowrt.controller.models import Models
from flowrt.controller.roster import Roster
from flowrt.controller.samples import Samples
from flowrt.controller.slots import Group, Slot
from flowrt.controller.versions import ModelVersions
from flowrt.wire.messages import Pull
from flowrt.wire.records import NO_BASE, Stage


def audit(
    samples: Samples, models: Models, roster: Roster, train_stage: str, admission: Admission, *, over: bool
) -> None:
    """Raise AssertionError that names what does not fit. When the run is ``over``, who leaves is not looked at."""
    board = samples.board
    for slot in board.slots.values():
        _check_slot(board, slot)
        # While a controller that has come back asks who holds what, nobody does.
        held = samples.paused or all(holding.holders for holding in {**slot.tensors, **slot.group.tensors}.values())
        assert held, f"slot {slot.id} has a column that nobody holds"
    for group in board.groups.values():
        assert group.slots, f"group {group.id} has no slots left, and is still on the board"
        for member in group.slots:
            assert board.slots.get(member.id) is member, f"slot {member.id} of group {group.id} is not on the board"
            assert member.group is group, f"slot {member.id} is in group {group.id}, but says {member.group.id}"
    _check_queues(board)
    _check_leases(board, samples.generating)
    _check_sums(board)
    for versions in models.of.values():
        _check_versions(versions, roster, over)
    if not over:
        _check_people(samples, roster)
        if not samples.paused:
            _check_hurried(samples, models, admission)
    if train_stage:
        _check_window(samples, train_stage)


def _check_slot(board: Board, slot: Slot) -> None:
    assert board.groups.get(slot.group.id) is slot.group, f"slot {slot.id} is of group {slot.group.id}, which is gone"
    assert slot in slot.group.slots, f"slot {slot.id} is not among those of its group {slot.group.id}"
    for name, lease in slot.leases.items():
        assert board.leases.get(lease.id) is lease, f"slot {slot.id} is leased for {name}, but the lease has ended"
        assert lease.slots.get(slot.id) is slot, f"slot {slot.id} is leased for {name}, but not in the lease"
        assert not board.is_done(slot, name), f"slot {slot.id} is leased for {name}, which is done"
    for name, stage in board.stages.items():
        made = [column for column in stage.makes if column in slot.tensors or column in slot.inline]
        done = board.is_done(slot, name)
        assert not made or done, f"slot {slot.id} has {made} although {name} is not done"
        assert not done or made == list(stage.makes), f"slot {slot.id} has only {made} although {name} is done"
        if done and stage.generates:
            assert slot.spans_of == name, f"slot {slot.id} has no spans although {name} is done"
        if done or name in slot.leases:
            missing = [need for need in stage.needs if not slot.has(need)]
            assert not missing, f"slot {slot.id} lacks {missing}, which {name} has needed or is at work on"


def _check_queues(board: Board) -> None:
    """Ready is what has all that the stage needs and is neither done nor leased: all of it, and nothing else."""
    for name, queue in board.ready.items():
        stage = board.stages[name]
        ready = [slot for slot in board.slots.values() if _is_ready(board, slot, stage)]
        missing = [slot.id for slot in ready if slot not in queue]
        assert not missing, f"slots {missing} are ready for {name}, but not in its queue"
        assert len(queue) == len(ready), f"the queue of {name} has {len(queue)} slots, {len(ready)} are ready"
    for name, groups in board.ready_groups.items():
        stage = board.stages[name]
        whole = {g.id for g in board.groups.values() if g.slots and all(_is_ready(board, s, stage) for s in g.slots)}
        assert set(groups) == whole, f"groups {sorted(groups)} are queued for {name}, {sorted(whole)} are ready"


def _is_ready(board: Board, slot: Slot, stage: Stage) -> bool:
    if stage.flow not in ("", slot.group.flow) or board.is_done(slot, stage.name) or stage.name in slot.leases:
        return False
    return all(slot.has(need) for need in stage.needs)


def _check_leases(board: Board, generating: list[str]) -> None:
    for lease in board.leases.values():
        assert lease.slots, f"lease {lease.id} of {lease.worker} on {lease.stage} has no slots"
        for slot in lease.slots.values():
            assert board.slots.get(slot.id) is slot, f"lease {lease.id} has slot {slot.id}, which is not on the board"
            assert slot.leases.get(lease.stage) is lease, f"lease {lease.id} has slot {slot.id}, which is not leased"
            if lease.stage in generating:
                assert lease.version >= slot.group.at_least, f"slot {slot.id} is made with too old weights"


def _check_sums(board: Board) -> None:
    """What is counted as it comes and goes is what there is."""
    rows, tensor_bytes, undone = Counter[str](), Counter[str](), Counter[str]()
    for group in board.groups.values():
        rows[group.flow] += len(group.slots)
        for column, holding in [*group.tensors.items(), *(one for s in group.slots for one in s.tensors.items())]:
            tensor_bytes[group.flow] += holding.length * board.flows.item_bytes[column]
        for stage in board.flows.of(group.flow):
            undone[stage.name] += sum(not board.is_done(slot, stage.name) for slot in group.slots)
    assert board.rows == rows, f"rows counted {dict(board.rows)}, there are {dict(rows)}"
    assert board.bytes == tensor_bytes, f"bytes counted {dict(board.bytes)}, there are {dict(tensor_bytes)}"
    assert Counter(board.undone) == undone, f"undone counted {board.undone}, there are {dict(undone)}"


def _check_people(samples: Samples, roster: Roster) -> None:
    """Nobody who is gone works, holds or waits."""
    board = samples.board
    for lease in board.leases.values():
        assert lease.worker in roster, f"lease {lease.id} on {lease.stage} is {lease.worker}'s, who is gone"
    for group in board.groups.values():
        for holding in [*group.tensors.values(), *(one for slot in group.slots for one in slot.tensors.values())]:
            gone = [worker for worker in holding.holders if worker not in roster]
            assert not gone, f"{gone} hold a column of group {group.id}, but are gone"
    for worker in [*samples.gated, *(parked.worker for parked in samples.room.all())]:
        assert worker in roster, f"{worker} waits, but is gone"
    pulls, offers = samples.room.parked()
    known = {(parked.worker, parked.request.request) for parked in samples.room.all()}
    assert known == pulls | offers, f"requests {sorted(known ^ (pulls | offers))} are parked by half"


def _check_hurried(samples: Samples, models: Models, admission: Admission) -> None:
    """Whoever could start what is ready with the latest weights, and with its own can start nothing, fetches them.

    Or rests from fetches that failed.
    """
    versions = models.policy
    if versions.latest not in versions.published:
        return

    def open_to(version: int, stage: str) -> list[Slot]:
        slots = [slot for slot in samples.board.slots.values() if slot in samples.board.ready[stage]]
        return [slot for slot in slots if _may_start(samples, admission, slot.group, version)]

    for worker in versions.behind.keys() - models.resting[versions.model]:
        own = -1 if versions.is_late(worker) else versions.applied_version(worker)
        for parked in samples.room.of(worker):
            stage = parked.request.stage if isinstance(parked.request, Pull) else ""
            if stage in samples.generating and not open_to(own, stage):
                helped = [slot.id for slot in open_to(versions.latest, stage)]
                assert not helped, f"{worker} is not hurried to version {versions.latest}, which may start {helped}"


def _may_start(samples: Samples, admission: Admission, group: Group, version: int) -> bool:
    trained = group.flow == samples.train_flow
    return version >= group.at_least and (
        not trained or admission.may_start(samples.window.expected_step(group), version)
    )


def _check_versions(versions: ModelVersions, roster: Roster, over: bool) -> None:
    """The latest version is one that somebody here has whole, and who is behind it is known to be."""
    whole = {version for version, base in versions.holders if base == NO_BASE}
    latest, newest, model = versions.latest, versions.newest, versions.model
    assert latest == max(whole, default=0), f"latest of {model} is {latest}, but {sorted(whole)} are held whole"
    assert latest <= newest, f"latest of {model} is {latest}, but {newest} is the newest that was published"
    assert not latest or latest in versions.published, f"nothing is known of version {latest} of {model}"
    behind = {who for who, one in versions.receivers.items() if one.staged < latest} - set(versions.fetching)
    assert set(versions.behind) == behind, f"{sorted(versions.behind)} count as behind, {sorted(behind)} are"
    for fetch in versions.fetching.values():
        served = versions.serving[fetch.holder, fetch.weights.version]
        assert served, f"{fetch.holder} serves {fetch.receiver}, but is not known to"
    gone = [] if over else [one for one in {*versions.held, *versions.receivers} if one not in roster]
    assert not gone, f"{gone} hold or use versions of {model}, but are gone"


def _check_window(samples: Samples, train_stage: str) -> None:
    """Which groups are in training, and that none of them is too old for it."""
    board, window = samples.board, samples.window
    flow = board.stages[train_stage].flow
    live = {group.id for group in board.groups.values() if group.flow == flow}
    taken, waiting = set(window.taken), set(window.waiting)
    assert live == taken | waiting, f"groups {sorted(live ^ (taken | waiting))} are live or in the window, but not both"
    assert not taken & waiting, f"groups {sorted(taken & waiting)} are taken and waiting"
    assert window.waiting == sorted(waiting), f"groups wait as {window.waiting}, not once each in order of issue"
    assert len(taken) <= window.groups_per_step, f"{len(taken)} groups taken of {window.groups_per_step}"
    leases = [lease for lease in board.leases.values() if lease.stage == train_stage]
    leased = {slot.group.id for lease in leases for slot in lease.slots.values()}
    assert leased == taken, f"groups {sorted(leased ^ taken)} are leased to trainers or taken, but not both"
    for group in window.taken.values():
        assert all(train_stage in slot.leases for slot in group.slots), f"group {group.id} is leased by half"
        _check_age(samples, group)


def _check_age(samples: Samples, group: Group) -> None:
    for slot in group.slots:
        assert not samples.retreat.expired(slot), f"slot {slot.id} is too old for step {samples.window.step}, and taken"
