"""Discrete-event simulation of a whole run: a real `Core`, and workers that take time and compute nothing.

Sequences end when the simulated decoder finishes them, weights arrive after a transfer time, and the trainer takes a
number of seconds per token.
"""

import hashlib
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from flowrt.controller.core import Core
from flowrt.controller.events import EndRun, Event, MessageReceived, Send, StepClosed, WorkerConnected
from flowrt.controller.policies.admission import StrictLag
from flowrt.controller.policies.batching import TokenBudget
from flowrt.controller.policies.dispatch.base import Dispatch, Fifo
from flowrt.controller.policies.group_filter import REWARD, GroupFilter, KeepAll
from flowrt.controller.policies.weight_sync import DelayedUpdate, WeightSyncPolicy
from flowrt.controller.settings import Dataflow, Policies, Settings
from flowrt.engines.simulated.workload import GenerationCost, Lengths, SimulatedDecoder, TrainCost
from flowrt.ids import ROLLOUT, SOURCE, TRAINER, WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import NO_BASE, Column, ColumnLengths, Part, Stage, Values, Weights

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
SCORED_FLOW = Dataflow(
    columns=FLOW.columns,
    stages=(
        Stage("rollout", ("prompt",), ("response", REWARD), generates=True),
        Stage("train", ("response", REWARD), (), flow="train", whole_groups=True),
    ),
    train_stage="train",
    train_flow="train",
    token_columns=("response",),
)
"""`FLOW` with a reward of 0 or 1 for each sample, committed with its response."""
SOURCE_WORKER = WorkerId(SOURCE)
TRAINER_WORKER = WorkerId(TRAINER)


@dataclass(frozen=True)
class ClusterPlan:
    """A job and a cluster; times are in simulated seconds."""

    workers: int
    """Rollout workers."""
    rows: int
    """Sequences that one worker generates at the same time."""
    groups_per_step: int
    members: int
    """Samples of a group."""
    steps: int
    lengths: Lengths
    """Distribution of response lengths in tokens."""
    decode: GenerationCost
    train: TrainCost
    bound: int = 1
    """Staleness bound in versions."""
    transfer_s: float = 1.0
    """Time from publication of a version to its arrival at a worker that fetches it."""
    prompts: int = 10**9
    """Distinct prompts; each epoch offers all of them once."""
    micro_batch_tokens: int = 8192
    dispatch: Dispatch = field(default_factory=Fifo)
    weight_sync: WeightSyncPolicy = field(default_factory=DelayedUpdate)
    solve_rate: float | None = None
    """Probability of a reward of 1, otherwise it is 0; None: there are no rewards."""
    group_filter: GroupFilter = field(default_factory=KeepAll)
    """Any but `KeepAll` decides on rewards, so it needs ``solve_rate``."""
    filter_tries: int = 128
    """Most groups that ``group_filter`` drops in a step."""


@dataclass
class _Rollout:
    """A rollout worker."""

    decoder: SimulatedDecoder
    timer: int = 0  # number of the newest timer event; earlier ones are ignored, because the batch has changed
    pulling: bool = False
    version: int = 0
    staged: int = 0
    leases: dict[int, int] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)


