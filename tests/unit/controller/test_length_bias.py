"""Frequent worker deaths do not favour short responses: a restarted sample keeps its length."""

import math
import random
import threading
from collections import Counter, deque
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch

from flowrt.controller.events import (
    AppendLedger,
    Command,
    Event,
    MessageReceived,
    Send,
    Tick,
    WorkerConnected,
    WorkerDisconnected,
)
from flowrt.controller.policies.batching import GroupCount
from flowrt.controller.storage.ledger import Ledger
from flowrt.engines.base import Prompt, sample_seed
from flowrt.engines.simulated.engine import SimulatedRollout
from flowrt.engines.simulated.time import ManualSimClock
from flowrt.engines.simulated.workload import GenerationCost, Lengths, LogNormal
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import Part, Position, Values, unpack
from flowrt.runtime.clock import DrivenClock
from tests.simulation.cluster import make_core
from tests.simulation.scenario import MODEL, Scenario, leases_of, offered_lengths, whole

SEED, ROWS, WORKERS = 11, 6, 3
LENGTHS = Lengths(LogNormal(median=80, sigma=0.9, longest=500))
MEAN_LIFETIME_S = 150.0
"""Mean lifetime of a worker. A token takes a second, so the longer responses take more than that."""
LEASE_S, TICK_S, LIMIT_S = 1e6, 5.0, 1e5
MEAN_RUN_S, MAX_RUNS = 400.0, 200
SCENARIO = Scenario(steps=8, groups_per_step=8, members=4, references=0, bound=1, batcher=GroupCount(1))
INTERRUPTED = threading.Event()
INTERRUPTED.set()
Sample = tuple[int, int]
"""Prompt and member; there is one epoch."""


def tokens_of(prompt: int) -> torch.Tensor:
    return torch.tensor([prompt], dtype=torch.int32)


def length_of(sample: Sample) -> int:
    """The length of a sample, which depends neither on the worker nor on the number of starts."""
    prompt, member = sample
    return LENGTHS.draw(tokens_of(prompt).numpy().tobytes(), sample_seed(SEED, prompt, 0, member, 0))


