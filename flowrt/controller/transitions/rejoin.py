"""Rejoin: a restarted controller waits for the workers of the earlier controller and learns what they still hold.

Until all of them have rejoined, or `rejoin_timeout_s` has passed, no request is served. A worker first renews its
leases, then repeats unanswered requests, and last sends its inventory. Columns without an owner are made again. An
inventory that comes after that makes the worker an owner of nothing: its columns may have been made again.
"""

from collections.abc import Sequence

from flowrt.controller.events import AppendRestartLog, Command, Send
from flowrt.controller.state.controller_restart import (
    FILTERED,
    HELD_UNTIL,
    JOINED,
    LATEST,
    SHARE_ENDED,
    SKIPPED,
    STEP,
    VACANT,
    VIOLATIONS,
    CounterSet,
    DrainEnded,
    RecoveredState,
    RestoredSamples,
    WorkerDrained,
)
from flowrt.controller.state.sample_table import SampleTable
from flowrt.controller.state.slots import Group
from flowrt.controller.state.state import Environment, State
from flowrt.controller.state.transfers import find_holding
from flowrt.controller.transitions import rollback
from flowrt.errors import EXIT_FAILED, RemoteProtocolError
from flowrt.ids import GroupId, LeaseId, SlotId, WorkerId
from flowrt.protocol.messages import Inventory, Pull, ReleaseTensors, RenewLease, Weights

REJOINED = "the controller came back"


def recover(state: State, env: Environment, recovered: RecoveredState) -> None:
    """Restore the state of a controller that crashed, and begin recovery."""
    restored = RestoredSamples(state.table.flows, recovered.entries)
    groups = list(restored.groups.values())
    state.recovery.begin(restored, recovered.members)
    state.kept.attach(groups)
    state.table.restore(groups)
    step = recovered.numbers.get(STEP, env.settings.position.step)
    state.window.restore(
        step,
        (group for group in groups if group.flow == env.flow.train_flow),
        filtered=recovered.numbers.get(FILTERED, 0),
        skipped=recovered.numbers.get(SKIPPED, 0),
        share_ended_step=recovered.numbers.get(SHARE_ENDED, -1),
    )
    vacant = [name for name, value in recovered.numbers.items() if value and name.startswith(VACANT)]
    state.recovery.vacant.extend(name.removeprefix(VACANT) for name in vacant)
    for order in recovered.orders:
        if isinstance(order, WorkerDrained):
            state.membership.restore_drain(WorkerId(order.worker), by_operator=order.by_operator)
        else:
            state.preemption.restore(order)
            if state.preemption.steps is not None:
                state.window.last = state.preemption.steps - 1
    for group in groups:
        if group.flow == env.flow.train_flow:
            state.opened.add(group.epoch, (group.prompt,))
    state.plan.step = step  # it may have been planned: its next plan is a second one
    state.guards.hold(recovered.numbers.get(HELD_UNTIL, 0))
    for name, versions in state.models.of.items():
        versions.newest = recovered.numbers.get(LATEST + name, 0)
    violations = [recovered.numbers.get(f"{VIOLATIONS}{index}", 0) for index in range(len(env.policies.guards))]
    state.guards.violations = violations
    joined = [name.removeprefix(JOINED) for name in recovered.numbers if name.startswith(JOINED)]
    state.membership.joined_roles.update((*joined, *recovered.members.values()))
    for reason, times in recovered.dropped.items():
        state.dropped.count(reason, times)


# ---- messages of rejoining workers


