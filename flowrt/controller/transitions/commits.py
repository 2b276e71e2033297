"""Commits: validated before anything is changed, then their columns become visible; late rows are refused.

While a restarted controller recovers, it acknowledges again the commits that an earlier controller applied.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import TypeVar, cast

from flowrt.controller.events import AppendRestartLog, Command, Send
from flowrt.controller.state.controller_restart import StageCommitted
from flowrt.controller.state.dataflow import Makes
from flowrt.controller.state.sample_table import SampleTable
from flowrt.controller.state.slots import Group, Lease, Slot
from flowrt.controller.state.state import Environment, State
from flowrt.controller.transitions import evaluations, failed_transfers, rollback
from flowrt.controller.transitions.rollback import Lose
from flowrt.errors import RemoteProtocolError
from flowrt.ids import SlotId, WorkerId
from flowrt.protocol.messages import Commit, Committed, Part, Pull, Stage, Values, values_fault

Value = TypeVar("Value")


def commit(state: State, env: Environment, worker: WorkerId, message: Commit, now: float) -> list[Command]:
    """Apply a commit; the answer names the slots that are refused, and why.

    Raises RemoteProtocolError if the commit is malformed, its stage is unknown or the train stage, it names a lease
    that the worker was not granted for this stage, or it has only a part of a group for a stage of whole groups.
    """
    table = state.table
    stage = table.stages.get(message.stage)
    if stage is None:
        raise RemoteProtocolError(f"{worker} commits stage {message.stage!r}, which is not in this dataflow")
    if stage.name == env.flow.train_stage:
        raise RemoteProtocolError(f"commit of stage {stage.name!r} by {worker}: what is trained ends with its step")
    if fault := commit_fault(message, stage, table.flows.makes[stage.name], state.models.policy.newest):
        raise RemoteProtocolError(f"commit of stage {stage.name!r} by {worker}: {fault}")
    table.check_leases(set(message.leases), worker, stage.name)
    if stage.whole_groups:
        _check_whole(table, worker, message, stage)
    commands: list[Command] = []
    of_leases, refused = _rows_of(state, worker, message, stage)
    reasons: set[str] = {evaluations.OTHER_VERSION} if refused else set()
    touched: dict[int, Group] = {}
    for lease, rows in of_leases:
        if lease is None:
            late, why = _late(state, worker, message, stage, rows)
            refused += late
            reasons |= why
            continue
        slots = [lease.slots[slot_id] for slot_id in cast(Sequence[SlotId], pick(message.slots, rows))]
        # Most stages make either tensors or numbers.
        lengths = {part.column: pick(part.lengths, rows) for part in message.parts} if message.parts else {}
        inline = {entry.column: pick(entry.values, rows) for entry in message.inline} if message.inline else {}
        spans = pick(message.spans, rows) if message.spans else ()
        table.commit(lease, slots, lengths, inline, spans)
        if env.flow.train_stage:
            commands.append(AppendRestartLog(committed_rows(worker, message, rows)))
        for slot in slots:
            if stage.generates:
                table.ready[stage.name].on_generated(slot, sum(slot.spans[1::2]))
                if rollback.is_over_age(state, env, slot):
                    commands += rollback.roll_back(state, env, {slot: Lose("over-age")})
                    refused.append(slot.id)
                    reasons.add("older than the staleness bound")
                    continue
            touched[slot.group.id] = slot.group
    reason = "; ".join(sorted(reasons)) if reasons else ""
    commands.append(Send(worker, Committed(message.request, tuple(refused), reason)))
    commands += _advance(state, env, touched.values())
    state.membership.note_results(worker)
    if stage.generates:
        commands += failed_transfers.lose_late(state, env, worker, touched.values()) if state.lanes.failed else []
        state.work.add_worker(worker)  # a dispatch policy may have waited for its capacity
    return commands


def _rows_of(
    state: State, worker: WorkerId, message: Commit, stage: Stage
) -> tuple[list[tuple[Lease | None, list[int]]], list[int]]:
    """The accepted rows of a commit by lease, and the slots refused because another version had to generate them."""
    table = state.table
    of_leases = list(by_lease(table, worker, message, stage))
    if state.lanes.failed:
        for lease in [lease for lease, _ in of_leases if lease is not None]:
            failed_transfers.note_arrived(state, worker, stage.name, lease.slots.values())
    if stage.generates and table.exact.live:
        return evaluations.split_rows(table, message, of_leases)
    return of_leases, []


def complete_leases(state: State, env: Environment, worker: WorkerId, pull: Pull) -> tuple[list[Command], list[int]]:
    """Complete the leases that a pull reports as done; returns the commands, and the ids of leases that had ended."""
    commands: list[Command] = []
    late = []
    for lease_id in pull.done:
        lease = state.table.find_lease(lease_id, worker)
        if lease is None or lease.stage != pull.stage:
            late.append(lease_id)
            continue
        if state.lanes.failed:
            failed_transfers.note_arrived(state, worker, lease.stage, lease.slots.values())
        slots = state.table.finish(lease)
        if env.flow.train_stage:
            commands.append(AppendRestartLog(completed_lease(worker, lease, slots)))
        commands += _advance(state, env, dict.fromkeys([slot.group for slot in slots]))
    return commands, late


def completion_fault(state: State, pull: Pull) -> str:
    """Why a pull cannot report leases of its stage as done; empty if it can. The stage must exist."""
    stage = state.table.stages[pull.stage]
    if stage.makes or stage.whole_groups:
        return f"stage {stage.name} is not done by a pull: commit what it makes, or end its step"
    return ""


def _advance(state: State, env: Environment, groups: Collection[Group]) -> list[Command]:
    """Record the groups that are ready to train, and close those that are complete."""
    commands: list[Command] = []
    streamed = groups
    if train_flow := env.flow.train_flow:
        streamed = [group for group in groups if group.flow != train_flow]
        ready = state.table.ready_groups[env.flow.train_stage]
        for group in groups:
            if group.flow == train_flow and group.id in ready:
                commands += rollback.record(state, env, group, "ready")
    if complete := state.table.flows.complete(streamed):
        commands += rollback.close(state, env, complete)
    return commands


# ---- validation


def commit_fault(message: Commit, stage: Stage, makes: Makes, latest: int) -> str:
    """What is wrong with a commit of this stage; empty when its columns fit the stage and each other.

    Args:
        message: the commit.
        stage: the committed stage.
        makes: the columns that the stage makes.
        latest: the newest published version of the policy; spans may not name a newer one.
    """
    count = len(message.slots)
    tensors, numbers = [part.column for part in message.parts], [entry.column for entry in message.inline]
    if sorted(tensors) != makes.tensors or sorted(numbers) != makes.numbers:
        return f"it brings tensors {tensors} and numbers {numbers}, the stage makes {makes.tensors} and {makes.numbers}"
    sizes = [len(message.leases)]
    sizes += [len(part.lengths) for part in message.parts]
    sizes += [len(entry.values) for entry in message.inline]
    if sizes.count(count) != len(sizes):
        return f"its columns have {sizes} rows for {count} slots"
    if count > 1 and len(set(message.slots)) != count:
        return "it has a slot twice"
    for part in message.parts:
        if part.ids != message.slots or min(part.lengths, default=0) < 0:
            return "its parts are not of its slots, or of negative length"
    if message.inline and (fault := values_fault(message.inline)):
        return fault
    if len(message.spans) != (count if stage.generates else 0):
        return f"it has {len(message.spans)} spans for {count} slots"
    for span in message.spans:
        if wrong := _span_fault(span, latest):
            return wrong
    return ""


def _check_whole(table: SampleTable, worker: WorkerId, message: Commit, stage: Stage) -> None:
    """Raises RemoteProtocolError if the commit has some but not all slots of a leased group."""
    for lease, rows in by_lease(table, worker, message, stage):
        if lease is None:
            continue
        counts = Counter(lease.slots[SlotId(message.slots[row])].group for row in rows)
        for group, count in counts.items():
            if count < len(group.slots):
                raise RemoteProtocolError(
                    f"commit of stage {stage.name!r} by {worker}: it has {count} of the {len(group.slots)} slots of "
                    f"group {group.id}; commit all of them"
                )


def _span_fault(span: Sequence[int], latest: int) -> str:
    known = all(0 <= version <= latest for version in span[::2])
    if not span or len(span) % 2 or not known or min(span[1::2]) < 0:
        return f"span {span} is not pairs of a published version and its tokens"
    return ""


# ---- rows of a commit


def by_lease(
    table: SampleTable, worker: WorkerId, message: Commit, stage: Stage
) -> Iterator[tuple[Lease | None, list[int]]]:
    """The row indices of a commit by lease; the lease is None for rows without a valid lease of the worker."""
    leases = message.leases
    rows_of: dict[int, list[int]] = {}
    if leases and leases.count(leases[0]) == len(leases):  # nearly always
        rows_of[leases[0]] = list(range(len(leases)))
    else:
        for row, lease_id in enumerate(leases):
            rows_of.setdefault(lease_id, []).append(row)
    late: list[int] = []
    for lease_id, rows in rows_of.items():
        lease = table.find_lease(lease_id, worker)
        if lease is None or lease.stage != stage.name:
            late += rows
            continue
        valid = [row for row in rows if message.slots[row] in lease.slots]
        if len(valid) < len(rows):
            late += sorted(set(rows) - set(valid))
        if valid:
            yield lease, valid
    if late:
        yield None, late


def _late(
    state: State, worker: WorkerId, message: Commit, stage: Stage, rows: Sequence[int]
) -> tuple[list[int], set[str]]:
    """The refused slots among rows without a lease, and the reasons; a row that an earlier controller applied is not
    refused.
    """
    late: list[int] = []
    reasons: set[str] = set()
    restored = state.recovery.restored
    for row in rows:
        slot_id, lease_id = SlotId(message.slots[row]), message.leases[row]
        slot = state.table.slots.get(slot_id)
        known = restored is not None and restored.commits.get((stage.name, slot_id)) == lease_id
        if slot is not None and known and state.table.is_done(slot, stage.name):
            for part in message.parts:
                slot.tensors[part.column].owners.add(worker)
            state.table.note_holder(worker, (slot.group,))
            continue
        late.append(slot_id)
        old = lease_id < state.table.first_lease
        reasons.add(
            f"the lease on stage {stage.name} "
            + ("was given by a controller that is gone, and was not renewed" if old else "had ended")
        )
    return late, reasons


def pick(values: Sequence[Value], rows: Sequence[int]) -> Sequence[Value]:
    """The values of these rows; the same object if there are as many rows as values."""
    return values if len(rows) == len(values) else [values[row] for row in rows]


# ---- entries of the restart log


def committed_rows(worker: WorkerId, message: Commit, rows: Sequence[int]) -> StageCommitted:
    """The restart entry of these rows of a commit."""
    if len(rows) == len(message.slots):
        return StageCommitted(
            worker=worker,
            stage=message.stage,
            slots=message.slots,
            leases=message.leases,
            parts=message.parts,
            inline=message.inline,
            spans=message.spans,
        )
    slots = tuple(pick(message.slots, rows))
    return StageCommitted(
        worker=worker,
        stage=message.stage,
        slots=slots,
        leases=tuple(pick(message.leases, rows)),
        parts=tuple(Part(part.column, slots, tuple(pick(part.lengths, rows))) for part in message.parts),
        inline=tuple(Values(entry.column, tuple(pick(entry.values, rows))) for entry in message.inline),
        spans=tuple(pick(message.spans, rows)) if message.spans else (),
    )


def completed_lease(worker: WorkerId, lease: Lease, slots: Sequence[Slot]) -> StageCommitted:
    """The restart entry of a lease on a stage that makes no columns."""
    return StageCommitted(
        worker=worker,
        stage=lease.stage,
        slots=tuple([slot.id for slot in slots]),
        leases=(lease.id,) * len(slots),
        parts=(),
        inline=(),
        spans=(),
    )
