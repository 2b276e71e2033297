"""Processor time of single events of a `Core` with many workers and slots, and the memory of one that runs for long."""

import gc
import time
from collections import deque
from dataclasses import dataclass
from statistics import median

from common.memory import status_bytes
from control_plane.weight_relay import RelayPlan, RelaySimulation

from flowrt.controller.core import Core
from flowrt.controller.events import (
    Command,
    Event,
    KernelAlive,
    MessageReceived,
    PreemptRun,
    Send,
    Tick,
    WorkerConnected,
    WorkerDisconnected,
)
from flowrt.controller.policies.admission import StrictLag
from flowrt.controller.policies.batching import GroupCount, TokenBudget
from flowrt.controller.policies.dispatch.base import Fifo
from flowrt.controller.policies.weight_sync import DelayedUpdate, Rolling, WeightSyncPolicy
from flowrt.controller.settings import Dataflow, Policies, Settings
from flowrt.ids import REWARD, ROLLOUT, SOURCE, TRAINER, WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import NO_BASE, Column, ColumnLengths, Part, Stage, Values, Weights

MODEL = "policy"
MEMBERS, STEP_GROUPS, RESPONSE_TOKENS = 8, 512, 500
REWARDS, DRAINING, STEPS = 16, 16, 4
LONG_S = 1e9
FLOW = Dataflow(
    columns=(
        Column("prompt", "int32", "group"),
        Column("response", "int32", "slot"),
        Column("logprobs", "float32", "slot"),
    ),
    stages=(
        Stage("rollout", ("prompt",), ("response", "logprobs"), generates=True),
        Stage("reward", ("response",), ("reward",)),
        Stage("evaluate", ("reward",), (), flow="eval"),
        Stage("train", ("prompt", "response", "logprobs", "reward"), (), flow="train", whole_groups=True),
    ),
    train_stage="train",
    train_flow="train",
    token_columns=("prompt", "response"),
)
SMALL_FLOW = Dataflow(
    columns=FLOW.columns,
    stages=(
        FLOW.stages[0],
        Stage("train", ("response", "logprobs"), (), flow="train", whole_groups=True),
    ),
    train_stage="train",
    train_flow="train",
    token_columns=FLOW.token_columns,
)
SOURCE_WORKER, TRAINER_WORKER = WorkerId(SOURCE), WorkerId(TRAINER)


