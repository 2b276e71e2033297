"""Tail lanes: the cost model is exact, the search finds the best split, history ranks, and steps end sooner."""

import itertools
import math
import random
from statistics import fmean

import pytest

from flowrt.controller.policies.dispatch.base import Dispatch, Fifo, FifoQueue, Puller
from flowrt.controller.policies.dispatch.length_aware import (
    DecodeCost,
    History,
    LengthAware,
    best_split,
    completion_s,
    pool_s,
)
from flowrt.controller.state.samples import NO_STEP, Lease, Slot
from flowrt.errors import ConfigError
from flowrt.ids import LeaseId, WorkerId
from flowrt.simulation.dispatch import ROLLOUT, Cluster, DispatchSimulator, SampleFactory, Step

PROMPTS, MEMBERS, WORKERS, EPOCHS = 64, 8, 8, 4
COST = DecodeCost(base_s=0.01, per_row_s=0.0005)
STEEP = DecodeCost(base_s=0.01, per_row_s=0.01)


def epochs(seed: int, between: float, within: float) -> list[Step]:
    """The same prompts again and again; log-normal lengths, their sigma between and within prompts."""
    chance = random.Random(seed)
    centre = [chance.gauss(0, between) for _ in range(PROMPTS)]
    return [
        {
            prompt: [max(1, round(400 * math.exp(centre[prompt] + chance.gauss(0, within)))) for _ in range(MEMBERS)]
            for prompt in range(PROMPTS)
        }
        for _ in range(EPOCHS)
    ]


def seconds(dispatch: Dispatch, steps: list[Step], rows: int) -> list[float]:
    """Of every step but the first, of which nothing could be known."""
    run = DispatchSimulator(dispatch, Cluster(WORKERS, rows, COST))
    return [run.run(step, epoch) for epoch, step in enumerate(steps)][1:]


def test_the_completion_time_is_that_of_decoding_token_by_token() -> None:
    chance = random.Random(0)
    for _ in range(50):
        tokens = [chance.randrange(1, 60) for _ in range(chance.randrange(1, 10))]
        one_by_one = math.fsum(COST(sum(length > at for length in tokens)) for at in range(max(tokens)))
        assert completion_s(tokens, COST) == pytest.approx(one_by_one, rel=1e-9)
        run = DispatchSimulator(Fifo(), Cluster(1, len(tokens), COST))
        assert run.run(dict(enumerate([length] for length in tokens))) == pytest.approx(one_by_one, rel=1e-9)
    assert completion_s([], COST) == 0


def test_rows_that_are_used_again_are_predicted_too() -> None:
    """The prediction of one worker is exact: what waits takes the first row that ends."""
    chance = random.Random(1)
    for _ in range(30):
        tokens = sorted((chance.randrange(1, 60) for _ in range(chance.randrange(1, 30))), reverse=True)
        run = DispatchSimulator(Fifo(), Cluster(1, 4, COST))
        assert run.run(dict(enumerate([length] for length in tokens))) == pytest.approx(pool_s(tokens, 1, 4, COST))


def test_the_search_finds_the_best_of_all_splits() -> None:
    chance = random.Random(2)
    opened = 0
    for _ in range(200):
        workers, rows = chance.randrange(2, 6), chance.randrange(1, 6)
        tokens = sorted((400 * chance.lognormvariate(0, 1.3) for _ in range(chance.randrange(1, 11))), reverse=True)
        split = best_split([[(length, rank) for rank, length in enumerate(tokens)]], len(tokens), workers, rows, STEEP)
        alone = pool_s(tokens, workers, rows, STEEP)
        best = min(
            (
                max(
                    pool_s(tokens[:tail], reserved, rows, STEEP), pool_s(tokens[tail:], workers - reserved, rows, STEEP)
                )
                for tail in range(1, len(tokens) + 1)
                for reserved in range(1, workers)
                if tail <= reserved * rows
            ),
            default=math.inf,
        )
        assert min(alone, best) <= split.latency_s <= 1.03 * min(alone, best)
        opened += split.workers > 0
    assert opened > 20


