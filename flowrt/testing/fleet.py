"""A run of thousands of workers in simulated time: a real `Core`, workers that take time and compute nothing.

Everything that happens is an event on a driven clock: sequences end when the decoder says so, weights arrive after a
transfer time, the trainer takes its seconds a token. A run of hours on a whole cluster takes seconds, and always
takes the same course.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from flowrt.controller.admission import StrictLag
from flowrt.controller.batchers import TokenBudget
from flowrt.controller.core import Core
from flowrt.controller.dispatch import Dispatch, Fifo
from flowrt.controller.events import End, Event, Joined, Said, Send, StepClosed
from flowrt.controller.refresh import DelayedUpdate, Refresh
from flowrt.controller.settings import Dataflow, Policies, Settings
from flowrt.engines.costs import DecodeCost, TrainCost
from flowrt.engines.decoder import SimulatedDecoder
from flowrt.engines.lengths import Lengths
from flowrt.ids import WorkerId
from flowrt.wire import messages as m
from flowrt.wire.records import NO_BASE, Column, Part, Stage, Weights
from flowrt.wire.records import Lengths as OfferedLengths

FLOW = Dataflow(
    columns=(Column("prompt", "int32", "group"), Column("response", "int32", "slot")),
    stages=(
        Stage("rollout", ("prompt",), ("response",), generates=True),
        Stage("train", ("response",), (), flow="train", whole_groups=True),
    ),
    train_stage="train",
    train_flow="train",
    token_columns=("response",),
)
SOURCE, TRAINER = WorkerId("source"), WorkerId("trainer")


@dataclass(frozen=True)
class FleetPlan:
    """A job and a cluster, in simulated seconds."""

    workers: int
    rows: int
    groups_per_step: int
    members: int
    steps: int
    lengths: Lengths
    decode: DecodeCost
    train: TrainCost
    bound: int = 1
    transfer_s: float = 1.0
    prompts: int = 10**9  # distinct ones; later epochs bring them again
    micro_batch_tokens: int = 8192
    dispatch: Dispatch = field(default_factory=Fifo)
    refresh: Refresh = field(default_factory=DelayedUpdate)


@dataclass
class _Rollout:
    """A worker that generates."""

    decoder: SimulatedDecoder
    alarm: int = 0  # of several, only the last one set counts
    pulling: bool = False
    version: int = 0
    staged: int = 0
    leases: dict[int, int] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)


class Fleet:
    """Make one, `run` it, read what it counted."""

    def __init__(self, plan: FleetPlan) -> None:
        self.plan = plan
        self.now_s = 0.0
        self.events = 0  # that the core handled
        self.steps: list[tuple[float, StepClosed]] = []  # when each step ended
        self.row_s = 0.0  # seconds of all rows in which a sequence ran
        policies = Policies(StrictLag(plan.bound), plan.dispatch, TokenBudget(plan.micro_batch_tokens), plan.refresh)
        settings = Settings(plan.steps, plan.groups_per_step, ("trainer",), lease_s=1e9, stall_s=1e9, silence_s=1e9)
        self.core = Core(settings, FLOW, policies)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._prompts = itertools.count()
        self._requests = itertools.count()
        self._rollouts = {WorkerId(f"rollout{n}"): _Rollout(SimulatedDecoder(plan.decode)) for n in range(plan.workers)}
        self._training_until_s = 0.0
        self._step = 0

    def run(self) -> float:
        """Simulated seconds until the last step is trained. Raises AssertionError when the run cannot go on."""
        for worker, role in [(SOURCE, "source"), (TRAINER, "trainer"), *((one, "rollout") for one in self._rollouts)]:
            self._handle(Joined(worker, role, "host"))
        for _ in range(self.plan.groups_per_step):
            self._offer()
        for worker in self._rollouts:
            self._say(worker, m.Applied("policy", 0))
            self._pull(worker)
        self._pull_to_train()
        while self.core.ended is None:
            assert self._agenda, f"nobody can do anything at {self.now_s:.1f} s: {self.core.samples.waiting()[:5]}"
            self.now_s, _, happen = heapq.heappop(self._agenda)
            happen()
        self.row_s = sum(one.decoder.row_s for one in self._rollouts.values())
        return self.steps[-1][0]

    # ---- the core and what it says

    def _say(self, worker: WorkerId, message: m.Message) -> None:
        self._handle(Said(worker, message))

    def _handle(self, event: Event) -> None:
        self.events += 1
        for command in self.core.handle(event, self.now_s):
            match command:
                case Send(worker, message):
                    self._at(self.now_s, partial(self._hear, worker, message))
                case StepClosed():
                    self.steps.append((self.now_s, command))
                case End(reason, code):
                    assert code == 0, reason

    def _hear(self, worker: WorkerId, message: m.Message) -> None:
        match message:
            case m.Opened(_, first) if first >= 0:
                self._offer()
            case m.Grant() if worker == TRAINER:
                self._train(message)
            case m.Grant():
                self._begin(worker, message)
            case m.Fetch(_, weights):
                self._at(self.now_s + self.plan.transfer_s, lambda: self._stage(worker, weights.version))
            case m.Refused(_, reason):
                raise AssertionError(f"{worker} was refused: {reason}")

    def _at(self, at_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (at_s, next(self._order), happen))

    # ---- the source

    def _offer(self) -> None:
        number = next(self._prompts)
        epoch, prompt = divmod(number, self.plan.prompts)
        lengths = (OfferedLengths("prompt", (100,)),)
        self._say(SOURCE, m.Offer(number, "train", (prompt,), epoch, self.plan.members, 0, lengths, ()))

    # ---- rollout workers

    def _pull(self, worker: WorkerId) -> None:
        one = self._rollouts[worker]
        room = self.plan.rows - one.decoder.running
        if room and not one.pulling and one.staged == one.version:
            one.pulling = True
            self._say(worker, m.Pull(next(self._requests), "rollout", room, 0, -1))

    def _begin(self, worker: WorkerId, grant: m.Grant) -> None:
        one, plan = self._rollouts[worker], self.plan
        one.pulling = False
        self._advance(worker)
        for slot, prompt, epoch, member in zip(grant.slots, grant.prompts, grant.epochs, grant.members, strict=True):
            length = plan.lengths.draw(str(prompt).encode(), (epoch * plan.prompts + prompt) * plan.members + member)
            one.leases[slot], one.lengths[slot] = grant.lease, length
            one.decoder.add(slot, length)
        self._set_alarm(worker)
        self._pull(worker)

    def _advance(self, worker: WorkerId) -> None:
        """Commit what has ended by now."""
        one = self._rollouts[worker]
        for slot, _ in one.decoder.advance(self.now_s):
            length = one.lengths.pop(slot)
            part, spans = Part("response", (slot,), (length,)), ((one.version, length),)
            lease = one.leases.pop(slot)
            self._say(worker, m.Commit(next(self._requests), "rollout", (slot,), (lease,), (part,), (), spans))

    def _set_alarm(self, worker: WorkerId) -> None:
        one = self._rollouts[worker]
        one.alarm += 1
        if one.decoder.running:
            alarm = one.alarm
            self._at(one.decoder.next_finish(), lambda: self._ring(worker, alarm))

    def _ring(self, worker: WorkerId, alarm: int) -> None:
        if self._rollouts[worker].alarm == alarm:
            self._advance(worker)
            self._set_alarm(worker)
            self._swap(worker)
            self._pull(worker)

    def _stage(self, worker: WorkerId, version: int) -> None:
        one = self._rollouts[worker]
        one.staged = max(one.staged, version)
        self._say(worker, m.Staged("policy", version))
        self._advance(worker)
        self._set_alarm(worker)
        self._swap(worker)

    def _swap(self, worker: WorkerId) -> None:
        """Between sequences: once weights are here, nothing is begun until everything has ended."""
        one = self._rollouts[worker]
        if one.staged > one.version and not one.decoder.running:
            one.version = one.staged
            one.decoder.stall(self.plan.decode.load_s)
            self._say(worker, m.Applied("policy", one.version))
            self._pull(worker)

    # ---- the trainer

    def _pull_to_train(self) -> None:
        self._say(TRAINER, m.Pull(next(self._requests), "train", 0, 0, self._step))

    def _train(self, grant: m.Grant) -> None:
        begin_s = max(self.now_s, self._training_until_s)
        if grant.closed:
            self._at(begin_s + self.plan.train.optimizer_s, self._end_step)
            return
        tokens = sum(sum(part.lengths) for part in grant.parts)
        self._training_until_s = begin_s + self.plan.train.accumulate(tokens)
        self._at(self._training_until_s, self._pull_to_train)

    def _end_step(self) -> None:
        self._say(TRAINER, m.StepDone(self._step, ()))
        self._step += 1
        if self._step == self.plan.steps:
            self._say(TRAINER, m.Finished())
            return
        whole = Weights("policy", self._step, NO_BASE, (8,), 0)
        self._say(TRAINER, m.Publish((whole,), ()))
        self._pull_to_train()