class Run:
    """A run of a core that gets messages directly."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.now = 0.0
        self.requests = 0
        self.prompts = 0
        self.epoch_prompts = 10**9
        self.version = 0

    def event(self, event: Event) -> list[Command]:
        return self.core.transition(event, self.now)

    def send(self, worker: WorkerId, message: m.Message) -> list[Command]:
        return self.event(MessageReceived(worker, message))

    def timed_s(self, event: Event) -> float:
        """Processor time of an event, in seconds."""
        start_s = time.process_time()
        self.event(event)
        return time.process_time() - start_s

    def number(self) -> int:
        self.requests += 1
        return self.requests

    def join(self, worker: WorkerId, role: str) -> None:
        self.event(WorkerConnected(worker, role, "host"))
        if role == ROLLOUT:
            self.send(worker, m.WeightsActivated(MODEL, self.version))

    def offer(self, groups: int, members: int = MEMBERS) -> None:
        for _ in range(groups):
            epoch, prompt = divmod(self.prompts, self.epoch_prompts)
            self.prompts += 1
            (*_, accepted) = self.send(
                SOURCE_WORKER,
                m.Offer(
                    request=self.number(),
                    flow="train",
                    prompts=(prompt,),
                    epoch=epoch,
                    members=members,
                    at_least=0,
                    lengths=(ColumnLengths("prompt", (100,)),),
                    tags=(),
                ),
            )
            assert isinstance(accepted, Send), accepted
            assert isinstance(accepted.message, m.OfferAccepted), accepted

    def pull(self, worker: WorkerId, stage: str, slots: int, step: int = -1) -> m.Grant | None:
        """A grant with slots; None for one that closes the step."""
        commands = self.send(worker, m.Pull(request=self.number(), stage=stage, slots=slots, tokens=0, step=step))
        grants = [
            command.message
            for command in commands
            if isinstance(command, Send) and isinstance(command.message, m.Grant)
        ]
        assert grants, f"{worker} waits for {stage}: {self.core.waiting()[:3]}"
        return None if grants[0].closed else grants[0]

    def commit(self, worker: WorkerId, stage: str, grant: m.Grant) -> None:
        """Commit all slots of a grant at once."""
        slots = grant.slots
        parts: tuple[Part, ...] = ()
        inline: tuple[Values, ...] = ()
        spans: tuple[tuple[int, ...], ...] = ()
        if stage == "rollout":
            lengths = (RESPONSE_TOKENS,) * len(slots)
            parts = Part("response", slots, lengths), Part("logprobs", slots, lengths)
            spans = ((self.core.state.models.policy.applied_version(worker), RESPONSE_TOKENS),) * len(slots)
        else:
            inline = (Values("reward", tuple(float(slot % 3 > 0) for slot in slots)),)
        leases = (grant.lease,) * len(slots)
        request = self.number()
        self.send(
            worker,
            m.Commit(request=request, stage=stage, slots=slots, leases=leases, parts=parts, inline=inline, spans=spans),
        )

    def publish(self) -> list[Command]:
        self.version += 1
        whole = Weights(model=MODEL, version=self.version, base=NO_BASE, bucket_bytes=(8,), checksum=0)
        return self.send(TRAINER_WORKER, m.Publish((whole,), ()))

    def fetch_all(self, commands: list[Command]) -> int:
        """Let the receivers that are ordered to fetch do so, and those that follow; returns how many have."""
        orders, done = deque(commands), 0
        while orders:
            command = orders.popleft()
            if isinstance(command, Send) and isinstance(command.message, m.ReceiveWeights):
                version = command.message.weights.version
                orders += self.send(command.worker, m.WeightsStaged(MODEL, version))
                orders += self.send(command.worker, m.WeightsActivated(MODEL, version))
                done += 1
        return done


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a run."""

    workers: int
    slots: int
    step_groups: int = STEP_GROUPS

    @property
    def share(self) -> int:
        """Slots that a worker has generated, and as many that it generates."""
        return self.slots // self.workers // 2


def new_core(bound: int = 1, weight_sync: WeightSyncPolicy | None = None, groups: int = STEP_GROUPS) -> Core:
    settings = Settings(
        steps=10**9,
        groups_per_step=groups,
        checkpointing_roles=(TRAINER,),
        source_roles=(SOURCE,),
        lease_s=LONG_S,
        worker_timeout_s=30.0,
        no_progress_timeout_s=LONG_S,
    )
    weight_sync = DelayedUpdate() if weight_sync is None else weight_sync
    return Core(settings, FLOW, Policies(StrictLag(bound), Fifo(), TokenBudget(65_536), weight_sync))


