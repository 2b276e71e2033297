"""The sharing seam: which data-parallel rank trains which of the step's groups.

By default nobody has a share: whichever rank asks gets the oldest groups that are ready, and a fast rank trains more.
`Balanced` gives every rank an equal part of the step's tokens, for ranks that are equally fast and wait for each
other at the end of the step anyway. It has to see the whole step first, so it gives up streaming within the step.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flowrt.controller.slots import Group
from flowrt.errors import ConfigError


class Sharing(Protocol):
    """Which rank trains which of the step's groups?"""

    @property
    def whole_step(self) -> bool:
        """Whether `split` has to be asked, once all groups of the step are ready, before any of them is trained."""
        ...

    def split(self, groups: Sequence[Group], tokens: Sequence[int]) -> list[list[Group]] | None:
        """The groups of each rank; None: whoever asks gets the oldest. ``tokens`` are those of each group."""
        ...


@dataclass(frozen=True, slots=True)
class OnDemand:
    """Whoever asks gets the oldest."""

    @property
    def whole_step(self) -> bool:
        return False

    def split(self, groups: Sequence[Group], tokens: Sequence[int]) -> list[list[Group]] | None:  # noqa: ARG002
        return None


@dataclass(frozen=True, slots=True)
class Balanced:
    """Shares of nearly equal tokens, each in the order of the step; one rank alone is served on demand.

    With fewer groups than ranks some shares are empty: those ranks train nothing in this step.
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
    """Indices of the weights in ``ways`` parts of nearly equal sums, by the method of largest differences.

    Begins with one partition per weight, which has that weight in one part and nothing in the others, and always
    merges the two partitions whose sums differ most, the heavy parts of one with the light parts of the other.
    Costs O(ways · n log n). Equal input gives equal output; the heaviest part comes first, indices ascend in each.
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
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        parts = [_joined(heavy, light) for heavy, light in zip(one, reversed(other), strict=True)]
        parts.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], age, parts))
        age += 1
    return [sorted(indices) for _, indices in heap[0][2]]


def _joined(one: tuple[int, list[int]], other: tuple[int, list[int]]) -> tuple[int, list[int]]:
    """The sum of both and the indices of both; the shorter list is poured into the longer one."""
    longer, shorter = sorted((one[1], other[1]), key=len, reverse=True)
    longer.extend(shorter)
    return one[0] + other[0], longer
