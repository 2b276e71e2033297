"""Rollback of lost work: leases are given back, lost columns are made again, samples over the staleness bound are lost.

- A loss leads to recommendations: the next action for a slot or a group. `roll_back` applies recommendations until none
  is left.
- Recommendations that follow from an action are applied before earlier ones; a recommendation for a slot or group that
  is no longer live is ignored.
- Afterwards every affected slot is ready for the stage that has to run again.
- `Settings.on_lost_sample` is a policy of training. In other flows every lost sample is made again; a group with a
  sample that no worker can make is dropped, and its source is notified.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from flowrt.controller.events import AppendLedger, AppendRestartLog, Command, Send
from flowrt.controller.policies.group_filter import mean_reward
from flowrt.controller.settings import OnLostSample
from flowrt.controller.state.controller_restart import VACANT, CounterSet, GroupsClosed, StageUndone
from flowrt.controller.state.counters import MAX_NAME_CHARS
from flowrt.controller.state.reward_history import Outcome
from flowrt.controller.state.sample_table import SampleTable
from flowrt.controller.state.slots import Group, Kept, Lease, Slot
from flowrt.controller.state.state import Environment, State
from flowrt.controller.state.transfers import holders_of, lose_copies
from flowrt.errors import RemoteProtocolError
from flowrt.ids import SlotId, WorkerId
from flowrt.protocol.journals import journal_of
from flowrt.protocol.messages import GONE, GroupsDropped, ReleaseLease, ReleaseTensors, RendezvousKey

MIN_GROUP_SAMPLES = 2
"""Minimum remaining samples of a group that is trained without its lost ones: an advantage compares samples."""


UNREAD = "unread"


class Action(Enum):
    """The next action for a slot or a group."""

    MAKE_AGAIN = "make again"
    """Of a slot: undo the stages whose tensors have no owner, unless a trainer may be receiving them."""
    GIVE_BACK = "give back"
    """Of a group in training: end the leases of its trainer."""
    CHECK_SOURCE = "check source"
    """Of a group that no trainer has taken: if a tensor of its prompt has no owner, close it; the prompt is unread."""


@dataclass(frozen=True, slots=True)
class Lose:
    """Of a slot: count its sample as lost; `Settings.on_lost_sample` decides what happens to its group."""

    reason: str
    failed: bool = False
    """A worker could not make the sample; its group is dropped if the sample was lost `Settings.attempts` times."""


Recommendations = dict[Slot | Group, Action | Lose]
"""The next action for each slot and group, in the order in which they are applied."""


def roll_back(state: State, env: Environment, first: Recommendations) -> list[Command]:
    """Apply recommendations, and those that follow from them, until none is left."""
    commands: list[Command] = []
    pending = list(reversed(first.items()))
    while pending:
        subject, action = pending.pop()
        if _is_live(state.table, subject):
            pending += reversed(_apply(state, env, subject, action, commands).items())
    return commands


def _is_live(table: SampleTable, subject: Slot | Group) -> bool:
    return subject.id in table.slots if isinstance(subject, Slot) else subject.id in table.groups


def _apply(
    state: State, env: Environment, subject: Slot | Group, action: Action | Lose, commands: list[Command]
) -> Recommendations:
    """Carry out one action; returns the recommendations that follow from it."""
    if isinstance(subject, Slot):
        if isinstance(action, Lose):
            return _lose(state, env, subject, action, commands)
        return _make_again(state, env, subject, commands)
    if action is Action.GIVE_BACK:
        return _give_back_group(state, env, subject, commands)
    commands += _check_source(state, env, subject)
    return {}


def _give_back_group(state: State, env: Environment, group: Group, commands: list[Command]) -> Recommendations:
    stage = env.flow.train_stage
    if group.id not in state.window.taken:
        return {}
    for slot in group.slots:
        if stage in slot.leases:
            state.table.release(slot, stage)
    state.window.put_back(group)
    commands += record(state, env, group, "ready", "lease given back")
    follows: Recommendations = dict.fromkeys(group.slots, Action.MAKE_AGAIN)
    follows[group] = Action.CHECK_SOURCE
    return follows


def _make_again(state: State, env: Environment, slot: Slot, commands: list[Command]) -> Recommendations:
    stage = _lost_stage(state, env, slot)
    if not stage:
        return {}
    if stage == slot.spans_of and _policy(env, slot.group) is not OnLostSample.REGENERATE:
        return {slot: Lose("its holder left")}
    if slot.group.id in state.window.taken:
        return {slot.group: Action.GIVE_BACK}  # which makes all its slots again
    commands += _undo(state, env, slot, stage)
    return {slot: Action.MAKE_AGAIN}


def _policy(env: Environment, group: Group) -> OnLostSample:
    """What happens to the group when one of its samples is lost."""
    return env.settings.on_lost_sample if group.flow == env.flow.train_flow else OnLostSample.REGENERATE


def _lost_stage(state: State, env: Environment, slot: Slot) -> str:
    """The first completed stage of the slot that has to run again, because a tensor of it has no owner; else empty."""
    if state.recovery.is_active:
        return ""  # a worker that rejoins may have it
    training = slot.leases.get(env.flow.train_stage)
    for column, holding in slot.tensors.items():
        stage = state.table.flows.makers.get(column)
        if holding.owners or (training is not None and training.worker in holding.copies):
            continue
        if stage is not None and state.table.is_done(slot, stage):
            return stage
    return ""


def _check_source(state: State, env: Environment, group: Group) -> list[Command]:
    is_owned = state.recovery.is_active or all(tensor.owners for tensor in group.tensors.values())
    if is_owned or group.id in state.window.taken:
        return []
    state.dropped.count("its source left")
    return _give_up(state, env, group, "its source left", UNREAD)


def _lose(state: State, env: Environment, slot: Slot, loss: Lose, commands: list[Command]) -> Recommendations:
    group, reason = slot.group, loss.reason
    if group.id in state.window.taken:
        return {group: Action.GIVE_BACK, slot: loss}
    state.dropped.count(reason)
    state.table.next_attempt(slot)
    policy = _policy(env, group)
    if policy is OnLostSample.TRAIN_REMAINING and len(group.slots) > MIN_GROUP_SAMPLES:
        for worker in sorted(holders_of(slot.tensors)):
            commands.append(Send(worker, ReleaseTensors((), (slot.id,), ())))
        commands += _for_restart(env, GroupsClosed((), (slot.id,)))
        state.table.remove(slot)
        if group.id in state.table.ready_groups[env.flow.train_stage]:
            commands += record(state, env, group, "ready", "without a lost sample")
    elif policy is not OnLostSample.REGENERATE or (loss.failed and slot.attempt >= env.settings.attempts):
        commands += _give_up(
            state, env, group, f"{reason}; that was attempt {slot.attempt} at sample {slot.member}", "dropped"
        )
    else:
        commands += record(state, env, group, "dropped", reason)
        if slot.spans_of:
            commands += _undo(state, env, slot, slot.spans_of)
        else:
            commands += _for_restart(env, StageUndone(slot.id, "", slot.attempt))
        commands += record(state, env, group, "in_flight", "offered again")
    return {}


def _undo(state: State, env: Environment, slot: Slot, stage: str) -> list[Command]:
    """Undo a stage of a slot and all stages that depend on it; the holders of the undone columns free them."""
    commands: list[Command] = []
    train = env.flow.train_stage
    if train and slot.group.id in state.table.ready_groups[train]:
        commands += record(state, env, slot.group, "in_flight", f"{stage} runs again")
    commands += _for_restart(env, StageUndone(slot.id, stage, slot.attempt))
    for worker, columns in sorted(state.table.undo(slot, stage).items()):
        commands.append(Send(worker, ReleaseTensors(tuple(sorted(columns)), (slot.id,), ())))
    return commands


def _give_up(state: State, env: Environment, group: Group, reason: str, ledger_state: str) -> list[Command]:
    """Close a group untrained, with its prompt as ``ledger_state``; an ``unread`` prompt may be offered again."""
    if group.flow != env.flow.train_flow:
        return drop_untrained(state, env, [group], reason)
    commands = record(state, env, group, ledger_state, reason)
    if ledger_state == UNREAD:
        state.opened.discard(group.epoch, group.prompt)
        state.kept.put_back(group)
    state.window.leave(group)
    return commands + close(state, env, [group])


# ---- what transitions use


def drop(state: State, env: Environment, group: Group, reason: str, reward: float | None = None) -> list[Command]:
    """Drop a group of the train flow by a decision, not for a loss; ``reward`` is its mean reward."""
    state.dropped.count(reason)
    commands = record(state, env, group, "dropped", reason, reward=reward)
    state.window.leave(group)
    return commands + close(state, env, [group])


def drop_untrained(state: State, env: Environment, groups: Sequence[Group], reason: str) -> list[Command]:
    """Close groups of flows that are not trained without their results, and notify the sources that offered them."""
    of_source: dict[WorkerId, list[int]] = {}
    for group in groups:
        if group.source in state.membership:
            of_source.setdefault(group.source, []).append(group.id)
    notices: list[Command] = [Send(source, GroupsDropped(tuple(ids), reason)) for source, ids in of_source.items()]
    return notices + close(state, env, groups)


def note_outcome(state: State, group: Group, step: int) -> float | None:
    """Add the group's mean reward to the history of its prompt; returns the mean, None if a sample has no reward."""
    reward = mean_reward(group)
    if reward is not None:
        state.history.add(Outcome(step=step, epoch=group.epoch, prompt=group.prompt, reward=reward))
    return reward