def renew_lease(state: State, env: Environment, worker: WorkerId, message: RenewLease, now: float) -> list[Command]:
    """Renew a lease of an earlier controller for slots that no other worker works on.

    Only leases on generating stages and on the step in training are renewed; a lease on the step that cannot be renewed
    ends the run. Raises RemoteProtocolError if the worker did not rejoin, or the message is malformed.
    """
    _check_returned(state, worker, message)
    table = state.table
    stage = table.stages.get(message.stage)
    # The number must be from an earlier controller: this controller grants its own numbers to other leases.
    used = message.lease in table.leases or message.lease >= table.first_lease
    if stage is None or len(message.slots) != len(message.attempts) or used:
        raise RemoteProtocolError(f"{worker} renews lease {message.lease} on stage {message.stage!r}: malformed")
    if stage.name == env.flow.train_stage:
        return _renew_step(state, worker, message) if message.slots else []
    version = state.models.policy.applied_version(worker)
    slots = [
        slot
        for slot_id, attempt in zip(message.slots, message.attempts, strict=True)
        if (slot := table.slots.get(SlotId(slot_id))) is not None
        and slot.attempt == attempt
        and stage.generates
        and slot.group.at_least <= version
        and (version == slot.group.at_most or not slot.group.is_exact)
        and table.is_ready(slot, stage)
    ]
    if slots:
        for slot in slots:
            table.ready[stage.name].discard(slot)
        deadline_s = now + env.settings.lease_s
        table.lease(stage.name, slots, worker, deadline_s, version, number=LeaseId(message.lease))
    return []


def _renew_step(state: State, worker: WorkerId, message: RenewLease) -> list[Command]:
    table, window = state.table, state.window
    if message.step < window.step:
        return []  # of a closed step
    ready = table.ready_groups[message.stage]
    slots = [table.slots.get(SlotId(slot_id)) for slot_id in message.slots]
    known = [slot for slot in slots if slot is not None]
    groups = list({slot.group.id: slot.group for slot in known}.values())
    whole = sum(len(group.slots) for group in groups) == len(known) == len(slots)
    # After recovery, samples of the step may have been made again.
    fits = state.recovery.is_active and len(groups) <= window.places and message.step == window.step
    if not (whole and fits and all(group.id in ready for group in groups)):
        # The trainer's gradient contains samples that another rank may train too, and they cannot be taken out.
        reason = f"{worker}: it came back too late, its work on step {message.step} is not its own"
        return state.end(reason, EXIT_FAILED)
    window.take(groups)
    table.lease(message.stage, known, worker, float("inf"), 0, message.step, number=LeaseId(message.lease))
    return []


def inventory(state: State, env: Environment, worker: WorkerId, message: Inventory, now: float) -> list[Command]:
    """Record the tensors and weights that a rejoined worker holds; order it to free tensors that it should not hold.

    Raises RemoteProtocolError if the worker did not rejoin, or names an unknown column, model or version.
    """
    _check_returned(state, worker, message)
    table = state.table
    for part in message.parts:
        if part.column not in table.columns or len(part.ids) != len(part.lengths):
            raise RemoteProtocolError(f"{worker} holds column {part.column!r}, which does not exist here")
    publishers = env.settings.checkpointing_roles
    may_publish = not publishers or state.membership.role(worker) in publishers
    _check_versions(state, worker, message.weights, may_publish=may_publish)
    wrong: dict[str, list[int]] = {}
    for part in message.parts:
        for item, length in zip(part.ids, part.lengths, strict=True):
            holding = find_holding(table, part.column, item)
            fits = holding is not None and holding.length == length
            if holding is not None and fits and worker in state.recovery.claims.get((part.column, item), ()):
                holding.owners.add(worker)
                table.note_holder(worker, (_group_of(table, part.column, item),))
            elif holding is not None and worker in holding.holders:
                continue
            elif holding is not None and fits and _works_with(table, worker, part.column, item):
                # A copy that came with the worker's grant: not sent to other workers, but freed with its group.
                holding.copies[worker] = None
                table.note_holder(worker, (_group_of(table, part.column, item),))
            else:
                wrong.setdefault(part.column, []).append(item)
    commands: list[Command] = [
        Send(worker, ReleaseTensors((column,), tuple(items), tuple(items))) for column, items in wrong.items()
    ]
    commands += _regain_versions(state, worker, message.weights)
    state.recovery.complete(worker)
    state.models.wake(worker)
    for versions in state.models.of.values():
        versions.is_changed = True
    state.work.add_stages(
        parked.request.stage for parked in state.requests.of(worker) if isinstance(parked.request, Pull)
    )
    return commands


