"""Why parked requests wait: a cause and a root for each worker, recorded when the core's state changes.

- A wait is classified from the state during it, never from the state after the event that ended it: the effects of an
  event are classified before the next event is applied, with the time of the change as their start.
- The cost is bounded: passes over all N waiting workers are ``PASS_GAP_S`` x N apart, or `MAX_GAP_S` if that is less,
  however many changes and grants there are. The recorded time of a change that concerns all workers is wrong by at most
  that time, and a wait that is shorter than `MIN_GAP_S` is not recorded.
- A root may change without a change of cause (another worker holds the slowest sample). All waits are classified again
  after N + `MIN_LEASES` grants, and after `MAX_GAP_S`, by such a pass.
"""

from collections import deque
from itertools import islice
from typing import NamedTuple

from flowrt.controller.attribution.causes import Cause, WaitInterval
from flowrt.controller.state.parked_requests import ParkedRequests
from flowrt.controller.state.slots import Group
from flowrt.controller.state.state import Environment, State
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m

MIN_GAP_S = 0.0005
PASS_GAP_S = 0.0002
MAX_GAP_S = 0.5
CHECK_GAP_S = 0.05
"""Seconds after which the next event causes a classification, while any worker waits."""
MIN_LEASES = 16
MAX_KEPT = 200_000
"""Waits that are kept for `take`; the oldest are dropped if nothing takes them."""
MAX_GROUPS = 16
"""Maximum number of groups that are searched for the sample that delays a stage: the oldest that are not ready to be
trained."""
MAX_SEARCHED = 512
"""Maximum number of waiting groups that are examined to find these."""
OF_ONE: frozenset[type[m.Message]] = frozenset((m.WeightsStaged, m.WeightsActivated))
"""Messages that may change the cause of the sender's wait."""
OF_ALL: frozenset[type[m.Message]] = frozenset((m.Publish, m.StepCompleted, m.EndOfData, m.Evaluated))
"""Messages that may change the cause of any wait."""
Reason = tuple[Cause, str]
NEVER_S = float("inf")


class _OpenWait(NamedTuple):
    reason: Reason
    start_s: float


class WaitLog:
    """The current wait of each worker, and the waits that have ended since the last `take`."""

    def __init__(self) -> None:
        self.check_s = NEVER_S
        """From this time on `classify` has to be called before the next event is applied."""
        self._open: dict[WorkerId, _OpenWait] = {}
        self._due: dict[WorkerId, float] = {}  # since when the wait of a worker may have another cause
        self._all_due_s: float | None = None
        self._pass_s = 0.0  # the next pass over all waiting workers is not before this time
        self._refresh_s = 0.0  # from this time on, or this number of leases, all waits are classified again
        self._refresh_leases = 0
        self._ended: deque[WaitInterval] = deque(maxlen=MAX_KEPT)

    # ---- what the core calls

    def after_event(self, state: State, env: Environment, now: float) -> None:
        """Take the workers whose parked requests have changed: end their waits, or mark these for classification."""
        requests = state.requests
        trainers = requests.pullers.get(env.flow.train_stage, {})
        for worker in requests.take_changed():
            if requests.first(worker) is None:
                self._end(worker, now)
                self._due.pop(worker, None)
            else:
                self._due.setdefault(worker, now)
            if worker in trainers or worker in requests.offerers:
                self.note_all(now)
        self._schedule(now)

    def note_message(self, worker: WorkerId, kind: type[m.Message], now: float) -> None:
        """Mark the waits whose causes a message may have changed; its kind is in `OF_ONE` or `OF_ALL`."""
        if kind in OF_ALL:
            self.note_all(now)
        elif worker in self._open:
            self._due.setdefault(worker, now)
        self._schedule(now)

    def note_all(self, now: float) -> None:
        """Mark all waits for classification, because each may have another cause."""
        if self._all_due_s is None:
            self._all_due_s = now
        self._schedule(now)

    def classify(self, state: State, env: Environment, now: float, changed_s: float) -> None:
        """Classify the marked waits; end those with another reason than before, and begin new ones.

        Args:
            state: the state before the event at ``now`` is applied.
            env: the configuration.
            now: seconds on the controller's clock.
            changed_s: time of the latest event; the state has not changed since.
        """
        find = Classifier(state, env)
        due, all_due_s = self._due, self._all_due_s
        granted = state.table.leases_granted
        is_due = all_due_s is not None or now >= self._refresh_s or granted >= self._refresh_leases
        is_full = is_due and now >= self._pass_s
        since_s = changed_s if all_due_s is None else all_due_s
        for worker in self._changed(find, state.requests) if is_full else list(due):
            reason = find.reason(worker)
            before = self._open.get(worker)
            if before is not None and reason == before.reason:
                continue
            start_s = due.get(worker, since_s)
            if before is not None:
                start_s = max(start_s, before.start_s)
                self._end(worker, start_s)
            if reason is not None:
                self._open[worker] = _OpenWait(reason, start_s)
        self._due = {}
        self.check_s = now + CHECK_GAP_S if self._open else NEVER_S
        if is_full:
            self._all_due_s = None
            self._pass_s = now + self._pass_gap_s()
            self._refresh_s = now + MAX_GAP_S
            self._refresh_leases = granted + MIN_LEASES + len(self._open)
        self._schedule(now)

    def _changed(self, find: "Classifier", requests: ParkedRequests) -> list[WorkerId]:
        """The waiting workers whose reasons may differ from the recorded ones."""
        changed: dict[WorkerId, None] = {}
        known = self._open
        for stage, workers in requests.waiting_pullers():
            shared = find.shared(stage)
            for worker in workers:
                before = known.get(worker)
                if before is None or before.reason != (shared or find.of_version(worker)):
                    changed[worker] = None
        return [*changed, *requests.waiting_offerers()]

    # ---- what the server reads

    def take(self) -> list[WaitInterval]:
        """The waits that have ended since the last call, in order of their ends."""
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def open_waits(self, now: float) -> list[WaitInterval]:
        """The waits in progress at ``now``, with that as their end."""
        return [WaitInterval(worker, *wait.reason, wait.start_s, now) for worker, wait in self._open.items()]

    def _end(self, worker: WorkerId, now: float) -> None:
        ended = self._open.pop(worker, None)
        if ended is not None and now > ended.start_s:
            self._ended.append(WaitInterval(worker, *ended.reason, ended.start_s, now))

    def _schedule(self, now: float) -> None:
        if self._all_due_s is not None:
            self.check_s = min(self.check_s, max(now + self._pass_gap_s(), self._pass_s))
        if self._due:
            self.check_s = min(self.check_s, now + MIN_GAP_S)

    def _pass_gap_s(self) -> float:
        """Seconds between two passes over all waiting workers."""
        return min(max(MIN_GAP_S, PASS_GAP_S * len(self._open)), MAX_GAP_S)


