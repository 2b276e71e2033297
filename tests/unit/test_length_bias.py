"""Workers that die often do not favour short answers: what is begun again is as long as it would have been."""

import random
import threading
from collections import Counter, deque
from statistics import mean

import torch

from flowrt.clock import DrivenClock
from flowrt.controller.batchers import GroupCount
from flowrt.controller.events import Command, Event, Gone, Joined, Said, Send
from flowrt.engines.costs import DecodeCost
from flowrt.engines.lengths import Lengths, LogNormal
from flowrt.engines.pace import DrivenPace
from flowrt.engines.protocols import Prompt
from flowrt.engines.seeds import sample_seed
from flowrt.engines.simulated import SimulatedRollout
from flowrt.ids import WorkerId
from flowrt.testing.scenario import MODEL, Scenario, leases_of, offered_lengths, whole
from flowrt.testing.sim import make_core
from flowrt.wire import messages as m
from flowrt.wire.records import Part, Values

SEED, ROWS, WORKERS = 11, 6, 3
LENGTHS = Lengths(LogNormal(median=80, sigma=0.9, longest=500))
LIFE_S = 150.0
"""What a worker lives on average; a token takes a second, so many answers are longer than that."""
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

    def __init__(self, redrawn: bool = False) -> None:
        """``redrawn``: what is begun again gets a seed of its own, as where seeds are a worker's."""
        self.core = make_core(SCENARIO)
        self.redrawn = redrawn
        self.pace = DrivenPace(DrivenClock())
        self.rng = random.Random(SEED)
        self.engines: dict[str, SimulatedRollout] = {}
        self.leases: dict[tuple[str, int], int] = {}
        self.begun: Counter[Sample] = Counter()
        self.trained: dict[Sample, int] = {}
        self.names = iter(range(10_000))
        self.requests = 0
        self.said: deque[Event] = deque()
        for name in ("source0", "reward0", "trainer0"):
            self.said.append(Joined(WorkerId(name), name[:-1], "host"))
        for prompt in range(SCENARIO.steps * SCENARIO.groups_per_step):
            offer = m.Offer(prompt, "train", (prompt,), 0, SCENARIO.members, 0, offered_lengths(1, 1), ())
            self.said.append(Said(WorkerId("source0"), offer))
        self.pull("reward0", "reward", 64)
        self.pull("trainer0", "train", 0, 0)
        for _ in range(WORKERS):
            self.rise()
        self.listen()

    def say(self, name: str, message: m.Message) -> None:
        self.said.append(Said(WorkerId(name), message))

    def pull(self, name: str, stage: str, slots: int, step: int = -1) -> None:
        self.requests += 1
        self.say(name, m.Pull(self.requests, stage, slots, 0, step))

    def rise(self) -> None:
        name = f"rollout{next(self.names)}"
        self.engines[name] = SimulatedRollout(DecodeCost(1.0), LENGTHS, self.pace, rows=ROWS)
        self.said.append(Joined(WorkerId(name), "rollout", "host"))
        self.say(name, m.Applied(MODEL, 0))
        self.pull(name, "rollout", ROWS)

    def listen(self) -> None:
        """Let the core hear all that was said, and everybody what it answers."""
        while self.said:
            for command in self.core.handle(self.said.popleft(), self.pace.now()):
                self.hear(command)

    def hear(self, command: Command) -> None:
        if not isinstance(command, Send):
            return
        name, message = command.worker, command.message
        if isinstance(message, m.Fetch) and name in self.engines:
            self.say(name, m.Staged(MODEL, message.weights.version))
            self.say(name, m.Applied(MODEL, message.weights.version))
            self.engines[name].version = message.weights.version
        elif isinstance(message, m.Grant) and name in self.engines:
            self.begin(name, message)
        elif isinstance(message, m.Grant) and name == "reward0":
            values = (Values("reward", (1.0,) * len(message.slots)),)
            self.requests += 1
            self.say(name, m.Commit(self.requests, "reward", message.slots, leases_of(message), (), values, ()))
            self.pull(name, "reward", 64)
        elif isinstance(message, m.Grant) and name == "trainer0":
            self.train(message)

    def begin(self, name: str, grant: m.Grant) -> None:
        prompts = []
        for row, slot in enumerate(grant.slots):
            sample = grant.prompts[row], grant.members[row]
            self.leases[name, slot] = grant.lease
            again = 1000 * self.begun[sample] if self.redrawn else 0
            self.begun[sample] += 1
            seed = sample_seed(SEED, grant.prompts[row], 0, grant.members[row], grant.attempts[row] + again)
            prompts.append(Prompt(slot, tokens_of(grant.prompts[row]), seed))
        self.engines[name].add(prompts)

    def train(self, grant: m.Grant) -> None:
        step = self.core.samples.window.step
        if not grant.closed:
            [lengths] = [dict(zip(p.ids, p.lengths, strict=True)) for p in grant.parts if p.column == "response"]
            for row, slot in enumerate(grant.slots):
                self.trained[grant.prompts[row], grant.members[row]] = lengths[slot]
        else:
            self.say("trainer0", m.StepDone(step, ()))
            self.say("trainer0", m.Publish((whole(step + 1),), ()))
            step += 1
        if step < SCENARIO.steps:
            self.pull("trainer0", "train", 0, step)

    def run(self) -> "Stage":
        death_s = self.rng.expovariate(WORKERS / LIFE_S)
        while not self.core.samples.window.over:
            next_s = min(engine._decoder.next_finish() for engine in self.engines.values())
            self.pace.wait_until(min(next_s, death_s) + 1e-6)  # past any rounding
            if death_s <= next_s:
                dead = self.rng.choice(sorted(self.engines))
                del self.engines[dead]
                self.said.append(Gone(WorkerId(dead), "killed"))
                self.rise()
                death_s = self.pace.now() + self.rng.expovariate(WORKERS / LIFE_S)
            for name, engine in self.engines.items():
                self.finish(name, engine)
            self.listen()
        return self

    def finish(self, name: str, engine: SimulatedRollout) -> None:
        for done in engine.run(AT_ONCE):
            self.requests += 1
            parts = tuple(Part(column, (done.key,), (len(done.tokens),)) for column in ("response", "logprobs"))
            leases = (self.leases.pop((name, done.key)),)
            self.say(name, m.Commit(self.requests, "rollout", (done.key,), leases, parts, (), (done.spans,)))
            self.pull(name, "rollout", 1)


def test_workers_that_die_often_leave_the_lengths_as_they_are() -> None:
    samples = [(p, n) for p in range(SCENARIO.steps * SCENARIO.groups_per_step) for n in range(SCENARIO.members)]
    population = {sample: length_of(sample) for sample in samples}
    stage = Stage().run()
    assert stage.trained == population
    assert dict(stage.core.samples.retreat.dropped) == {}
    # Deaths were many, and hit long answers more often.
    by_length, quarter = sorted(samples, key=length_of), len(samples) // 4
    short, long = (mean(stage.begun[one] for one in part) for part in (by_length[:quarter], by_length[-quarter:]))
    assert long > 1.3 * short
    assert stage.begun.total() > 1.3 * len(samples)
    # This would show in the lengths, were what is begun again drawn again: short ones would win.
    biased = Stage(redrawn=True).run().trained
    assert mean(biased.values()) < 0.9 * mean(population.values())
