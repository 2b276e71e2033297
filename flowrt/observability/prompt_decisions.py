"""Every decision about one prompt in a replay: offered, leased, committed, lost, trained or dropped, with its cause.

At each event the leases of the prompt's samples are compared with those before it, and the commands are searched for
ledger records and replay-log entries about the prompt. So no decision is missed, and each names the event that led to
it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from flowrt.controller.core import Core
from flowrt.controller.events import AppendLedger, AppendRestartLog, Dismiss, MessageReceived
from flowrt.controller.state.controller_restart import GroupsOpened, StageCommitted, StageUndone
from flowrt.controller.state.slots import Slot
from flowrt.ids import LeaseId, SlotId
from flowrt.observability.replay import Replay, ReplayedEvent, describe
from flowrt.protocol import messages as m


class Decision(NamedTuple):
    """A decision about the prompt."""

    at_s: float
    """Seconds on the run clock."""
    term: int
    event: int
    epoch: int
    what: str
    because: str
    """The event that led to the decision."""


class _Leased(NamedTuple):
    lease: int
    stage: str
    worker: str


class PromptDecisions:
    """The decisions about a prompt in one term."""

    def __init__(self, replay: Replay, prompt: int, epoch: int | None) -> None:
        """Start before the first event; ``epoch`` None: every epoch."""
        self._replay = replay
        self._prompt = prompt
        self._epoch = epoch
        self._slots: dict[SlotId, Slot] = {}
        self._leases: dict[SlotId, set[_Leased]] = {}
        for slot in self._core.state.table.slots.values():
            if self._is_meant(slot.group.epoch, slot.group.prompt):
                self._slots[slot.id] = slot
                self._leases[slot.id] = self._leases_of(slot)

    @property
    def _core(self) -> Core:
        return self._replay.core

    def run(self, until_s: float = float("inf")) -> Iterator[Decision]:
        """Replay up to a time of the run clock (seconds), and yield the decisions. Raises FlowError as `Replay.run`."""
        term, start_s = self._replay.recording.term, self._replay.recording.header.start_s
        groups = {slot.group.id: slot.group for slot in self._slots.values()}
        for group in groups.values():
            what = f"recovered by term {term} as group {group.id} of {len(group.slots)} samples"
            yield Decision(self._replay.at_s, term, 0, group.epoch, what, "the controller was restarted")
        for done in self._replay.run(until_s):
            because = _cause(done)
            for epoch, what in self._after(done):
                yield Decision(done.now - start_s, term, done.number, epoch, what, because)

    def _is_meant(self, epoch: int, prompt: int) -> bool:
        return prompt == self._prompt and self._epoch in (None, epoch)

    def _after(self, done: ReplayedEvent) -> Iterator[tuple[int, str]]:
        """(epoch, description) of each decision at this event."""
        offer = done.event.message if isinstance(done.event, MessageReceived) else None
        if isinstance(offer, m.Offer) and self._prompt in offer.prompts and self._is_meant(offer.epoch, self._prompt):
            yield offer.epoch, f"offered (flow {offer.flow}, {offer.members} samples)"
        for command in done.commands:
            if isinstance(command, AppendRestartLog):
                yield from self._of_entry(command.entry)
            elif isinstance(command, AppendLedger) and self._is_meant(command.epoch, command.prompt):
                yield command.epoch, _ledger_state(command)
        yield from self._of_leases()
        if self._slots:
            self._forget_closed()

    def _of_entry(self, entry: Any) -> Iterator[tuple[int, str]]:
        match entry:
            case GroupsOpened():
                for index, prompt in enumerate(entry.prompts):
                    if self._is_meant(entry.epoch, prompt):
                        yield entry.epoch, f"opened as group {entry.group + index} of {entry.members} samples"
                        self._track(range(entry.slot + index * entry.members, entry.slot + (index + 1) * entry.members))
            case StageCommitted(worker, stage, slots):
                for epoch, members in self._members(slots):
                    yield epoch, f"{stage} of {members} committed by {worker}"
            case StageUndone(slot, stage, attempt):
                for epoch, members in self._members((slot,)):
                    undone = f"{stage} of {members} is lost and done again" if stage else f"{members} is made again"
                    yield epoch, f"{undone}, as attempt {attempt}"

    def _track(self, slots: Sequence[int]) -> None:
        for number in slots:
            if (slot := self._core.state.table.slots.get(SlotId(number))) is not None:
                self._slots[slot.id] = slot
                self._leases[slot.id] = set()

    def _of_leases(self) -> Iterator[tuple[int, str]]:
        """(epoch, description) of the leases that were granted or have ended at this event."""
        table = self._core.state.table
        began: dict[tuple[int, _Leased], list[int]] = {}
        ended: dict[tuple[int, _Leased], list[int]] = {}
        for number, slot in self._slots.items():
            before, now = self._leases[number], self._leases_of(slot)
            if before == now:
                continue
            self._leases[number] = now
            for lease in sorted(now - before):
                began.setdefault((slot.group.epoch, lease), []).append(slot.member)
            for lease in sorted(before - now):
                # A lease that ends with its group is reported by the ledger's record.
                if number in table.slots and not table.is_done(slot, lease.stage):
                    ended.setdefault((slot.group.epoch, lease), []).append(slot.member)
        for (epoch, lease), members in ended.items():
            yield epoch, f"{lease.stage} of {_named(members)}: the lease of {lease.worker} ends without a result"
        for (epoch, lease), members in began.items():
            known = table.leases.get(LeaseId(lease.lease))
            step = f" for step {known.step}" if known is not None and known.step >= 0 else ""
            yield epoch, f"{lease.stage} of {_named(members)} leased to {lease.worker}{step} (lease {lease.lease})"

    @staticmethod
    def _leases_of(slot: Slot) -> set[_Leased]:
        return {_Leased(lease.id, stage, lease.worker) for stage, lease in slot.leases.items()}

    def _members(self, slots: Sequence[int]) -> list[tuple[int, str]]:
        """(epoch, description) of the prompt's samples among these slots."""
        by_epoch: dict[int, list[int]] = {}
        for number in slots:
            if (slot := self._slots.get(SlotId(number))) is not None:
                by_epoch.setdefault(slot.group.epoch, []).append(slot.member)
        return [(epoch, _named(members)) for epoch, members in by_epoch.items()]

    def _forget_closed(self) -> None:
        live = self._core.state.table.slots
        for number in [number for number in self._slots if number not in live]:
            del self._slots[number], self._leases[number]


