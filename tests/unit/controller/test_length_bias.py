"""Workers that die often do not favour short answers: what is begun again is as long as it would have been."""

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
LIFE_S = 150.0
"""What a worker lives on average; a token takes a second, so many answers are longer than that."""
LEASE_S, TICK_S, LIMIT_S = 1e6, 5.0, 1e5
RUN_LIFE_S, MOST_LIVES = 400.0, 200
SCENARIO = Scenario(steps=8, groups_per_step=8, members=4, references=0, bound=1, batcher=GroupCount(1))
AT_ONCE = threading.Event()
AT_ONCE.set()
Sample = tuple[int, int]
"""Prompt and member; there is one epoch."""


def tokens_of(prompt: int) -> torch.Tensor:
    return torch.tensor([prompt], dtype=torch.int32)


def length_of(sample: Sample) -> int:
    """The length that a sample has on whatever worker, and however often it is begun."""
    prompt, member = sample
    return LENGTHS.draw(tokens_of(prompt).numpy().tobytes(), sample_seed(SEED, prompt, 0, member, 0))


class Stage:
    """A run in simulated time around a real core: rollout workers with simulated engines, that die."""

    def __init__(
        self, redrawn: bool = False, position: Position | None = None, life: int = 0, lease_s: float = LEASE_S
    ) -> None:
        """``redrawn``: what is begun again gets a seed of its own, as where seeds are a worker's."""
        position = position or Position()
        self.core = make_core(SCENARIO, position, lease_s=lease_s)
        self.redrawn = redrawn
        self.life = life
        self.records: list[AppendLedger] = []
        self.running: dict[int, tuple[int, int]] = {}  # by number, as a slot may come back while it still runs here
        self.pace = ManualSimClock(DrivenClock())
        self.rng = random.Random(SEED)
        self.engines: dict[str, SimulatedRollout] = {}
        self.begun: Counter[Sample] = Counter()
        self.trained: dict[Sample, tuple[int, int]] = {}  # its length, and the step
        self.names = iter(range(10_000))
        self.requests = 0
        self.said: deque[Event] = deque()
        for name in ("source0", "reward0", "trainer0"):
            self.said.append(WorkerConnected(WorkerId(name), name[:-1], "host"))
        passed = unpack(position.passed).get(0, ())
        for prompt in (one for one in range(SCENARIO.steps * SCENARIO.groups_per_step) if one not in passed):
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
            self.said.append(MessageReceived(WorkerId("source0"), offer))
        self.pull("reward0", "reward", 64)
        self.pull("trainer0", "train", 0, position.step)
        if position.step:
            self.send("trainer0", m.Publish((whole(position.step),), ()))
        for _ in range(WORKERS):
            self.rise()
        self.listen()

    def send(self, name: str, message: m.Message) -> None:
        self.said.append(MessageReceived(WorkerId(name), message))

    def pull(self, name: str, stage: str, slots: int, step: int = -1) -> None:
        self.requests += 1
        self.send(name, m.Pull(request=self.requests, stage=stage, slots=slots, tokens=0, step=step))

    def rise(self) -> None:
        name = f"rollout{next(self.names)}"
        self.engines[name] = SimulatedRollout(GenerationCost(1.0), LENGTHS, self.pace, rows=ROWS)
        self.said.append(WorkerConnected(WorkerId(name), "rollout", "host"))
        self.send(name, m.WeightsActivated(MODEL, 0))
        self.pull(name, "rollout", ROWS)

    def listen(self) -> None:
        """Let the core hear all that was said, and everybody what it answers."""
        while self.said:
            for command in self.core.handle(self.said.popleft(), self.pace.now()):
                self.hear(command)

    def hear(self, command: Command) -> None:
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
            self.begin(name, message)
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

    def begin(self, name: str, grant: m.Grant) -> None:
        prompts = []
        for row, slot in enumerate(grant.slots):
            sample = grant.prompts[row], grant.members[row]
            again = 1000 * (self.begun[sample] + 1000 * self.life) if self.redrawn else 0
            self.begun[sample] += 1
            number = self.begun.total()
            self.running[number] = slot, grant.lease
            seed = sample_seed(SEED, grant.prompts[row], 0, grant.members[row], grant.attempts[row] + again)
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

    def run(self, life_s: float = math.inf, deaths: bool = True) -> "Stage":
        """Until all is trained, or all of it is killed after so many seconds."""
        death_s = self.rng.expovariate(WORKERS / LIFE_S) if deaths else math.inf
        while not self.core.state.window.over and self.pace.now() < life_s:
            next_s = min(engine._decoder.next_finish() for engine in self.engines.values())
            self.pace.wait_until(min(next_s, death_s, life_s, self.pace.now() + TICK_S) + 1e-6)  # past any rounding
            if death_s <= self.pace.now():
                dead = self.rng.choice(sorted(self.engines))
                del self.engines[dead]
                self.said.append(WorkerDisconnected(WorkerId(dead), "killed"))
                self.rise()
                death_s = self.pace.now() + self.rng.expovariate(WORKERS / LIFE_S)
            for name, engine in self.engines.items():
                self.finish(name, engine)
            self.said.append(Tick())
            self.listen()
            assert self.pace.now() < LIMIT_S, self.core.waiting()
        return self

    def finish(self, name: str, engine: SimulatedRollout) -> None:
        for done in engine.run(AT_ONCE):
            self.requests += 1
            slot, lease = self.running.pop(done.key)
            parts = tuple(Part(column, (slot,), (len(done.tokens),)) for column in ("response", "logprobs"))
            self.send(
                name,
                m.Commit(
                    request=self.requests,
                    stage="rollout",
                    slots=(slot,),
                    leases=(lease,),
                    parts=parts,
                    inline=(),
                    spans=(done.spans,),
                ),
            )
            self.pull(name, "rollout", 1)


