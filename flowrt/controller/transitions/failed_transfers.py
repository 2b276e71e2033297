"""Transfers of samples that fail, and links between two workers that are cut.

- A failed transfer is repeated by the next grant, from another owner if there is one.
- After two failures in a row, the link from the owner to the receiver counts as cut for a minute. What only the owner
  has is lost for this receiver: it is made again, by another worker if there is one. Without another worker it is kept,
  and the transfer is tried again.
- A worker that is cut off from a trainer generates nothing to train on while others can, and what only it has is made
  again at once: a trainer that fails to receive samples again and again would give up.
- A worker of another stage is granted nothing that it cannot be sent.
"""

from collections.abc import Iterable

from flowrt.controller.events import Command
from flowrt.controller.state.slots import ColumnLocation, Group, Slot
from flowrt.controller.state.state import Environment, State
from flowrt.controller.state.transfers import check_receiver, find_holding
from flowrt.controller.transitions.rollback import Action, roll_back
from flowrt.errors import RemoteProtocolError
from flowrt.ids import SlotId, WorkerId
from flowrt.protocol.messages import TransferFailed


def transfer_failed(
    state: State, env: Environment, worker: WorkerId, message: TransferFailed, now: float
) -> list[Command]:
    """Record that a transfer failed: its receiver does not hold the tensors; tensors without an owner are made again.

    Raises RemoteProtocolError for an unknown column, or if the sender of the message is not the receiver.
    """
    incoming, table, lanes = message.incoming, state.table, state.lanes
    unknown = [part.column for part in incoming.parts if part.column not in table.columns]
    if unknown:
        raise RemoteProtocolError(f"{worker} did not receive columns {unknown[:3]}, which do not exist")
    check_receiver(worker, incoming.turn)
    owner = WorkerId(incoming.turn.sender)
    if lanes.abandon(incoming.turn) and not message.is_full:
        lanes.note_failed(owner, worker, now)
    lanes.note_failure("samples", worker, message.reason)
    slots: dict[SlotId, Slot] = {}
    for part in incoming.parts:
        for item in part.ids:
            holding = find_holding(table, part.column, item)
            if holding is not None and holding.copies.get(worker) == incoming.turn:
                del holding.copies[worker]
            slot = table.slots.get(SlotId(item))
            if slot is not None and table.columns[part.column].scope == "slot":
                slots[slot.id] = slot
    commands: list[Command] = []
    if lanes.is_cut(owner, worker):
        commands += lose_unreachable(state, env, list(slots.values()), worker)
        if state.membership.role(worker) in env.settings.checkpointing_roles:
            held = [slot for group in table.held_by(owner) for slot in group.slots]
            commands += lose_unreachable(state, env, held, worker)
    for slot in slots.values():
        commands += roll_back(state, env, {slot: Action.MAKE_AGAIN})
    return commands


def lose_late(state: State, env: Environment, worker: WorkerId, groups: Iterable[Group]) -> list[Command]:
    """Make samples of these groups again that a worker has committed since it is cut off from a trainer."""
    commands: list[Command] = []
    slots = [slot for group in groups for slot in group.slots]
    trainers = env.settings.checkpointing_roles
    for receiver in [end for end in state.lanes.cut_from(worker) if state.membership.role(end) in trainers]:
        commands += lose_unreachable(state, env, slots, receiver)
    return commands


def note_arrived(state: State, worker: WorkerId, stage: str, slots: Iterable[Slot]) -> None:
    """Note that a worker has received what it needed for a stage of these slots."""
    for slot in slots:
        for column in state.table.flows.fetched[stage]:
            holding = slot.holding(column)
            if holding is not None and (turn := holding.copies.get(worker)) is not None:
                sender = WorkerId(turn.sender)
                if state.lanes.is_cut(sender, worker):
                    state.work.add_worker(sender)
                state.lanes.note_arrived(sender, worker)


def is_unreachable(state: State, slot: Slot, columns: Iterable[str], receiver: WorkerId) -> bool:
    """Whether the receiver can be sent one of these columns of the slot by none of its owners."""
    holdings = [slot.tensors.get(column) for column in columns]
    return any(holding is not None and _is_unreachable(state, holding, receiver) for holding in holdings)


def _is_unreachable(state: State, holding: ColumnLocation, receiver: WorkerId) -> bool:
    owners = holding.owners
    if not owners or receiver in owners or receiver in holding.copies:
        return False
    return all(state.lanes.is_cut(owner, receiver) for owner in owners)


def lose_unreachable(state: State, env: Environment, slots: Iterable[Slot], receiver: WorkerId) -> list[Command]:
    """Make samples again that the receiver can be sent by none of their owners, where other workers can make them.

    The owners keep their copies until they are ordered to free them.
    """
    commands: list[Command] = []
    for slot in slots:
        if slot.id not in state.table.slots:
            continue
        for column, holding in slot.tensors.items():
            maker = state.table.flows.makers.get(column, "")
            if _is_unreachable(state, holding, receiver) and has_other(state, maker, holding.owners):
                for owner in sorted(holding.owners):
                    holding.owners.discard(owner)
                    holding.copies[owner] = None
        commands += roll_back(state, env, {slot: Action.MAKE_AGAIN})
    return commands


def has_other(state: State, stage: str, workers: Iterable[WorkerId]) -> bool:
    """Whether a worker pulls the stage besides these and those that are leaving or cut off from any other."""
    known = set(workers)
    for other in state.requests.pullers.get(stage, ()):
        if other not in known and not state.lanes.cut_from(other) and not state.membership.is_leaving(other):
            return True
    return False


def may_generate(state: State, env: Environment, worker: WorkerId, stage: str) -> bool:
    """Whether a worker may generate samples to train on: not if it is cut off from a trainer and another worker may."""
    cut = state.lanes.cut_from(worker)
    trainers = env.settings.checkpointing_roles
    if not any(state.membership.role(receiver) in trainers for receiver in cut):
        return True
    return not has_other(state, stage, (worker,))


def mend(state: State, now: float) -> None:
    """Try links again that have counted as cut for a time."""
    for pair in state.lanes.take_mended(now):
        for worker in pair:
            state.work.add_worker(worker)
        state.work.add_stages(state.table.stages)
