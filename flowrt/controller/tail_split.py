"""The balance search of the tail lane: how many prompts, and how many workers, are set apart."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flowrt.controller.decode_cost import pool_s

EXHAUSTIVE = 12  # numbers of prompts up to this are all tried, beyond it one in about five
NEARLY = 1.03  # predictions are no better than that: of splits that differ by less, the one of fewest workers wins

Scenario = Sequence[tuple[float, int]]
"""How long every sample of a round may turn out, in tokens, with the rank of its prompt; the longest sample first."""


@dataclass(frozen=True, slots=True)
class Split:
    """The prompts of the lowest ranks go to ``workers`` workers, each of which runs ``rows`` of their samples."""

    prompts: int
    workers: int
    rows: int
    latency_s: float


NO_SPLIT = Split(0, 0, 0, math.inf)


def best_split(
    scenarios: Sequence[Scenario], most_prompts: int, workers: int, rows: int, cost: Callable[[int], float]
) -> Split:
    """The split with the least predicted time of the slower pool, on average over the scenarios.

    That of no prompts is one pool of all workers. The samples that are set apart all start at once: a split for which
    there are not rows enough is not considered. Of splits that are nearly as good, the one of fewest workers wins.
    """
    alone_s = [pool_s([tokens for tokens, _ in one], workers, rows, cost) for one in scenarios]
    found = [Split(0, 0, 0, _mean(alone_s))]
    for prompts in _tried(most_prompts):
        lanes = [[tokens for tokens, rank in one if rank < prompts] for one in scenarios]
        rests = [[tokens for tokens, rank in one if rank >= prompts] for one in scenarios]
        for reserved in range(max(1, math.ceil(len(lanes[0]) / rows)), workers):
            lanes_s = [pool_s(lane, reserved, rows, cost) for lane in lanes]
            rests_s = [pool_s(rest, workers - reserved, rows, cost) for rest in rests]
            latency_s = _mean(list(map(max, lanes_s, rests_s)))
            found.append(Split(prompts, reserved, math.ceil(len(lanes[0]) / reserved), latency_s))
            if all(map(float.__le__, lanes_s, rests_s)):
                break  # with more workers set apart the other pool, already the slower one, only gets slower
    least_s = min(split.latency_s for split in found)
    near = [split for split in found if split.latency_s <= NEARLY * least_s]
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
