"""The train stage: micro-batches of whole groups, streamed as they become ready or planned for a whole step."""

import itertools
from collections.abc import Sequence

from flowrt.controller.batchers import Batcher, GroupCount
from flowrt.controller.board import Board
from flowrt.controller.events import Command, Keep, Persist, Send, StepClosed
from flowrt.controller.grants import closed, grant
from flowrt.controller.planning import StepPlan, micro_batch
from flowrt.controller.retreat import Retreat
from flowrt.controller.settings import Dataflow, Policies
from flowrt.controller.sizes import Sizes
from flowrt.controller.slots import Group, Slot
from flowrt.controller.steps import TrainingWindow
from flowrt.controller.tally import unfit
from flowrt.controller.transfers import Lanes
from flowrt.controller.waits import Parked
from flowrt.controller.walk import STEP, Reached
from flowrt.errors import RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.wire.messages import Pull, Saved, StepDone
from flowrt.wire.records import KEPT_TOKENS, Values


class Training:
    """Serves trainers and closes steps."""

    def __init__(
        self,
        board: Board,
        window: TrainingWindow,
        retreat: Retreat,
        lanes: Lanes,
        sizes: Sizes,
        flow: Dataflow,
        policies: Policies,
        out: list[Command],
    ) -> None:
        self._board = board
        self._window = window
        self._retreat = retreat
        self._lanes = lanes
        self._sizes = sizes
        self._stage = flow.train_stage
        self._policies = policies
        self._plan = StepPlan(policies.sharing, policies.cut)
        self._out = out
        self._told = -1  # the last step of which somebody was told that nothing is left of it
        self._last: int | None = None  # no step after this one is begun

    def is_past(self, pull: Pull) -> bool:
        """The pull is for a step that was closed before it came."""
        return pull.step < self._window.step and not self._window.over

    def is_beyond(self, pull: Pull) -> bool:
        """The pull is for a step that will not be trained in this life of the run."""
        return self._last is not None and pull.step > self._last

    def stop(self) -> int:
        """Begin no further step; returns the last one.

        The step in training is finished if some rank may be at its end already: there the ranks meet, and whoever does
        not come is waited for. Otherwise all of them are kept from it.
        """
        window = self._window
        if window.over:
            return window.step - 1
        self._last = window.step - (self._told < window.step and window.places > 0)
        return self._last

    def serve(self, parked: Parked[Pull]) -> bool:
        """Give the trainer its next micro-batch, or the word that there is none left in this step."""
        pull, window, worker = parked.request, self._window, parked.worker
        if not window.over and pull.step > window.step:
            return False
        groups: list[Group] | None = None
        if not window.over and window.places:
            groups = self._planned(worker) if self._plan.is_needed else self._streamed(self._policies.batcher)
        if groups is None:
            self._told = window.step
            self._out.append(Send(worker, closed(pull)))
        elif groups:
            self._grant(parked, groups)
        return groups is None or bool(groups)

    def _grant(self, parked: Parked[Pull], groups: list[Group]) -> None:
        self._window.take(groups)
        slots = [slot for group in groups for slot in group.slots]
        # No deadline: what a trainer was told is in its step cannot be taken back, and a lost trainer gives it back.
        lease = self._board.lease(self._stage, slots, parked.worker, float("inf"), 0, self._window.step)
        for group in groups:
            self._retreat.record(group, "leased")
        self._out.extend(grant(self._board, self._lanes, parked.request, slots, lease, self._kept(slots)))

    def _streamed(self, batcher: Batcher) -> list[Group]:
        """The next micro-batch of what is ready; empty while it is not full."""
        ready, window = self._board.ready_groups[self._stage], self._window
        return window.choose(
            ready.values(),
            lambda: [self._board.groups[one] for one in window.waiting if one not in ready],
            self._policies.admission,
            batcher,
            self._sizes.tokens,
        )

    def _planned(self, worker: WorkerId) -> list[Group] | None:
        """The worker's next micro-batch of a step that is planned as a whole; None when its share is done."""
        plan, window = self._plan, self._window
        # A place is free that the plan knows nothing of when a group was dropped that had been taken.
        if not plan.holds(window.step, self._board.groups) or plan.left(window.taken) < window.places:
            whole = self._streamed(GroupCount(window.places))
            if not whole:
                return []
            plan.make(window.step, whole, self._sizes.tokens)
            window.changed = True  # other ranks may wait for their shares
        share = [group for group in plan.share_of(worker) if group.id not in window.taken]
        if not share:
            return None
        # What was lost since the plan was made is waited for, not replaced.
        ready = self._board.ready_groups[self._stage]
        here = list(itertools.takewhile(lambda group: group.id in ready, share))
        batch = micro_batch(here, self._policies.batcher, self._sizes.tokens)
        return batch if len(batch) < len(here) or len(here) == len(share) else []

    def _kept(self, slots: Sequence[Slot]) -> tuple[Values, ...]:
        kept = [self._plan.kept(slot) for slot in slots]
        return () if None in kept else (Values(KEPT_TOKENS, tuple(float(count or 0) for count in kept)),)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        self._plan.forget(worker)

    def step_done(self, worker: WorkerId, message: StepDone) -> None:
        """The optimiser has stepped: everything that was taken is trained."""
        window = self._window
        if message.step != window.step or window.places != 0 or window.over:
            raise RemoteProtocolError(
                f"{worker} ended step {message.step}, but step {window.step} is in training with {window.places} "
                "places open"
            )
        if fault := unfit(message.metrics, {}):
            raise RemoteProtocolError(f"{worker} ended step {message.step}, and {fault}")
        trained = window.close()
        slots = [slot for group in trained for slot in group.slots]
        lags = tuple(message.step - (slot.oldest_version() or 0) for slot in slots)
        columns = sorted({column for slot in slots for column in slot.inline})
        means = tuple((name, sum(slot.inline[name] for slot in slots) / len(slots)) for name in columns)
        tokens = sum(map(self._sizes.tokens, trained))
        done = StepClosed(message.step, len(trained), len(slots), tokens, lags, means, message.metrics)
        for group in trained:
            self._retreat.record(group, "trained", step=message.step)
        self._out += [done, Keep(Reached(STEP, window.step))]
        self._retreat.close(trained)
        self._retreat.drop_expired()

    def plan_again(self) -> None:
        """The controller came back in the middle of this step: what is left of it goes to whoever asks."""
        self._plan.step = self._window.step

    def saved(self, worker: WorkerId, message: Saved) -> None:
        """A checkpoint waits for the ledger: what the one has trained, the other has to know."""
        if message.step != self._window.step:
            raise RemoteProtocolError(
                f"{worker} saved its state after {message.step} steps, but {self._window.step} are closed"
            )
        self._out.append(Persist(worker, message.request))