def close(state: State, env: Environment, groups: Sequence[Group]) -> list[Command]:
    """Close groups that are trained, scored or dropped; all holders of their tensors free them."""
    commands: list[Command] = []
    if env.flow.train_stage:
        commands.append(AppendRestartLog(GroupsClosed(tuple([group.id for group in groups]), ())))
    commands += [Send(worker, message) for worker, message in releases(groups).items()]
    state.table.close(groups)
    return commands


def record(
    state: State,
    env: Environment,
    group: Group,
    ledger_state: str,
    reason: str = "",
    step: int | None = None,
    reward: float | None = None,
) -> list[Command]:
    """Record the state of a group's prompt in the ledger; no commands for a group outside the train flow.

    Args:
        state: the controller's state.
        env: the controller's environment.
        group: the group of the prompt.
        ledger_state: the state in the ledger.
        reason: why the state has changed.
        step: the step of the record; None: the step in training.
        reward: mean reward of a group that was trained or filtered.
    """
    if group.flow != env.flow.train_flow:
        return []
    step = state.window.step if step is None else step
    return [
        AppendLedger(
            prompt=group.prompt, epoch=group.epoch, state=ledger_state, step=step, reason=reason, reward=reward
        )
    ]


def _for_restart(env: Environment, entry: StageUndone | GroupsClosed) -> list[Command]:
    """The command that keeps an entry for a restart; a stream cannot be recovered and keeps none."""
    return [AppendRestartLog(entry)] if env.flow.train_stage else []


