"""Length-aware dispatch: an exact cost model, the best split, prediction from history, and shorter steps."""

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
from flowrt.controller.state.slots import NO_STEP, Lease, Slot
from flowrt.errors import ConfigError
from flowrt.ids import LeaseId, WorkerId
from flowrt.simulation.dispatch import ROLLOUT, Cluster, DispatchSimulator, SampleFactory, Step

PROMPTS, MEMBERS, WORKERS, EPOCHS = 64, 8, 8, 4
COST = DecodeCost(base_s=0.01, per_row_s=0.0005)
STEEP = DecodeCost(base_s=0.01, per_row_s=0.01)


def epochs(seed: int, between: float, within: float) -> list[Step]:
    """The same prompts in every epoch; log-normal lengths with a sigma between and a sigma within prompts."""
    rng = random.Random(seed)
    means = [rng.gauss(0, between) for _ in range(PROMPTS)]
    return [
        {
            prompt: [max(1, round(400 * math.exp(means[prompt] + rng.gauss(0, within)))) for _ in range(MEMBERS)]
            for prompt in range(PROMPTS)
        }
        for _ in range(EPOCHS)
    ]


def durations(dispatch: Dispatch, steps: list[Step], rows: int) -> list[float]:
    """The duration of every step but the first, for which there is no history."""
    run = DispatchSimulator(dispatch, Cluster(WORKERS, rows, COST))
    return [run.run(step, epoch) for epoch, step in enumerate(steps)][1:]


def test_the_completion_time_is_that_of_decoding_token_by_token() -> None:
    rng = random.Random(0)
    for _ in range(50):
        tokens = [rng.randrange(1, 60) for _ in range(rng.randrange(1, 10))]
        one_by_one = math.fsum(COST(sum(length > at for length in tokens)) for at in range(max(tokens)))
        assert completion_s(tokens, COST) == pytest.approx(one_by_one, rel=1e-9)
        run = DispatchSimulator(Fifo(), Cluster(1, len(tokens), COST))
        assert run.run(dict(enumerate([length] for length in tokens))) == pytest.approx(one_by_one, rel=1e-9)
    assert completion_s([], COST) == 0


def test_the_completion_time_with_reused_rows_is_exact() -> None:
    """The prediction for one worker is exact: a waiting sample takes the first row that becomes free."""
    rng = random.Random(1)
    for _ in range(30):
        tokens = sorted((rng.randrange(1, 60) for _ in range(rng.randrange(1, 30))), reverse=True)
        run = DispatchSimulator(Fifo(), Cluster(1, 4, COST))
        assert run.run(dict(enumerate([length] for length in tokens))) == pytest.approx(pool_s(tokens, 1, 4, COST))


def test_the_search_finds_the_best_of_all_splits() -> None:
    rng = random.Random(2)
    splits = 0
    for _ in range(200):
        workers, rows = rng.randrange(2, 6), rng.randrange(1, 6)
        tokens = sorted((400 * rng.lognormvariate(0, 1.3) for _ in range(rng.randrange(1, 11))), reverse=True)
        split = best_split([[(length, rank) for rank, length in enumerate(tokens)]], len(tokens), workers, rows, STEEP)
        unsplit = pool_s(tokens, workers, rows, STEEP)
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
        assert min(unsplit, best) <= split.latency_s <= 1.03 * min(unsplit, best)
        splits += split.workers > 0
    assert splits > 20


def test_a_split_is_close_to_the_best_of_all_assignments() -> None:
    """Up to nine samples, all admitted at once: compared with every assignment to three workers."""
    rng, ratios = random.Random(3), []
    for _ in range(12):
        tokens = sorted((400 * rng.lognormvariate(0, 1) for _ in range(rng.randrange(5, 10))), reverse=True)
        split = best_split([[(length, rank) for rank, length in enumerate(tokens)]], len(tokens), 3, 9, STEEP)
        best = min(
            max(completion_s([t for t, w in zip(tokens, to, strict=True) if w == worker], STEEP) for worker in range(3))
            for to in itertools.product(range(3), repeat=len(tokens))
            if to[0] == 0
        )
        assert split.latency_s >= best * (1 - 1e-9)
        ratios.append(split.latency_s / best)
    assert fmean(ratios) <= 1.10
    assert max(ratios) <= 1.25


@pytest.mark.parametrize("rows", [32, 64])
@pytest.mark.slow
def test_long_tailed_steps_end_sooner(rows: int) -> None:
    """Eight workers, 64 prompts of 8 samples, sigma 0.92 between and 0.4 within prompts: 1.0 over all samples."""
    gains = []
    for seed in range(8):
        steps = epochs(seed, 0.92, 0.4)
        policy = LengthAware(COST, PROMPTS * MEMBERS)
        gains.append(sum(durations(Fifo(), steps, rows)) / sum(durations(policy, steps, rows)))
    assert fmean(gains) >= 1.10, gains
    assert min(gains) >= 0.98, gains


@pytest.mark.parametrize("within", [0.0, 0.1])
@pytest.mark.parametrize("rows", [32, 64])
def test_uniform_steps_do_not_end_later(rows: int, within: float) -> None:
    for seed in range(3):
        steps = epochs(seed, 0.0, within)
        before, after = durations(Fifo(), steps, rows), durations(LengthAware(COST, PROMPTS * MEMBERS), steps, rows)
        assert all(first / other >= 0.98 for first, other in zip(before, after, strict=True))