SAMPLES = [(p, n) for p in range(SCENARIO.steps * SCENARIO.groups_per_step) for n in range(SCENARIO.members)]
POPULATION = {sample: length_of(sample) for sample in SAMPLES}


def lengths_of(stage: Stage) -> dict[Sample, int]:
    return {sample: length for sample, (length, _) in stage.trained.items()}


def begun_by_length(begun: Counter[Sample]) -> tuple[float, float]:
    """How often the shortest and the longest quarter were begun."""
    by_length, quarter = sorted(SAMPLES, key=length_of), len(SAMPLES) // 4
    short, long = (mean(begun[one] for one in part) for part in (by_length[:quarter], by_length[-quarter:]))
    return short, long


@pytest.mark.slow
def test_workers_that_die_often_leave_the_lengths_as_they_are() -> None:
    stage = Stage().run()
    assert lengths_of(stage) == POPULATION
    assert dict(stage.core.state.dropped) == {}
    # Deaths were many, and hit long answers more often.
    short, long = begun_by_length(stage.begun)
    assert long > 1.3 * short
    assert stage.begun.total() > 1.3 * len(SAMPLES)
    # This would show in the lengths, were what is begun again drawn again: short ones would win.
    biased = lengths_of(Stage(redrawn=True).run())
    assert mean(biased.values()) < 0.9 * mean(POPULATION.values())


def test_leases_that_end_before_the_longest_answers_do_leave_the_lengths_as_they_are() -> None:
    stage = Stage(lease_s=120.0).run(deaths=False)
    assert lengths_of(stage) == POPULATION
    assert dict(stage.core.state.dropped) == {}
    short, long = begun_by_length(stage.begun)
    assert long > 1.3 * short


def test_runs_that_are_killed_and_go_on_leave_the_lengths_as_they_are(tmp_path: Path) -> None:
    """Killed again and again, each time back to the last step: what is lost are long answers, and they come again."""
    lengths, begun = lives(tmp_path / "ledger.sqlite", redrawn=False)
    assert lengths == POPULATION
    assert begun.total() > 2 * len(SAMPLES)
    # The same in numbers that know nothing of seeds: fresh draws are as long on average, within three standard errors.
    fresh = [length_of((prompt, 0)) for prompt in range(10**6, 10**6 + 10_000)]
    error = stdev(fresh) * math.sqrt(1 / len(lengths) + 1 / len(fresh))
    assert abs(mean(lengths.values()) - mean(fresh)) < 3 * error
    # This would show, were what is made again after a kill drawn again: steps of short answers would win.
    biased, _ = lives(tmp_path / "redrawn.sqlite", redrawn=True)
    assert mean(biased.values()) < 0.9 * mean(fresh)


def lives(path: Path, redrawn: bool) -> tuple[dict[Sample, int], Counter[Sample]]:
    """What was trained in the end, and how often each was begun; each step is saved before the next is closed."""
    rng, ledger = random.Random(SEED), Ledger(path)
    begun: Counter[Sample] = Counter()
    lengths: dict[Sample, int] = {}
    step = life = 0
    while step < SCENARIO.steps:
        stage = Stage(redrawn, ledger.resume(step, float(life)), life).run(
            rng.expovariate(1 / RUN_LIFE_S), deaths=False
        )
        step = stage.core.state.window.step
        lengths |= {sample: length for sample, (length, at) in stage.trained.items() if at < step}
        begun += stage.begun
        for record in stage.records:
            ledger.add(record, float(life))
        ledger.commit()
        life += 1
        assert life < MOST_LIVES
    account = ledger.account(live=[])
    ledger.close()
    assert (account.lost, account.trained_twice) == (0, 0)
    assert life > SCENARIO.steps
    return lengths, begun