def releases(groups: Iterable[Group]) -> dict[WorkerId, ReleaseTensors]:
    """For each holder of tensors of these groups, the message that orders it to free them."""
    of: dict[WorkerId, tuple[list[int], list[int]]] = {}
    for group in groups:
        for worker in holders_of(group.tensors) if group.tensors else ():
            of.setdefault(worker, ([], []))[1].append(group.id)
        for slot in group.slots:
            for worker in holders_of(slot.tensors) if slot.tensors else ():
                of.setdefault(worker, ([], []))[0].append(slot.id)
    if not of:  # columns of numbers alone
        return {}
    return {worker: ReleaseTensors((), tuple(slots), tuple(ids)) for worker, (slots, ids) in sorted(of.items())}


def is_over_age(state: State, env: Environment, slot: Slot) -> bool:
    """Whether the sample exceeds the staleness bound in the step that is in training."""
    oldest = slot.oldest_version()
    if oldest is None or slot.group.flow != env.flow.train_flow:
        return False
    return not state.admission(env).may_train(state.window.step, oldest)


def drop_over_age(state: State, env: Environment) -> list[Command]:
    """Count as lost every generated sample of a group not taken that exceeds the staleness bound."""
    commands: list[Command] = []
    window, admission = state.window, state.admission(env)
    window.note_versions(state.table.aged())
    old = [
        version for version in window.versions if version is not None and not admission.may_train(window.step, version)
    ]
    for group_id in window.of_versions(old):
        for slot in list(state.table.groups[group_id].slots):
            if slot.id in state.table.slots and is_over_age(state, env, slot):
                commands += roll_back(state, env, {slot: Lose("over-age")})
    return commands


