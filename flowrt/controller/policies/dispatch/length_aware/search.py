"""Search for the split of a round: how many prompts and how many workers the tail lane gets."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flowrt.controller.policies.dispatch.length_aware.cost import pool_s

EXHAUSTIVE = 12  # all numbers of prompts up to this are tried, and about one in five beyond
TIE_FACTOR = 1.03  # the accuracy of predictions: of splits within it, the one with the fewest workers wins

Scenario = Sequence[tuple[float, int]]
"""One possible outcome of a round: (tokens, rank of the prompt) of each sample, longest first."""


@dataclass(frozen=True, slots=True)
class Split:
    """The prompts of the lowest ranks go to ``workers`` workers, each of which runs ``rows`` of their samples."""

    prompts: int
    workers: int
    rows: int
    latency_s: float


NO_SPLIT = Split(0, 0, 0, math.inf)


def best_split(
    scenarios: Sequence[Scenario], max_prompts: int, workers: int, rows: int, cost: Callable[[int], float]
) -> Split:
    """The split with the least predicted time of the slower pool, on average over the scenarios.

    A split without prompts is one pool of all workers. All samples of the tail lane start at once: a split without
    enough rows for them is not considered. Of splits within `TIE_FACTOR`, the one with the fewest workers wins.
    """
    unsplit_s = [pool_s([tokens for tokens, _ in one], workers, rows, cost) for one in scenarios]
    found = [Split(0, 0, 0, _mean(unsplit_s))]
    for prompts in _tried(max_prompts):
        lanes = [[tokens for tokens, rank in one if rank < prompts] for one in scenarios]
        rests = [[tokens for tokens, rank in one if rank >= prompts] for one in scenarios]
        for reserved in range(max(1, math.ceil(len(lanes[0]) / rows)), workers):
            lanes_s = [pool_s(lane, reserved, rows, cost) for lane in lanes]
            rests_s = [pool_s(rest, workers - reserved, rows, cost) for rest in rests]
            latency_s = _mean(list(map(max, lanes_s, rests_s)))
            found.append(Split(prompts, reserved, math.ceil(len(lanes[0]) / reserved), latency_s))
            if all(map(float.__le__, lanes_s, rests_s)):
                break  # with more reserved workers the other pool, already the slower one, only gets slower
    least_s = min(split.latency_s for split in found)
    near = [split for split in found if split.latency_s <= TIE_FACTOR * least_s]
    return min(near, key=lambda split: (split.workers, split.latency_s))


def _tried(most: int) -> Iterator[int]:
    prompts = 1
    while prompts < most:
        yield prompts
        prompts += max(1, prompts // 5) if prompts >= EXHAUSTIVE else 1
    if most > 0:
        yield most


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