def _named(members: Sequence[int]) -> str:
    """The samples of a group by their numbers in it; consecutive numbers as a range."""
    known, parts = sorted(members), []
    first = last = known[0]
    for member in [*known[1:], -1]:
        if member == last + 1:
            last = member
            continue
        parts.append(str(first) if first == last else f"{first}-{last}")
        first = last = member
    return f"sample{'s' if len(known) > 1 else ''} {', '.join(parts)}"


def _ledger_state(record: AppendLedger) -> str:
    reward = "" if record.reward is None else f", mean reward {record.reward:.4g}"
    reason = f": {record.reason}" if record.reason else ""
    match record.state:
        case "trained":
            return f"trained in step {record.step}{reward}"
        case "dropped":
            return f"dropped in step {record.step}{reward}{reason}"
        case "leased":
            return f"in training in step {record.step}{reason}"
        case "ready":
            return f"complete, waits for a step{reason}"
        case "in_flight":
            return f"in flight{reason}"
    return f"{record.state}{reason}"


def _cause(done: ReplayedEvent) -> str:
    """The event in one line, and the workers that the core dismissed because of it."""
    because = describe(done.event)
    if isinstance(done.event, MessageReceived):
        message = done.event.message
        if isinstance(message, m.ReleaseLease | m.TransferFailed | m.FetchFailed) and message.reason:
            because += f": {message.reason}"
        elif isinstance(message, m.Leave) and message.error:
            because += f": {message.error}"
    dismissed = [
        f"{command.worker} is dismissed: {command.reason}" for command in done.commands if isinstance(command, Dismiss)
    ]
    return "; ".join([because, *dismissed])
