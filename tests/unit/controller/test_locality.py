"""Dispatch by locality: which slot a puller gets, how often others overtake it, and how many bytes move."""

import random

import pytest

from flowrt.controller.policies.dispatch.base import Dispatch, Fifo, Puller, Start
from flowrt.controller.policies.dispatch.locality import Sticky
from flowrt.controller.state.samples import Slot
from flowrt.errors import ConfigError
from flowrt.ids import WorkerId
from flowrt.simulation.dispatch import ROLLOUT, SampleFactory


def holding(held: dict[int, int], requests: int = 1, not_yet: int = 1_000_000) -> Puller:
    def may_start(slot: Slot) -> Start:
        return Start.NOT_YET if slot.id >= not_yet else Start.NOW

    return Puller(WorkerId("w0"), requests, may_start, lambda slot: held.get(slot.id, 0))


def ids(slots: list[Slot]) -> list[int]:
    return [slot.id for slot in slots]


def test_a_puller_gets_the_slots_of_which_it_holds_the_most_bytes() -> None:
    queue = Sticky(4).queue(ROLLOUT)
    queue.add(SampleFactory().many(8))
    assert ids(queue.take(holding({1: 5, 3: 9, 6: 99}, requests=3))) == [3, 1, 0]
    assert ids(queue.take(holding({6: 99}))) == [6]
    assert ids(queue.take(holding({}, requests=9))) == [2, 4, 5, 7]


def test_only_slots_that_may_start_are_candidates() -> None:
    queue = Sticky(4).queue(ROLLOUT)
    queue.add(SampleFactory().many(8))
    assert ids(queue.take(holding({1: 1, 2: 2}, requests=9, not_yet=2))) == [1, 0]
    assert len(queue) == 6


@pytest.mark.parametrize("candidates", [2, 3, 8])
def test_the_worst_puller_reaches_the_overtaking_bound_exactly(candidates: int) -> None:
    policy, factory = Sticky(candidates), SampleFactory()
    queue = policy.queue(ROLLOUT)
    queue.add(first := factory.many(1))
    queue.add(factory.many(candidates))
    overtaken = 0
    while queue.take(Puller(WorkerId("w0"), 1, None, lambda slot: slot.id)) != first:
        queue.add(factory.many(1))
        overtaken += 1
    assert overtaken == policy.most_overtaking


def test_zero_candidates_raise_a_config_error() -> None:
    with pytest.raises(ConfigError, match="candidates"):
        Sticky(0)


def bytes_moved(dispatch: Dispatch, workers: int, seed: int) -> float:
    """The share of bytes taken by a worker that did not hold them; holders and pullers are random."""
    rng, slots = random.Random(seed), SampleFactory().many(512)
    holder = [rng.randrange(workers) for _ in slots]
    size = [max(1, int(1_000 * rng.lognormvariate(0, 1))) for _ in slots]
    queue, moved = dispatch.queue(ROLLOUT), 0
    queue.add(slots)
    while len(queue):
        worker = rng.randrange(workers)
        puller = Puller(WorkerId(f"w{worker}"), 1, None, lambda slot: size[slot.id] * (holder[slot.id] == worker))  # noqa: B023
        moved += sum(size[slot.id] for slot in queue.take(puller) if holder[slot.id] != worker)
    return moved / sum(size)


@pytest.mark.parametrize(
    ("workers", "candidates", "max_moved"), [(4, 4, 0.40), (4, 16, 0.08), (8, 16, 0.16), (8, 32, 0.08)]
)
def test_sticky_dispatch_moves_fewer_bytes_than_fifo(workers: int, candidates: int, max_moved: float) -> None:
    for seed in range(3):
        assert bytes_moved(Fifo(), workers, seed) > 0.65
        assert bytes_moved(Sticky(candidates), workers, seed) < max_moved