def _group_of(table: SampleTable, column: str, item: int) -> Group:
    """The group of a live slot or group that has this column."""
    return table.groups[GroupId(item)] if table.columns[column].scope == "group" else table.slots[SlotId(item)].group


def _check_returned(state: State, worker: WorkerId, message: RenewLease | Inventory) -> None:
    """Raises RemoteProtocolError for a worker that did not rejoin from an earlier controller."""
    if worker not in state.recovery.returned:
        name = type(message).__name__
        raise RemoteProtocolError(f"{worker} says {name}, but did not come back from an earlier controller")


def _check_versions(state: State, worker: WorkerId, held: Sequence[Weights], *, may_publish: bool) -> None:
    """Raises RemoteProtocolError for an unknown model, or a version that is newer than all published ones.

    A worker that may publish may hold a newer version.
    """
    for weights in held:
        newest = state.models.named(worker, weights.model).newest
        if weights.version > newest and not may_publish:
            raise RemoteProtocolError(
                f"{worker} holds version {weights.version} of {weights.model}, but {newest} is the newest"
            )


def _regain_versions(state: State, worker: WorkerId, held: Sequence[Weights]) -> list[Command]:
    """Take over the weights that a rejoining worker holds."""
    commands: list[Command] = []
    for name in dict.fromkeys(weights.model for weights in held):
        versions = state.models.named(worker, name)
        before = versions.newest
        versions.regain(worker, [weights for weights in held if weights.model == name])
        if versions.newest != before:
            commands.append(AppendRestartLog(CounterSet(LATEST + name, versions.newest)))
    return commands


def _works_with(table: SampleTable, worker: WorkerId, column: str, item: int) -> bool:
    """Whether a lease that the worker has renewed needs this column."""
    if table.columns[column].scope == "group":
        group = table.groups.get(GroupId(item))
        slots = [] if group is None else group.slots
    else:
        slot = table.slots.get(SlotId(item))
        slots = [] if slot is None else [slot]
    leases = [lease for slot in slots for lease in slot.leases.values()]
    return any(lease.worker == worker and column in table.flows.fetched[lease.stage] for lease in leases)


# ---- the end of recovery


def end_recovery(state: State, env: Environment, now: float) -> list[Command]:
    """End recovery: columns without an owner are made again, and all parked requests are tried.

    The absence of a worker of a critical role ends the run.
    """
    commands: list[Command] = []
    settings = env.settings
    for worker, role in state.recovery.end().items():
        commands += rollback.end_evaluations(state, env, worker)
        why = f"{worker} did not come back within {settings.rejoin_timeout_s:.0f} s of the controller"
        if role in settings.critical_roles:
            reason = f"{why}: what it had is lost, go back to the last checkpoint (flowrt resume)"
            commands += state.end(reason, EXIT_FAILED)
        elif role in settings.replaceable_roles:
            commands += rollback.note_vacancy(state, role, why, now)
    for role in state.recovery.vacant:
        missed = rollback.note_vacancy(state, role, "there was none when the controller came back", now)
        is_filled = not state.membership.is_vacant(role)
        commands += [AppendRestartLog(CounterSet(VACANT + role, 0))] if is_filled else missed
    commands += [AppendRestartLog(DrainEnded(worker)) for worker in state.membership.take_undrained()]
    commands += rollback.make_unowned_again(state, env)
    for group in state.table.groups.values():
        if group.flow == env.flow.train_flow and group.id not in state.window.taken:
            is_ready = group.id in state.table.ready_groups[env.flow.train_stage]
            commands += rollback.record(state, env, group, "ready" if is_ready else "in_flight", REJOINED)
    state.work.add_all()
    for versions in state.models.of.values():
        versions.is_changed = True
    return commands