def test_history_recalls_the_longest_prompts() -> None:
    """Recall of the longest fifth of the prompts of an epoch; sigma 0.9 between, 0.4 within prompts."""
    recalls = []
    for seed in range(10):
        history, factory = History(), SampleFactory()
        for epoch, step in enumerate(epochs(seed, 0.9, 0.4)):
            groups = {prompt: factory.group(MEMBERS, prompt, epoch) for prompt in step}
            if epoch:
                longest = sorted(step, key=lambda prompt: -sum(step[prompt]))[: PROMPTS // 5]
                expected = sorted(step, key=lambda prompt: -(history.predict(groups[prompt]) or 0))[: PROMPTS // 5]
                recalls.append(len({*longest} & {*expected}) / len(longest))
            for prompt, group in groups.items():
                for tokens in step[prompt]:
                    history.learn(group, tokens)
    assert fmean(recalls) >= 0.8


def test_history_shrinks_differences_that_random_variation_explains() -> None:
    alike, apart, factory, rng = History(), History(), SampleFactory(), random.Random(4)
    groups = [factory.group(8, prompt) for prompt in range(40)]
    for prompt, group in enumerate(groups):
        for _ in range(16):
            alike.learn(group, round(400 * rng.lognormvariate(0, 0.4)))
            apart.learn(group, round(100 * 1.2**prompt * rng.lognormvariate(0, 0.4)))
    for history, least, most in ((alike, 1.0, 1.2), (apart, 900.0, 1_700.0)):
        shrunk = history.shrunk_means(groups)
        assert least <= max(shrunk) / min(shrunk) <= most


def test_history_separates_flows_and_evicts_the_prompt_updated_longest_ago() -> None:
    history, factory = History(prompts=2), SampleFactory()
    train, evaluation, third = factory.group(1, 0), factory.group(1, 0), factory.group(1, 1)
    evaluation.flow = "eval"
    history.learn(train, 10)
    history.learn(evaluation, 90)
    assert (history.predict(train), history.predict(evaluation), history.predict(third)) == (10, 90, None)
    history.learn(train, 20)
    history.learn(third, 5)
    assert (history.predict(train), history.predict(evaluation), history.predict(third)) == (15, None, 5)


class WorkerPool:
    """A queue with a history in which prompt 0 is long, and eight workers that lease the slots they take."""

    def __init__(self) -> None:
        self.policy, self.factory = LengthAware(STEEP, 128), SampleFactory()
        self.queue = self.policy.queue(ROLLOUT)
        for epoch in range(3):
            self.add_epoch(epoch)
            while len(self.queue) and epoch < 2:
                for slot in [slot for worker in range(8) for slot in self.take(worker, 16)]:
                    del slot.leases[ROLLOUT.name]
                    self.queue.on_generated(slot, 1_000 if slot.group.prompt else 5_000)

    def add_epoch(self, epoch: int) -> None:
        self.queue.add(slot for prompt in range(32) for slot in self.factory.group(4, prompt, epoch).slots)

    def take(self, worker: int, room: int) -> list[Slot]:
        name = WorkerId(f"w{worker}")
        slots = self.queue.take(Puller(name, room, None))
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


def test_a_reserved_worker_takes_long_slots_singly_up_to_a_small_batch() -> None:
    pool = WorkerPool()
    lanes: list[list[Slot]] = [[], []]
    while slots := [pool.take(worker, 16 - len(lanes[worker])) for worker in (0, 1)]:
        if slots == [[], []]:
            break
        assert [len(got) for got in slots] == [1, 1]
        for lane, got in zip(lanes, slots, strict=True):
            lane += got
    assert [slot.group.prompt for lane in lanes for slot in lane[:2]] == [0] * 4
    assert 2 <= len(lanes[0]) == len(lanes[1]) < 16  # each has free rows, which would slow its long samples down
    assert len(pool.take(2, 16)) == 1
    for slot in lanes[0]:  # the first worker has finished its lane: it takes any slot
        del slot.leases[ROLLOUT.name]
        pool.queue.on_generated(slot, 5_000)
    assert len(pool.take(0, 16)) == 1


def test_the_lane_of_an_absent_reserved_worker_is_served_by_the_others() -> None:
    pool = WorkerPool()
    others = [slot for _ in range(40) for worker in range(2, 8) for slot in pool.take(worker, 16)]
    assert len(pool.queue) > 0  # its slots are kept while the others are busy
    for slot in others:
        del slot.leases[ROLLOUT.name]
    # Parked pulls, which ask for less room than there is now.
    left = [slot for _ in range(8) for worker in range(2, 8) for slot in pool.take(worker, 10)]
    assert {slot.group.prompt for slot in left} >= {0}
    assert not len(pool.queue)


def test_a_fraction_of_zero_gives_a_fifo_queue() -> None:
    assert isinstance(LengthAware(COST, 8, fraction=0).queue(ROLLOUT), FifoQueue)


def test_invalid_parameters_raise_a_config_error() -> None:
    for fraction, round_slots in ((-0.1, 8), (1.1, 8), (0.2, 0)):
        with pytest.raises(ConfigError):
            LengthAware(COST, round_slots, fraction)
    for base_s, per_row_s in ((0, 0), (-1, 1), (1, -1)):
        with pytest.raises(ConfigError):
            DecodeCost(base_s, per_row_s)