class ClusterSimulation:
    """One simulated run.

    Attributes:
        now_s: the virtual time in seconds.
        events: number of events that the core has handled.
        steps: for each closed step, its time in virtual seconds and the core's command.
        row_s: total seconds in which rows of the workers were occupied by a sequence; set by `run`.
        core: the state machine.
    """

    def __init__(self, plan: ClusterPlan, make_core: Callable[[Settings, Dataflow, Policies], Core] = Core) -> None:
        self.plan = plan
        self.now_s = 0.0
        self.events = 0
        self.steps: list[tuple[float, StepClosed]] = []
        self.row_s = 0.0
        policies = Policies(
            StrictLag(plan.bound),
            plan.dispatch,
            TokenBudget(plan.micro_batch_tokens),
            plan.weight_sync,
            group_filter=plan.group_filter,
        )
        settings = Settings(
            steps=plan.steps,
            groups_per_step=plan.groups_per_step,
            completing_roles=(TRAINER,),
            filter_tries=plan.filter_tries,
            lease_s=1e9,
            no_progress_timeout_s=1e9,
            worker_timeout_s=1e9,
        )
        self.core = make_core(settings, FLOW if plan.solve_rate is None else SCORED_FLOW, policies)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._prompts = itertools.count()
        self._requests = itertools.count()
        self._rollouts = {WorkerId(f"rollout{n}"): _Rollout(SimulatedDecoder(plan.decode)) for n in range(plan.workers)}
        self._training_until_s = 0.0
        self._step = 0

    def run(self) -> float:
        """Run to the end. Returns the virtual seconds until the last step is closed.

        Raises AssertionError if no event is left before the run has ended, or the core refuses a message.
        """
        for worker, role in self._roles().items():
            self._handle(WorkerConnected(worker, role, "host"))
        for _ in range(self.plan.groups_per_step):
            self._offer()
        for worker in self._rollouts:
            self._send(worker, m.WeightsActivated("policy", 0))
            self._pull(worker)
        self._pull_to_train()
        while self.core.ended is None:
            assert self._agenda, f"no event is left at {self.now_s:.1f} s; waiting: {self.core.waiting()[:5]}"
            self.now_s, _, action = heapq.heappop(self._agenda)
            action()
        self.row_s = sum(rollout.decoder.row_s for rollout in self._rollouts.values())
        return self.steps[-1][0]

    def _roles(self) -> dict[WorkerId, str]:
        return {SOURCE_WORKER: SOURCE, TRAINER_WORKER: TRAINER} | dict.fromkeys(self._rollouts, ROLLOUT)

    # ---- messages to and from the core

    def _send(self, worker: WorkerId, message: m.Message) -> None:
        self._handle(MessageReceived(worker, message))

    def _handle(self, event: Event) -> None:
        self.events += 1
        for command in self.core.transition(event, self.now_s):
            match command:
                case Send(worker, message):
                    self._at(self.now_s, partial(self._receive, worker, message))
                case StepClosed():
                    self.steps.append((self.now_s, command))
                case EndRun(reason, code):
                    assert code == 0, reason

    def _receive(self, worker: WorkerId, message: m.Message) -> None:
        match message:
            case m.OfferAccepted(_, first) if first >= 0:
                self._offer()
            case m.Grant() if worker == TRAINER_WORKER:
                self._train(message)
            case m.Grant():
                self._generate(worker, message)
            case m.ReceiveWeights(_, weights):
                self._at(self.now_s + self.plan.transfer_s, partial(self._stage, worker, weights.version))
            case m.Rejected(_, reason):
                raise AssertionError(f"the core rejected a message of {worker}: {reason}")

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (at_s, next(self._order), action))

    # ---- the source

    def _offer(self) -> None:
        number = next(self._prompts)
        epoch, prompt = divmod(number, self.plan.prompts)
        lengths = (ColumnLengths("prompt", (100,)),)
        self._send(
            SOURCE_WORKER,
            m.Offer(
                request=number,
                flow="train",
                prompts=(prompt,),
                epoch=epoch,
                members=self.plan.members,
                at_least=0,
                lengths=lengths,
                tags=(),
            ),
        )

    # ---- rollout workers

    def _pull(self, worker: WorkerId) -> None:
        rollout = self._rollouts[worker]
        slots = self.plan.rows - rollout.decoder.running
        if slots and not rollout.pulling and rollout.staged == rollout.version:
            rollout.pulling = True
            self._send(worker, m.Pull(request=next(self._requests), stage="rollout", slots=slots, tokens=0, step=-1))

    def _generate(self, worker: WorkerId, grant: m.Grant) -> None:
        rollout, plan = self._rollouts[worker], self.plan
        rollout.pulling = False
        self._advance(worker)
        for slot, prompt, epoch, member in zip(grant.slots, grant.prompts, grant.epochs, grant.members, strict=True):
            length = plan.lengths.draw(str(prompt).encode(), (epoch * plan.prompts + prompt) * plan.members + member)
            rollout.leases[slot], rollout.lengths[slot] = grant.lease, length
            rollout.decoder.add(slot, length)
        self._set_timer(worker)
        self._pull(worker)

    def _advance(self, worker: WorkerId) -> None:
        """Commit the sequences that have ended."""
        rollout = self._rollouts[worker]
        for slot, _ in rollout.decoder.advance(self.now_s):
            length = rollout.lengths.pop(slot)
            part, spans = Part("response", (slot,), (length,)), ((rollout.version, length),)
            lease = rollout.leases.pop(slot)
            self._send(
                worker,
                m.Commit(
                    request=next(self._requests),
                    stage="rollout",
                    slots=(slot,),
                    leases=(lease,),
                    parts=(part,),
                    inline=self._reward(slot),
                    spans=spans,
                ),
            )

    def _reward(self, slot: int) -> tuple[Values, ...]:
        """The reward of a sample, drawn from a hash of its slot."""
        if self.plan.solve_rate is None:
            return ()
        digest = hashlib.blake2b(f"reward {slot}".encode(), digest_size=7).digest()
        return (Values(REWARD, (float(int.from_bytes(digest) < self.plan.solve_rate * 2**56),)),)

    def _set_timer(self, worker: WorkerId) -> None:
        rollout = self._rollouts[worker]
        rollout.timer += 1
        if rollout.decoder.running:
            timer = rollout.timer
            self._at(rollout.decoder.next_finish(), partial(self._on_timer, worker, timer))

    def _on_timer(self, worker: WorkerId, timer: int) -> None:
        if self._rollouts[worker].timer == timer:
            self._advance(worker)
            self._set_timer(worker)
            self._swap(worker)
            self._pull(worker)

    def _stage(self, worker: WorkerId, version: int) -> None:
        rollout = self._rollouts[worker]
        rollout.staged = max(rollout.staged, version)
        self._send(worker, m.WeightsStaged("policy", version))
        self._advance(worker)
        self._set_timer(worker)
        self._swap(worker)

    def _swap(self, worker: WorkerId) -> None:
        """Swap weights once no sequence is running. While a version is staged, `_pull` starts no sequence."""
        rollout = self._rollouts[worker]
        if rollout.staged > rollout.version and not rollout.decoder.running:
            rollout.version = rollout.staged
            rollout.decoder.stall(self.plan.decode.load_s)
            self._send(worker, m.WeightsActivated("policy", rollout.version))
            self._pull(worker)

    # ---- the trainer

    def _pull_to_train(self) -> None:
        self._send(
            TRAINER_WORKER, m.Pull(request=next(self._requests), stage="train", slots=0, tokens=0, step=self._step)
        )

    def _train(self, grant: m.Grant) -> None:
        begin_s = max(self.now_s, self._training_until_s)
        if grant.closed:
            self._at(begin_s + self.plan.train.optimizer_s, self._end_step)
            return
        tokens = sum(sum(part.lengths) for part in grant.parts)
        self._training_until_s = begin_s + self.plan.train.accumulate(tokens)
        self._at(self._training_until_s, self._pull_to_train)

    def _end_step(self) -> None:
        self._send(TRAINER_WORKER, m.StepCompleted(self._step, ()))
        self._step += 1
        if self._step == self.plan.steps:
            self._send(TRAINER_WORKER, m.RoleCompleted())
            return
        whole = Weights(model="policy", version=self._step, base=NO_BASE, bucket_bytes=(8,), checksum=0)
        self._send(TRAINER_WORKER, m.Publish((whole,), ()))
        self._pull_to_train()
