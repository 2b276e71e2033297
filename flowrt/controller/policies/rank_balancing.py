"""Rank balancing policy: which data-parallel rank trains which of the step's groups.

By default groups are served on demand: a rank that pulls gets the oldest ready groups, so a fast rank trains more.
`Balanced` gives every rank an equal part of the step's tokens, for ranks that are equally fast and wait for each
other at the end of the step. It needs the whole step first, so there is no streaming within the step.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flowrt.controller.state.slots import Group
from flowrt.errors import ConfigError


class RankBalancing(Protocol):
    """Which rank trains which of the step's groups?"""

    @property
    def whole_step(self) -> bool:
        """True if `split` has to be called when all groups of the step are ready, before any of them is trained."""
        ...

    def split(self, groups: Sequence[Group], tokens: Sequence[int]) -> list[list[Group]] | None:
        """The groups of each rank, or None to serve them on demand; ``tokens`` has the tokens of each group."""
        ...


@dataclass(frozen=True, slots=True)
class OnDemand:
    """A rank that pulls gets the oldest ready groups."""

    @property
    def whole_step(self) -> bool:
        return False

    def split(self, groups: Sequence[Group], tokens: Sequence[int]) -> list[list[Group]] | None:  # noqa: ARG002
        return None


@dataclass(frozen=True, slots=True)
class Balanced:
    """Shares of nearly equal tokens, each in the order of the step; a single rank is served on demand.

    With fewer groups than ranks some shares are empty: those ranks train nothing in this step. Raises ConfigError for
    less than 1 rank.
    """

    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigError(f"a step cannot be shared among {self.ranks} ranks; use 1 or more")

    @property
    def whole_step(self) -> bool:
        return self.ranks > 1

    def split(self, groups: Sequence[Group], tokens: Sequence[int]) -> list[list[Group]] | None:
        if self.ranks == 1:
            return None
        return [[groups[index] for index in share] for share in karmarkar_karp(tokens, self.ranks)]


def karmarkar_karp(weights: Sequence[int], ways: int) -> list[list[int]]:
    """Indices of the weights in ``ways`` parts of nearly equal sums, by the largest differencing method.

    Starts with one partition per weight, which has that weight in one part and nothing in the others, and repeatedly
    merges the two partitions with the largest differences, heavy parts of the first with light parts of the second.
    Costs O(ways * n log n). Equal input gives equal output; the heaviest part comes first, indices ascend in each part.
    Raises ConfigError for ``ways`` below 1. Source: Karmarkar and Karp, 1982.
    """
    if ways < 1:
        raise ConfigError(f"nothing can be split into {ways} parts; use 1 or more")
    if not weights:
        return [[] for _ in range(ways)]
    # (minus the difference of heaviest and lightest sum, age of the partition, its parts by falling sum)
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = [
        (-weight, index, [(weight, [index]), *((0, list[int]()) for _ in range(ways - 1))])
        for index, weight in enumerate(weights)
    ]
    heapq.heapify(heap)
    age = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        parts = [_merge(heavy, light) for heavy, light in zip(first, reversed(other), strict=True)]
        parts.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], age, parts))
        age += 1
    return [sorted(indices) for _, indices in heap[0][2]]


def _merge(part: tuple[int, list[int]], other: tuple[int, list[int]]) -> tuple[int, list[int]]:
    """The sum and the indices of two parts; appends the shorter list to the longer one, for speed."""
    longer, shorter = sorted((part[1], other[1]), key=len, reverse=True)
    longer.extend(shorter)
    return part[0] + other[0], longer