class SimulatedRun:
    """A run in simulated time with a real core, and rollout workers with simulated engines that die."""

    def __init__(
        self, redrawn: bool = False, position: Position | None = None, run_index: int = 0, lease_s: float = LEASE_S
    ) -> None:
        """``redrawn``: a restarted sample gets another seed, as it would if seeds belonged to workers."""
        position = position or Position()
        self.core = make_core(SCENARIO, position, lease_s=lease_s)
        self.redrawn = redrawn
        self.run_index = run_index
        self.records: list[AppendLedger] = []
        self.running: dict[int, tuple[int, int]] = {}  # slot and lease by start, as a requeued slot may still run here
        self.clock = ManualSimClock(DrivenClock())
        self.rng = random.Random(SEED)
        self.engines: dict[str, SimulatedRollout] = {}
        self.started: Counter[Sample] = Counter()
        self.trained: dict[Sample, tuple[int, int]] = {}  # length and step
        self.names = iter(range(10_000))
        self.requests = 0
        self.pending: deque[Event] = deque()
        for name in ("source0", "reward0", "trainer0"):
            self.pending.append(WorkerConnected(WorkerId(name), name[:-1], "host"))
        passed = unpack(position.passed).get(0, ())
        for prompt in (number for number in range(SCENARIO.steps * SCENARIO.groups_per_step) if number not in passed):
            offer = m.Offer(
                request=prompt,
                flow="train",
                prompts=(prompt,),
                epoch=0,
                members=SCENARIO.members,
                at_least=0,
                lengths=offered_lengths(1, 1),
                tags=(),
            )
            self.pending.append(MessageReceived(WorkerId("source0"), offer))
        self.pull("reward0", "reward", 64)
        self.pull("trainer0", "train", 0, position.step)
        if position.step:
            self.send("trainer0", m.Publish((whole(position.step),), ()))
        for _ in range(WORKERS):
            self.start_worker()
        self.process_events()

    def send(self, name: str, message: m.Message) -> None:
        self.pending.append(MessageReceived(WorkerId(name), message))

    def pull(self, name: str, stage: str, slots: int, step: int = -1) -> None:
        self.requests += 1
        self.send(name, m.Pull(request=self.requests, stage=stage, slots=slots, tokens=0, step=step))

    def start_worker(self) -> None:
        name = f"rollout{next(self.names)}"
        self.engines[name] = SimulatedRollout(GenerationCost(1.0), LENGTHS, self.clock, rows=ROWS)
        self.pending.append(WorkerConnected(WorkerId(name), "rollout", "host"))
        self.send(name, m.WeightsActivated(MODEL, 0))
        self.pull(name, "rollout", ROWS)

    def process_events(self) -> None:
        """Pass all pending events to the core, and its commands to the workers."""
        while self.pending:
            for command in self.core.handle(self.pending.popleft(), self.clock.now()):
                self.execute(command)

    def execute(self, command: Command) -> None:
        if isinstance(command, AppendLedger):
            self.records.append(command)
        if not isinstance(command, Send):
            return
        name, message = command.worker, command.message
        if isinstance(message, m.ReceiveWeights) and name in self.engines:
            self.send(name, m.WeightsStaged(MODEL, message.weights.version))
            self.send(name, m.WeightsActivated(MODEL, message.weights.version))
            self.engines[name].version = message.weights.version
        elif isinstance(message, m.Grant) and name in self.engines:
            self.start_samples(name, message)
        elif isinstance(message, m.Grant) and name == "reward0":
            values = (Values("reward", (1.0,) * len(message.slots)),)
            self.requests += 1
            self.send(
                name,
                m.Commit(
                    request=self.requests,
                    stage="reward",
                    slots=message.slots,
                    leases=leases_of(message),
                    parts=(),
                    inline=values,
                    spans=(),
                ),
            )
            self.pull(name, "reward", 64)
        elif isinstance(message, m.Grant) and name == "trainer0":
            self.train(message)

    def start_samples(self, name: str, grant: m.Grant) -> None:
        prompts = []
        for row, slot in enumerate(grant.slots):
            sample = grant.prompts[row], grant.members[row]
            offset = 1000 * (self.started[sample] + 1000 * self.run_index) if self.redrawn else 0
            self.started[sample] += 1
            number = self.started.total()
            self.running[number] = slot, grant.lease
            seed = sample_seed(SEED, grant.prompts[row], 0, grant.members[row], grant.attempts[row] + offset)
            prompts.append(Prompt(number, tokens_of(grant.prompts[row]), seed))
        self.engines[name].add(prompts)

    def train(self, grant: m.Grant) -> None:
        step = self.core.state.window.step
        if not grant.closed:
            [lengths] = [dict(zip(p.ids, p.lengths, strict=True)) for p in grant.parts if p.column == "response"]
            for row, slot in enumerate(grant.slots):
                self.trained[grant.prompts[row], grant.members[row]] = lengths[slot], step
        else:
            self.send("trainer0", m.StepCompleted(step, ()))
            self.send("trainer0", m.Publish((whole(step + 1),), ()))
            step += 1
        if step < SCENARIO.steps:
            self.pull("trainer0", "train", 0, step)

    def run(self, duration_s: float = math.inf, deaths: bool = True) -> "SimulatedRun":
        """Run until all samples are trained, or until the run is killed after ``duration_s``."""
        death_s = self.rng.expovariate(WORKERS / MEAN_LIFETIME_S) if deaths else math.inf
        while not self.core.state.window.over and self.clock.now() < duration_s:
            next_s = min(engine._decoder.next_finish() for engine in self.engines.values())
            wake_s = min(next_s, death_s, duration_s, self.clock.now() + TICK_S)
            self.clock.wait_until(wake_s + 1e-6)  # past any rounding
            if death_s <= self.clock.now():
                dead = self.rng.choice(sorted(self.engines))
                del self.engines[dead]
                self.pending.append(WorkerDisconnected(WorkerId(dead), "killed"))
                self.start_worker()
                death_s = self.clock.now() + self.rng.expovariate(WORKERS / MEAN_LIFETIME_S)
            for name, engine in self.engines.items():
                self.finish(name, engine)
            self.pending.append(Tick())
            self.process_events()
            assert self.clock.now() < LIMIT_S, self.core.waiting()
        return self

    def finish(self, name: str, engine: SimulatedRollout) -> None:
        for response in engine.run(INTERRUPTED):
            self.requests += 1
            slot, lease = self.running.pop(response.key)
            parts = tuple(Part(column, (slot,), (len(response.tokens),)) for column in ("response", "logprobs"))
            self.send(
                name,
                m.Commit(
                    request=self.requests,
                    stage="rollout",
                    slots=(slot,),
                    leases=(lease,),
                    parts=parts,
                    inline=(),
                    spans=(response.spans,),
                ),
            )
            self.pull(name, "rollout", 1)