# ---- leases that end without a result


def release_lease(state: State, env: Environment, worker: WorkerId, message: ReleaseLease, now: float) -> list[Command]:
    """Release slots that a worker gives back; with ``lost``, also count their samples as lost.

    Raises RemoteProtocolError if slots and leases differ in number, or a lease was not granted to the worker.
    """
    if len(message.slots) != len(message.leases):
        raise RemoteProtocolError(
            f"{worker} gave back {len(message.slots)} slots of {len(message.leases)} leases; there is one for each"
        )
    state.table.check_leases(set(message.leases), worker)
    commands: list[Command] = []
    for slot_id, lease_id in zip(message.slots, message.leases, strict=True):
        lease = state.table.find_lease(lease_id, worker)
        slot = lease.slots.get(SlotId(slot_id)) if lease is not None else None
        if lease is None or slot is None:
            continue
        commands += _give_back(state, env, slot, lease.stage)
        if message.lost:
            loss = Lose(f"{lease.stage} failed: {message.reason[:MAX_NAME_CHARS]}", failed=True)
            commands += roll_back(state, env, {slot: loss})
    return commands


def expire_leases(state: State, env: Environment, now: float) -> list[Command]:
    """Give expired leases back; the next lease on each of their slots lasts twice as long.

    A lease is extended instead while the work of its worker has advanced within the duration of a lease.
    """
    expired, membership, lease_s = [], state.membership, env.settings.lease_s
    # Leases are in order of their deadlines, except longer leases, and leases of trainers, which have no deadline.
    for lease in state.table.leases.values():
        if lease.deadline_s <= now:
            expired.append(lease)
        elif not (lease.longer or math.isinf(lease.deadline_s)):
            break
    commands: list[Command] = []
    for lease in expired:
        # One that is extended follows leases that may end later: it is then found late, by less than a lease.
        if (deadline_s := membership.advanced_s(lease.worker) + lease_s) > now:
            state.table.extend(lease, deadline_s)
            continue
        state.table.expire(lease)
        commands += give_back_lease(state, env, lease)
    return commands


def give_back_lease(state: State, env: Environment, lease: Lease) -> list[Command]:
    """End a lease on all its slots without a result."""
    commands: list[Command] = []
    while lease.slots:  # giving one back may end the lease on others
        commands += _give_back(state, env, next(iter(lease.slots.values())), lease.stage)
    return commands


def _give_back(state: State, env: Environment, slot: Slot, stage: str) -> list[Command]:
    """End a lease on a slot without a result; for the train stage, the leases on the group."""
    if stage == env.flow.train_stage:
        return roll_back(state, env, {slot.group: Action.GIVE_BACK})
    state.table.release(slot, stage)
    return []