def test_a_split_is_close_to_the_best_of_all_assignments() -> None:
    """Up to nine samples, all admitted at once: every way to give them to three workers is tried."""
    chance, over = random.Random(3), []
    for _ in range(12):
        tokens = sorted((400 * chance.lognormvariate(0, 1) for _ in range(chance.randrange(5, 10))), reverse=True)
        split = best_split([[(length, rank) for rank, length in enumerate(tokens)]], len(tokens), 3, 9, STEEP)
        best = min(
            max(completion_s([t for t, w in zip(tokens, to, strict=True) if w == worker], STEEP) for worker in range(3))
            for to in itertools.product(range(3), repeat=len(tokens))
            if to[0] == 0
        )
        assert split.latency_s >= best * (1 - 1e-9)
        over.append(split.latency_s / best)
    assert fmean(over) <= 1.10
    assert max(over) <= 1.25


@pytest.mark.parametrize("rows", [32, 64])
@pytest.mark.slow
def test_long_tailed_steps_end_sooner(rows: int) -> None:
    """Eight workers, 64 prompts of 8 samples, sigma 0.92 between and 0.4 within prompts: 1 over all samples."""
    gains = []
    for seed in range(8):
        steps = epochs(seed, 0.92, 0.4)
        policy = LengthAware(COST, PROMPTS * MEMBERS)
        gains.append(sum(seconds(Fifo(), steps, rows)) / sum(seconds(policy, steps, rows)))
    assert fmean(gains) >= 1.10, gains
    assert min(gains) >= 0.98, gains


@pytest.mark.parametrize("within", [0.0, 0.1])
@pytest.mark.parametrize("rows", [32, 64])
def test_uniform_steps_do_not_end_later(rows: int, within: float) -> None:
    for seed in range(3):
        steps = epochs(seed, 0.0, within)
        before, after = seconds(Fifo(), steps, rows), seconds(LengthAware(COST, PROMPTS * MEMBERS), steps, rows)
        assert all(one / other >= 0.98 for one, other in zip(before, after, strict=True))