SAMPLES = [(p, n) for p in range(SCENARIO.steps * SCENARIO.groups_per_step) for n in range(SCENARIO.members)]
POPULATION = {sample: length_of(sample) for sample in SAMPLES}


def lengths_of(run: SimulatedRun) -> dict[Sample, int]:
    return {sample: length for sample, (length, _) in run.trained.items()}


def mean_starts_by_length(started: Counter[Sample]) -> tuple[float, float]:
    """Mean number of starts of the shortest and of the longest quarter of the samples."""
    by_length, quarter = sorted(SAMPLES, key=length_of), len(SAMPLES) // 4
    short, long = (mean(started[sample] for sample in part) for part in (by_length[:quarter], by_length[-quarter:]))
    return short, long


@pytest.mark.slow
def test_frequent_worker_deaths_do_not_bias_the_lengths() -> None:
    run = SimulatedRun().run()
    assert lengths_of(run) == POPULATION
    assert dict(run.core.state.dropped) == {}
    # There were many deaths, and they interrupted long responses more often.
    short, long = mean_starts_by_length(run.started)
    assert long > 1.3 * short
    assert run.started.total() > 1.3 * len(SAMPLES)
    # With new seeds for restarted samples the lengths are biased towards short responses.
    biased = lengths_of(SimulatedRun(redrawn=True).run())
    assert mean(biased.values()) < 0.9 * mean(POPULATION.values())


def test_leases_shorter_than_the_longest_responses_do_not_bias_the_lengths() -> None:
    run = SimulatedRun(lease_s=120.0).run(deaths=False)
    assert lengths_of(run) == POPULATION
    assert dict(run.core.state.dropped) == {}
    short, long = mean_starts_by_length(run.started)
    assert long > 1.3 * short


def test_runs_that_are_killed_and_resumed_do_not_bias_the_lengths(tmp_path: Path) -> None:
    """Each kill returns the run to its last step: mostly long responses are lost, and they are generated again."""
    lengths, started = killed_runs(tmp_path / "ledger.sqlite", redrawn=False)
    assert lengths == POPULATION
    assert started.total() > 2 * len(SAMPLES)
    # Independent of seeds: fresh draws have the same mean length within three standard errors.
    fresh = [length_of((prompt, 0)) for prompt in range(10**6, 10**6 + 10_000)]
    error = stdev(fresh) * math.sqrt(1 / len(lengths) + 1 / len(fresh))
    assert abs(mean(lengths.values()) - mean(fresh)) < 3 * error
    # With new seeds after a kill, steps of short responses are favoured.
    biased, _ = killed_runs(tmp_path / "redrawn.sqlite", redrawn=True)
    assert mean(biased.values()) < 0.9 * mean(fresh)


def killed_runs(path: Path, redrawn: bool) -> tuple[dict[Sample, int], Counter[Sample]]:
    """Trained lengths and number of starts of each sample; each step is saved before the next is closed."""
    rng, ledger = random.Random(SEED), Ledger(path)
    started: Counter[Sample] = Counter()
    lengths: dict[Sample, int] = {}
    step = run_index = 0
    while step < SCENARIO.steps:
        run = SimulatedRun(redrawn, ledger.resume(step, float(run_index)), run_index).run(
            rng.expovariate(1 / MEAN_RUN_S), deaths=False
        )
        step = run.core.state.window.step
        lengths |= {sample: length for sample, (length, trained_step) in run.trained.items() if trained_step < step}
        started += run.started
        for record in run.records:
            ledger.add(record, float(run_index))
        ledger.commit()
        run_index += 1
        assert run_index < MAX_RUNS
    account = ledger.account(live=[])
    ledger.close()
    assert (account.lost, account.trained_twice) == (0, 0)
    assert run_index > SCENARIO.steps
    return lengths, started