def loaded_run(size: Size) -> Run:
    """Half of the slots are generated and scored, and half are in generation; all workers wait for slots."""
    groups = size.slots // MEMBERS
    of_step = min(size.step_groups, groups // 4)
    run = Run(new_core(bound=groups // of_step + STEPS + 1, groups=of_step))
    run.join(SOURCE_WORKER, SOURCE)
    run.join(TRAINER_WORKER, TRAINER)
    for number in range(REWARDS):
        run.join(WorkerId(f"{REWARD}{number}"), REWARD)
    rollouts = [WorkerId(f"{ROLLOUT}{number}") for number in range(size.workers)]
    for worker in rollouts:
        run.join(worker, ROLLOUT)
    run.offer(groups)
    for number, worker in enumerate(rollouts):
        generate(run, worker, size.share)
        score(run, WorkerId(f"{REWARD}{number % REWARDS}"), size.share)
    for worker in rollouts:
        assert run.pull(worker, "rollout", size.share) is not None
    gc.collect()
    gc.freeze()
    return run


def generate(run: Run, worker: WorkerId, slots: int) -> None:
    while slots > 0:
        grant = run.pull(worker, "rollout", slots)
        assert grant is not None
        run.commit(worker, "rollout", grant)
        slots -= len(grant.slots)


def score(run: Run, worker: WorkerId, slots: int) -> None:
    while slots > 0:
        grant = run.pull(worker, "reward", slots)
        assert grant is not None
        run.commit(worker, "reward", grant)
        slots -= len(grant.slots)


def steps(run: Run, count: int) -> tuple[list[float], list[float]]:
    """Train steps; returns the seconds of the first pull and of the end of each. As many groups are offered again, and
    as many are generated and scored.
    """
    refill = run.core.settings.groups_per_step
    first_s, closed_s = [], []
    for _ in range(count):
        step = run.core.state.window.step
        request = m.Pull(request=run.number(), stage="train", slots=0, tokens=0, step=step)
        first_s.append(run.timed_s(MessageReceived(TRAINER_WORKER, request)))
        while run.pull(TRAINER_WORKER, "train", 0, step) is not None:
            pass
        end = m.StepCompleted(step, (("loss", 0.5),))
        closed_s.append(run.timed_s(MessageReceived(TRAINER_WORKER, end)))
        run.offer(refill)
        for number in range(0, refill * MEMBERS, 64):
            worker = WorkerId(f"{ROLLOUT}{number // 64}")
            generate(run, worker, min(64, refill * MEMBERS - number))
            score(run, WorkerId(f"{REWARD}0"), min(64, refill * MEMBERS - number))
    return first_s, closed_s


def slot_costs(workers: int, slots: int) -> dict[str, float]:
    """Costs of events in a run with many slots: steps, draining workers, deaths, preemption."""
    size = Size(workers, slots)
    run = loaded_run(size)
    first_s, closed_s = steps(run, STEPS)
    costs = {"first_pull_ms": 1e3 * max(first_s), "step_closed_ms": 1e3 * median(closed_s)}
    names = iter(range(workers - 1, 0, -1))
    victims = [WorkerId(f"{ROLLOUT}{next(names)}") for _ in range(21)]
    deaths = [run.timed_s(WorkerDisconnected(victim, "killed")) for victim in victims]
    costs["death_ms"] = 1e3 * median(deaths)
    leaving = [WorkerId(f"{ROLLOUT}{next(names)}") for _ in range(DRAINING)]
    for worker in leaving:
        for lease in list(run.core.state.table.working["rollout"].get(worker, {}).values()):
            leased = tuple(lease.slots)
            leases = (lease.id,) * len(leased)
            run.send(worker, m.ReleaseLease(stage="rollout", slots=leased, leases=leases, lost=False, reason=""))
        run.send(worker, m.Drain(0, worker))
    costs["drain_tick_ms"] = 1e3 * median(run.timed_s(Tick()) for _ in range(11))
    dying = {WorkerId(f"{ROLLOUT}{next(names)}") for _ in range(min(200, workers // 4))}
    run.now += 1000.0
    for member in run.core.state.membership.members():
        if member.id not in dying:
            run.event(KernelAlive(member.id, run.now))
    costs["deaths_200_s"] = run.timed_s(Tick())
    assert not [worker for worker in dying if worker in run.core.state.membership]
    run.event(PreemptRun("the time limit", 1))
    alive = [member.id for member in run.core.state.membership.members() if member.role == ROLLOUT]
    beats = [MessageReceived(worker, m.Heartbeat(0.0, 0.0, 0.0)) for worker in alive[:1000]]
    start_s = time.process_time()
    for beat in beats:
        run.core.transition(beat, run.now)
    costs["preempting_us"] = 1e6 * (time.process_time() - start_s) / len(beats)
    gc.unfreeze()
    return costs


def weight_costs(workers: int) -> dict[str, float]:
    """Costs of weight sync with many receivers: a rolling version; a chain of relays whose first receiver dies."""
    run = receivers_only(workers, Rolling(16))
    run.fetch_all(run.publish())
    start_s = time.process_time()
    count = run.fetch_all(run.publish())
    assert count == workers, f"{count} of {workers} receivers have the version"
    costs = {"rolling_version_s": time.process_time() - start_s}
    run = receivers_only(workers, DelayedUpdate())
    orders = {
        command.worker: command.message
        for command in run.publish()
        if isinstance(command, Send) and isinstance(command.message, m.ReceiveWeights)
    }
    first = next(worker for worker, order in orders.items() if order.turn.sender == TRAINER_WORKER)
    start_s = time.process_time()
    again = run.event(WorkerDisconnected(first, "killed"))
    cut = {first}
    for worker, order in orders.items():  # each receiver is ordered after its holder
        if order.turn.sender in cut:
            cut.add(worker)
            again += run.send(worker, m.FetchFailed(order.turn, order.weights, "its sender has died"))
    costs["relay_break_s"] = time.process_time() - start_s
    assert run.fetch_all(again) >= len(cut) - 1
    return costs


def receivers_only(workers: int, weight_sync: WeightSyncPolicy) -> Run:
    run = Run(new_core(weight_sync=weight_sync))
    run.join(TRAINER_WORKER, TRAINER)
    for number in range(workers):
        run.join(WorkerId(f"{ROLLOUT}{number}"), ROLLOUT)
    gc.collect()
    return run


def relay_ratio(receivers: int) -> float:
    """Time until all receivers have a version when one dies and one link is 10 times slower, over the usual time.

    The slow link is that of the receiver, and the victim is a receiver of the publisher or of such a receiver, behind
    which most other receivers are.
    """
    usual = RelaySimulation(RelayPlan(receivers))
    usual_s = usual.run()
    behind = dict.fromkeys(usual.holder_of, 0)
    for name in usual.holder_of:
        above = name
        while (above := usual.holder_of.get(above, TRAINER_WORKER)) != TRAINER_WORKER:
            behind[above] += 1
    of_publisher = [name for name, holder in usual.holder_of.items() if holder == TRAINER_WORKER]
    slow = max(of_publisher, key=behind.__getitem__)
    victim = max((name for name in behind if name != slow), key=behind.__getitem__)
    faulty = RelayPlan(receivers, slow={(TRAINER_WORKER, slow): 10.0}, deaths={victim: usual_s / 4})
    return RelaySimulation(faulty).run() / usual_s


def month_growth(steps: int, deaths: int) -> float:
    """Growth of the memory of a core over the second half of a run of many steps, as a fraction of that at half time.

    Each step trains one sample; 1,000 prompts are an epoch; workers with new names join and die in between.
    """
    settings = Settings(steps=10**9, worker_timeout_s=LONG_S, lease_s=LONG_S, no_progress_timeout_s=LONG_S)
    run = Run(Core(settings, SMALL_FLOW, Policies(StrictLag(1), Fifo(), GroupCount(1), DelayedUpdate())))
    run.epoch_prompts = 1000
    run.join(SOURCE_WORKER, SOURCE)
    run.join(TRAINER_WORKER, TRAINER)
    rollouts = deque(WorkerId(f"{ROLLOUT}{number}") for number in range(4))
    for worker in rollouts:
        run.join(worker, ROLLOUT)
    names, half_bytes = len(rollouts), 0
    every = max(steps // deaths, 1)
    for step in range(steps):
        if step == steps // 2:
            gc.collect()
            half_bytes = status_bytes("VmRSS")
        run.now += 0.9
        run.offer(1, 1)
        generate(run, rollouts[step % len(rollouts)], 1)
        while run.pull(TRAINER_WORKER, "train", 0, step) is not None:
            pass
        run.send(TRAINER_WORKER, m.StepCompleted(step, (("loss", 0.5),)))
        run.fetch_all(run.publish())
        if step % every == every - 1:
            run.event(WorkerDisconnected(rollouts.popleft(), "killed"))
            rollouts.append(WorkerId(f"{ROLLOUT}{names}"))
            run.join(rollouts[-1], ROLLOUT)
            run.fetch_all(run.event(Tick()))
            names += 1
            run.core.waits.take()
    gc.collect()
    run.core.check()
    return status_bytes("VmRSS") / half_bytes - 1
