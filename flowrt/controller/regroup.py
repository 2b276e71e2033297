"""A controller that has come back waits a little for those that were in, and learns from them what they still have.

Until all of them are here again, or their time is over, nothing is served. A worker that was there before tells first
what it works on, then what it has not been answered, and last what it holds: what nobody holds is made again.
"""

from collections.abc import Callable, Collection, Iterable

from flowrt.controller.board import Board
from flowrt.controller.events import Command, Send
from flowrt.controller.models import Models
from flowrt.controller.roster import Roster
from flowrt.controller.samples import Samples
from flowrt.controller.settings import Settings
from flowrt.controller.slots import Group
from flowrt.controller.transfers import find_holding
from flowrt.controller.walk import LATEST, STEP, Recollection, Remains
from flowrt.errors import EXIT_FAILED, RemoteProtocolError
from flowrt.ids import GroupId, LeaseId, SlotId, WorkerId
from flowrt.wire.messages import Free, Holds, Renew, Saved, StepDone
from flowrt.wire.records import LaneTurn

CAME_BACK = "the controller came back"


class Regroup:
    """Who is waited for, and what they claim. Without remains there is nobody to wait for."""

    def __init__(
        self,
        roster: Roster,
        samples: Samples,
        models: Models,
        settings: Settings,
        out: list[Command],
        remains: Remains | None,
        end: Callable[[str, int], None],
    ) -> None:
        self._roster = roster
        self._samples = samples
        self._board: Board = samples.board
        self._models = models
        self._settings = settings
        self._out = out
        self._end = end
        self._until_s: float | None = None
        self._recalled: Recollection | None = None
        self._awaited: dict[WorkerId, str] = {}
        self._returned: set[WorkerId] = set()
        self._deferred: list[tuple[WorkerId, StepDone | Saved]] = []
        if remains is None:
            return
        self._recalled = samples.committing.recalled = Recollection(samples.board.flows, remains.entries)
        groups = list(self._recalled.groups.values())
        _put_back(samples.board, groups)
        samples.window.step = remains.numbers.get(STEP, settings.position.step)
        samples.window.enter(group for group in groups if group.flow == samples.train_flow)
        samples.training.plan_again()
        for name, versions in models.of.items():
            versions.newest = remains.numbers.get(LATEST + name, 0)
        self._awaited = {WorkerId(worker): role for worker, role in remains.crew.items()}
        for reason, times in remains.dropped.items():
            samples.retreat.dropped.count(reason, times)
        samples.paused = samples.retreat.patient = True

    @property
    def is_open(self) -> bool:
        """Somebody is still waited for."""
        return self._samples.paused

    def waits_for(self) -> list[WorkerId]:
        return sorted(self._awaited)

    def is_too_late(self, worker: str, term: int) -> bool:
        """It was in, and counts as gone: what it had has been made again, or has been given to others."""
        return term > 0 and worker not in self._awaited

    def joined(self, worker: WorkerId, term: int) -> None:
        """A worker is in; one that is new has none of what its predecessor of the same name had."""
        if term:
            self._returned.add(worker)
        else:
            self._returned.discard(worker)
            self._awaited.pop(worker, None)

    def is_repeated(self, worker: WorkerId, done: StepDone) -> bool:
        """Whether this end of a step is one that the controller before knew of already."""
        return worker in self._returned and done.step < self._samples.window.step

    def defer(self, worker: WorkerId, message: StepDone | Saved) -> None:
        """To be heard when everybody is here: a step has the work of several in it."""
        self._deferred.append((worker, message))

    def deferred(self) -> list[tuple[WorkerId, StepDone | Saved]]:
        deferred, self._deferred = self._deferred, []
        return deferred

    # ---- what those say that were there before

    def renew(self, worker: WorkerId, message: Renew, now: float) -> None:
        """It works on these under a lease of before: if nobody else does, it goes on."""
        stage = self._board.stages.get(message.stage)
        # A lease of before has a number of before: another would be given to somebody else one day.
        used = message.lease in self._board.leases or message.lease >= self._board.first_lease
        if stage is None or len(message.slots) != len(message.attempts) or used:
            raise RemoteProtocolError(f"{worker} renews lease {message.lease} on stage {message.stage!r}: malformed")
        if stage.whole_groups:
            if message.slots:
                self._renew_step(worker, message)
            return
        version = self._models.policy.applied_version(worker)
        slots = [
            slot
            for slot_id, attempt in zip(message.slots, message.attempts, strict=True)
            if (slot := self._board.slots.get(SlotId(slot_id))) is not None
            and slot.attempt == attempt
            and stage.generates
            and version >= slot.group.at_least
            and self._board.is_ready(slot, stage)
        ]
        if slots:
            deadline_s = now + self._settings.lease_s
            for slot in slots:
                self._board.ready[stage.name].discard(slot)
            self._board.lease(stage.name, slots, worker, deadline_s, version, number=LeaseId(message.lease))

    def _renew_step(self, worker: WorkerId, message: Renew) -> None:
        window, ready = self._samples.window, self._board.ready_groups[message.stage]
        if message.step < window.step:
            return  # closed, and known to be
        slots = [self._board.slots.get(SlotId(slot_id)) for slot_id in message.slots]
        found = [slot for slot in slots if slot is not None]
        groups = list({slot.group.id: slot.group for slot in found}.values())
        whole = sum(len(group.slots) for group in groups) == len(found) == len(slots)
        fits = len(groups) <= window.places and message.step == window.step
        if not (whole and fits and all(group.id in ready for group in groups)):
            # What is in its gradient must not be in another's too, and nothing can take it out.
            self._end(f"{worker}: it came back too late, its work on step {message.step} is not its own", EXIT_FAILED)
            return
        window.take(groups)
        number = LeaseId(message.lease)
        self._board.lease(message.stage, found, worker, float("inf"), 0, message.step, number=number)

    def holds(self, worker: WorkerId, message: Holds) -> None:
        """This is all that it has. What it should not have (any more) it is told to drop."""
        for part in message.parts:
            if part.column not in self._board.columns or len(part.ids) != len(part.lengths):
                raise RemoteProtocolError(f"{worker} holds column {part.column!r}, which does not exist here")
        self._models.check_known(worker, message.weights)
        wrong: dict[str, list[int]] = {}
        for part in message.parts:
            for item, length in zip(part.ids, part.lengths, strict=True):
                holding = find_holding(self._board, part.column, item)
                claimed = worker in self._claims(part.column, item)
                if holding is not None and holding.length == length and claimed:
                    holding.owners.add(worker)
                elif holding is not None and holding.length == length and self._works_with(worker, part.column, item):
                    # A copy that came with its grant: not for others, but to be freed in the end.
                    holding.sent[worker] = LaneTurn(worker, worker, "samples", 0, 0, "")
                elif holding is None or worker not in holding.owners:
                    wrong.setdefault(part.column, []).append(item)
        for column, items in wrong.items():
            self._out.append(Send(worker, Free((column,), tuple(items), tuple(items))))
        self._models.regain(worker, message.weights)
        self._awaited.pop(worker, None)

    def _claims(self, column: str, item: int) -> Collection[WorkerId]:
        return () if self._recalled is None else self._recalled.claims.get((column, item), ())

    def _works_with(self, worker: WorkerId, column: str, item: int) -> bool:
        """Whether a lease that it has renewed needs this column."""
        fetched = self._board.flows.fetched
        if self._board.columns[column].scope == "group":
            group = self._board.groups.get(GroupId(item))
            slots = [] if group is None else group.slots
        else:
            slot = self._board.slots.get(SlotId(item))
            slots = [] if slot is None else [slot]
        leases = [lease for slot in slots for lease in slot.leases.values()]
        return any(lease.worker == worker and column in fetched[lease.stage] for lease in leases)

    # ---- the end of it

    def close(self, now: float) -> bool:
        """Go on if everybody is here, or has had time to come; returns whether that is so now for the first time."""
        if not self.is_open:
            return False
        if self._until_s is None:
            self._until_s = now + self._settings.regroup_s
        if self._awaited and now < self._until_s:
            return False
        for worker, role in self._awaited.items():
            why = f"{worker} did not come back within {self._settings.regroup_s:.0f} s of the controller"
            if role in self._settings.vital_roles:
                self._end(f"{why}: what it had is lost, go back to the last checkpoint (flowrt resume)", EXIT_FAILED)
            elif role in self._settings.needed_roles:
                self._roster.miss(role, why, now)
        self._awaited.clear()
        self._samples.go_on(CAME_BACK)
        for versions in self._models.of.values():
            versions.changed = True
        return True


def _put_back(board: Board, groups: Iterable[Group]) -> None:
    """These were here before; what was ready of them is ready again."""
    for group in groups:
        board.groups[group.id] = group
        board.slots.update((slot.id, slot) for slot in group.slots)
        board.rows[group.flow] += len(group.slots)
        for tensors in (group.tensors, *(slot.tensors for slot in group.slots)):
            for column, holding in tensors.items():
                board.bytes[group.flow] += holding.length * board.flows.item_bytes[column]
        for stage in board.flows.of(group.flow):
            board.undone[stage.name] += sum(not board.is_done(slot, stage.name) for slot in group.slots)
            for slot in group.slots[:1] if stage.whole_groups else group.slots:
                board.look(slot, stage)