# ---- lost tensors


def forget_worker(state: State, env: Environment, worker: WorkerId, *, in_order: bool) -> list[Command]:
    """Give back the leases of a worker that is gone; columns that no other worker holds are made again.

    One that has left in order has written what it was generating.
    """
    commands: list[Command] = []
    for peer in state.lanes.forget(worker):
        commands.append(Send(peer, RendezvousKey(worker, "", GONE, b"")))
    if in_order or env.settings.journals_unfinished:
        _keep_unfinished(state, env, worker)
    for lease in state.table.leases_of(worker):
        commands += give_back_lease(state, env, lease)
    groups = state.table.lose_holder(worker)
    for group in groups:
        for slot in list(group.slots):
            if slot.tensors and slot.id in state.table.slots:
                before = slot.attempt, slot.spans
                lose_copies(slot.tensors, worker)
                commands += roll_back(state, env, {slot: Action.MAKE_AGAIN})
                _keep_complete(state, env, worker, slot, before)
    for group in groups:
        lose_copies(group.tensors, worker)
        commands += roll_back(state, env, {group: Action.CHECK_SOURCE})
    return commands + end_evaluations(state, env, worker)


def _keep_unfinished(state: State, env: Environment, worker: WorkerId) -> None:
    """Note that the journal of a worker that is gone may have a prefix of each sample that it was generating."""
    for stage in state.table.flows.generating if env.settings.journals else ():
        for lease in state.table.working[stage].get(worker, {}).values():
            for slot in lease.slots.values():
                journal, version = journal_of(env.settings.journals, worker), lease.version or 0
                before = slot.group.kept.get(slot.member)
                _keep(state, env, slot, Kept((journal,), version) if before is None else before.after(journal, version))


def _keep_complete(
    state: State, env: Environment, worker: WorkerId, slot: Slot, before: tuple[int, tuple[int, ...]]
) -> None:
    """Note that the journal of a worker that is gone may have a sample that was lost with it.

    ``before``: attempt and spans of the slot before the loss.
    """
    attempt, spans = before
    if env.settings.journals and spans and not slot.spans and slot.attempt == attempt:
        _keep(state, env, slot, Kept((journal_of(env.settings.journals, worker),), min(spans[::2])))


def _keep(state: State, env: Environment, slot: Slot, kept: Kept) -> None:
    if slot.group.flow == env.flow.train_flow and slot.id in state.table.slots:
        state.table.note_kept(slot, kept)


def end_evaluations(state: State, env: Environment, source: WorkerId) -> list[Command]:
    """Close the groups of evaluations whose source is gone: the answers that it had are lost, and it offers them again.

    A source that has come back as another process is gone, too.
    """
    groups = state.table.exact_groups.of_source(source)
    return close(state, env, groups) if groups else []


def make_unowned_again(state: State, env: Environment) -> list[Command]:
    """Make every column without an owner again."""
    slots: Recommendations = {slot: Action.MAKE_AGAIN for slot in state.table.slots.values() if slot.tensors}
    commands = roll_back(state, env, slots)
    return commands + roll_back(state, env, dict.fromkeys(state.table.groups.values(), Action.CHECK_SOURCE))


def note_vacancy(state: State, role: str, why: str, now: float) -> list[Command]:
    """Record the loss of a worker of a replaceable role, which is vacant if no other worker of it stays."""
    return [AppendRestartLog(CounterSet(VACANT + role, 1))] if state.membership.miss(role, why, now) else []


def is_needed(state: State, worker: WorkerId) -> bool:
    """Whether work would be lost if this worker left: its leases, and tensors that no other worker holds."""
    if state.table.has_lease(worker):
        return True
    owner = {worker}
    return any(
        holding.owners == owner
        for group in state.table.held_by(worker)
        for tensors in (group.tensors, *(slot.tensors for slot in group.slots))
        for holding in tensors.values()
    )