class Classifier:
    """Finds causes and roots in one state; results that several workers share are computed once."""

    def __init__(self, state: State, env: Environment) -> None:
        self._state = state
        self._env = env
        self._step_root: str | None = None
        self._found: list[Group] | None = None
        self._senders: dict[WorkerId, WorkerId] = {}  # by receiver: see `_sender`
        self._stages: dict[str, Reason] = {}  # of stages in which no worker can start anything

    def reason(self, worker: WorkerId) -> Reason | None:
        """Why a worker waits; None if it has no parked request, or while the controller recovers what it holds."""
        if self._state.recovery.is_parked(worker):
            return None
        parked = self._state.requests.first(worker)
        if parked is None:
            return None
        request = parked.request
        if isinstance(request, m.Offer):
            return self._of_offer(request)
        if request.stage == self._env.flow.train_stage:
            return Cause.SAMPLES, self._trainer_root(worker, request.step)
        return self._of_stage(worker, request.stage)

    def _of_offer(self, offer: m.Offer) -> Reason:
        if offer.flow == self._env.flow.train_flow:
            return Cause.GATE, self.step_root()
        exact = self._state.exact_version(offer)
        if exact is not None and exact > self._state.models.policy.newest:
            return Cause.WEIGHTS, self.step_root()
        stages = self._state.table.flows.of(offer.flow)
        undone = self._state.table.undone
        return Cause.GATE, self._at_work(next((stage.name for stage in stages if undone[stage.name]), ""))

    def _of_stage(self, worker: WorkerId, stage: str) -> Reason:
        """The reason of a pull of any stage but the train stage."""
        return self.shared(stage) or self.of_version(worker)

    def shared(self, stage: str) -> Reason | None:
        """The reason of all pulls of a stage; None if it depends on the version that a worker uses."""
        if stage == self._env.flow.train_stage:
            return Cause.SAMPLES, self._missing_root()
        if self._state.table.stages[stage].generates and self._state.table.count_ready(stage):
            return None
        reason = self._stages.get(stage)
        if reason is None:
            self._stages[stage] = Cause.SAMPLES, ""  # where stages need each other in a cycle
            reason = self._stages[stage] = self._of_empty_stage(stage)
        return reason

    def of_version(self, worker: WorkerId) -> Reason:
        """The reason of a worker's pull of a generating stage, of whose ready slots it may start none."""
        weights = self._state.models.policy
        fetch, receiver = weights.fetching.get(worker), weights.receivers.get(worker)
        if fetch is not None:
            return Cause.WEIGHTS, self._sender(worker)
        if receiver is not None and receiver.staged > receiver.applied:
            return Cause.UPDATE, worker
        if receiver is not None and receiver.staged < weights.latest:
            return Cause.WEIGHTS, weights.publisher or ""
        return Cause.GATE, self.step_root()

    def _sender(self, worker: WorkerId) -> WorkerId:
        """The first worker of a chain of relays, which has the complete weights that ``worker`` fetches."""
        fetching, known = self._state.models.policy.fetching, self._senders
        path: list[WorkerId] = []
        while worker not in known and (fetch := fetching.get(worker)) is not None and len(path) < len(fetching):
            path.append(worker)
            worker = fetch.holder
        sender = known.get(worker, worker)
        known.update(dict.fromkeys(path, sender))
        return sender

    def _of_empty_stage(self, stage: str) -> Reason:
        """The reason of a pull of a stage without ready slots: a worker that has leases of the stage which makes the
        missing columns; without such a worker, the reason why that stage waits.
        """
        flows = self._state.table.flows
        makers = [flows.makers[need] for need in flows.stages[stage].needs if need in flows.makers]
        for maker in makers:
            if root := self._leased(maker):
                return Cause.SAMPLES, root
        for maker in makers:
            parked = [worker for worker in self._state.requests.pullers[maker] if self._state.requests.first(worker)]
            if not parked:
                return Cause.SAMPLES, self._at_work(maker)
            return self._of_stage(parked[0], maker)
        if self._is_offer_parked():
            return Cause.GATE, self.step_root()
        return Cause.SAMPLES, next(iter(self._state.requests.offerers), "")

    def _is_offer_parked(self) -> bool:
        flow = self._env.flow.train_flow
        return bool(flow) and self._state.requests.is_offer_parked(flow)

    # ---- roots

    def step_root(self) -> str:
        """The worker that delays the end of the step in training; empty if none is found."""
        if self._step_root is None:
            self._step_root = ""
            self._step_root = self._trainer_at_work() or self._missing_root()
        return self._step_root

    def _trainer_root(self, worker: WorkerId, step: int) -> str:
        """The worker that delays a trainer which pulls for ``step``."""
        if step > self._state.window.step:
            return self._trainer_at_work() or worker
        return self._missing_root() or self._trainer_at_work()

    def _trainer_at_work(self) -> str:
        return self._at_work(self._env.flow.train_stage)

    def _at_work(self, stage: str) -> str:
        """The first worker that has pulled the stage and has no parked request; empty if there is none."""
        requests = self._state.requests
        return next((worker for worker in requests.pullers.get(stage, ()) if requests.first(worker) is None), "")

    def _missing_root(self) -> str:
        """The worker that delays the oldest group which is not ready to be trained."""
        for group in self._unready():
            return self._group_root(group)
        return next(iter(self._state.requests.offerers), "")

    def _unready(self) -> list[Group]:
        """The oldest groups of the window that are not ready to be trained."""
        if self._found is None:
            table = self._state.table
            ready = table.ready_groups.get(self._env.flow.train_stage, ())
            oldest = islice(self._state.window.waiting, MAX_SEARCHED)
            self._found = [
                table.groups[group_id]
                for group_id in islice((group_id for group_id in oldest if group_id not in ready), MAX_GROUPS)
            ]
        return self._found

    def _group_root(self, group: Group) -> str:
        """The worker that has leased, or is expected to lease next, a sample of the group for its first stage that is
        not done for all samples.
        """
        table = self._state.table
        for stage in table.flows.of(group.flow):
            undone = [slot for slot in group.slots if not table.is_done(slot, stage.name)]
            for slot in undone:
                if (lease := slot.leases.get(stage.name)) is not None:
                    return lease.worker
            if undone:
                return self._next_of(stage.name)
        return ""

    def _next_of(self, stage: str) -> str:
        """The worker that delays a sample which is ready for a stage: a worker of the stage without a parked request;
        otherwise one that pulls the stage, or the sender of the weights that it fetches.
        """
        if root := self._at_work(stage):
            return root
        weights = self._state.models.policy
        for worker in self._state.requests.pullers.get(stage, ()):
            return self._sender(worker) if worker in weights.fetching else worker
        return ""

    def _leased(self, stage: str) -> str:
        """A worker that has leased samples for a stage, the oldest group first; in a stream, any worker at work on the
        stage. Empty if there is none.
        """
        for group in self._unready():
            for slot in group.slots:
                if (lease := slot.leases.get(stage)) is not None:
                    return lease.worker
        return "" if self._env.flow.train_stage else self._at_work(stage)