def test_history_recalls_the_longest_prompts() -> None:
    """Of the top fifth of an epoch's prompts, the part that was expected to be; sigma 0.9 between, 0.4 within."""
    recalls = []
    for seed in range(10):
        history, issuing = History(), SampleFactory()
        for epoch, step in enumerate(epochs(seed, 0.9, 0.4)):
            groups = {prompt: issuing.group(MEMBERS, prompt, epoch) for prompt in step}
            if epoch:
                longest = sorted(step, key=lambda prompt: -sum(step[prompt]))[: PROMPTS // 5]
                expected = sorted(step, key=lambda prompt: -(history.predict(groups[prompt]) or 0))[: PROMPTS // 5]
                recalls.append(len({*longest} & {*expected}) / len(longest))
            for prompt, group in groups.items():
                for tokens in step[prompt]:
                    history.learn(group, tokens)
    assert fmean(recalls) >= 0.8


def test_history_believes_only_what_chance_does_not_explain() -> None:
    alike, apart, issuing, chance = History(), History(), SampleFactory(), random.Random(4)
    groups = [issuing.group(8, prompt) for prompt in range(40)]
    for prompt, group in enumerate(groups):
        for _ in range(16):
            alike.learn(group, round(400 * chance.lognormvariate(0, 0.4)))
            apart.learn(group, round(100 * 1.2**prompt * chance.lognormvariate(0, 0.4)))
    for history, least, most in ((alike, 1.0, 1.2), (apart, 900.0, 1_700.0)):
        believed = history.shrunk_means(groups)
        assert least <= max(believed) / min(believed) <= most


def test_history_tells_flows_apart_and_forgets_what_is_longest_silent() -> None:
    history, issuing = History(prompts=2), SampleFactory()
    train, evaluation, third = issuing.group(1, 0), issuing.group(1, 0), issuing.group(1, 1)
    evaluation.flow = "eval"
    history.learn(train, 10)
    history.learn(evaluation, 90)
    assert (history.predict(train), history.predict(evaluation), history.predict(third)) == (10, 90, None)
    history.learn(train, 20)
    history.learn(third, 5)
    assert (history.predict(train), history.predict(evaluation), history.predict(third)) == (15, None, 5)


class Crewed:
    """A queue that has learned that prompt 0 is long, and eight workers that lease what they get."""

    def __init__(self) -> None:
        self.policy, self.issuing = LengthAware(STEEP, 128), SampleFactory()
        self.queue = self.policy.queue(ROLLOUT)
        for epoch in range(3):
            self.come(epoch)
            while len(self.queue) and epoch < 2:
                for slot in [slot for worker in range(8) for slot in self.take(worker, 16)]:
                    del slot.leases[ROLLOUT.name]
                    self.queue.on_generated(slot, 1_000 if slot.group.prompt else 5_000)

    def come(self, epoch: int) -> None:
        self.queue.add(slot for prompt in range(32) for slot in self.issuing.group(4, prompt, epoch).slots)

    def take(self, worker: int, room: int) -> list[Slot]:
        name = WorkerId(f"w{worker}")
        slots = self.queue.take(Puller(name, room, None, lambda _: 0))
        for slot in slots:
            slot.leases[ROLLOUT.name] = Lease(
                id=LeaseId(slot.id),
                stage=ROLLOUT.name,
                worker=name,
                deadline_s=math.inf,
                version=0,
                step=NO_STEP,
                slots={slot.id: slot},
            )
        return slots


def test_a_reserved_worker_gets_the_long_prompt_one_slot_at_a_time_and_then_stays_small() -> None:
    crew = Crewed()
    lanes: list[list[Slot]] = [[], []]
    while slots := [crew.take(worker, 16 - len(lanes[worker])) for worker in (0, 1)]:
        if slots == [[], []]:
            break
        assert [len(got) for got in slots] == [1, 1]
        for lane, got in zip(lanes, slots, strict=True):
            lane += got
    assert [slot.group.prompt for lane in lanes for slot in lane[:2]] == [0] * 4
    assert 2 <= len(lanes[0]) == len(lanes[1]) < 16  # each has room for more, which would slow its long answers down
    assert len(crew.take(2, 16)) == 1
    for slot in lanes[0]:  # the lane is done on the first worker: it works on whatever there is
        del slot.leases[ROLLOUT.name]
        crew.queue.on_generated(slot, 5_000)
    assert len(crew.take(0, 16)) == 1


def test_a_reserved_worker_that_is_gone_leaves_its_lane_to_the_others() -> None:
    crew = Crewed()
    others = [slot for _ in range(40) for worker in range(2, 8) for slot in crew.take(worker, 16)]
    assert len(crew.queue) > 0  # its places are kept while the others are busy
    for slot in others:
        del slot.leases[ROLLOUT.name]
    left = [slot for _ in range(8) for worker in range(2, 8) for slot in crew.take(worker, 10)]  # parked: of old room
    assert {slot.group.prompt for slot in left} >= {0}
    assert not len(crew.queue)


def test_a_queue_without_a_lane_is_the_plain_one() -> None:
    assert isinstance(LengthAware(COST, 8, fraction=0).queue(ROLLOUT), FifoQueue)


def test_what_cannot_be_is_refused() -> None:
    for fraction, round_slots in ((-0.1, 8), (1.1, 8), (0.2, 0)):
        with pytest.raises(ConfigError):
            LengthAware(COST, round_slots, fraction)
    for base_s, per_row_s in ((0, 0), (-1, 1), (1, -1)):
        with pytest.raises(ConfigError):
            DecodeCost(base_s, per_row_s)
