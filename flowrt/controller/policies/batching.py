"""Batching policy: when a micro-batch is full, how many tokens a step trains, and on which rank.

- `FixedTokens` applies to a whole step, after its groups are known: advantages are computed over every response, and
  only the loss is cut to the budget (C3PO). Its choice depends on the order of issue and a seed, never on the order of
  completion: short answers finish first, and a budget filled in that order would train on them alone.
- By default groups are served on demand: a rank that pulls gets the oldest ready groups, so a fast rank trains more.
  `Balanced` gives every rank an equal part of the step's tokens, for ranks that are equally fast and wait for each
  other at the end of the step. It needs the whole step first, so there is no streaming within the step.
"""

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from flowrt.controller.state.samples import Group
from flowrt.errors import ConfigError

Cut = Literal["truncate", "whole"]
Order = Literal["issue", "shuffled"]


class Batcher(Protocol):
    """When is a micro-batch full? A full one must stay full when it grows; the remainder of a step is always full."""

    def full(self, groups: int, tokens: int, rows: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Full as soon as it holds at least ``tokens`` tokens."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"a micro-batch of {self.tokens} tokens would never be filled; use 1 or more")

    def full(self, groups: int, tokens: int, rows: int) -> bool:  # noqa: ARG002 (part of the protocol)
        return tokens >= self.tokens


@dataclass(frozen=True, slots=True)
class GroupCount:
    """Full at a fixed number of groups."""

    groups: int

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ConfigError(f"a micro-batch of {self.groups} groups would never be filled; use 1 or more")

    def full(self, groups: int, tokens: int, rows: int) -> bool:  # noqa: ARG002
        return groups >= self.groups


@dataclass(frozen=True, slots=True)
class SampleCount:
    """Full at this number of samples or more: groups are never split."""

    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ConfigError(f"a micro-batch of {self.rows} rows would never be filled; use 1 or more")

    def full(self, groups: int, tokens: int, rows: int) -> bool:  # noqa: ARG002
        return rows >= self.rows


@dataclass(frozen=True, slots=True)
class FixedTokens:
    """Train the same number of response tokens in every step; a step that has fewer trains all of them.

    Samples are taken until the budget is full, in order of issue or in an order drawn from the seed and the step.
    Of the last one only the beginning is trained (``truncate``, which meets the budget exactly) or all (``whole``).
    """

    tokens: int
    cut: Cut = "truncate"
    order: Order = "issue"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"a step of {self.tokens} tokens would train nothing; use 1 or more")
        for name, value, known in (("cut", self.cut, get_args(Cut)), ("order", self.order, get_args(Order))):
            if value not in known:
                raise ConfigError(f"{name} is {value!r}, which is not known; use one of {', '.join(known)}")

    def kept(self, lengths: Sequence[int], step: int) -> list[int]:
        """The number of leading response tokens of each sample that are trained.

        Args:
            lengths: response tokens of every sample of the step, in order of issue.
            step: the optimiser step; with ``shuffled`` it is part of the seed.
        """
        kept = [0] * len(lengths)
        left = self.tokens
        for index in self._order(len(lengths), step):
            if left <= 0:
                break
            kept[index] = lengths[index] if self.cut == "whole" else min(lengths[index], left)
            left -= kept[index]
        return kept

    def _order(self, samples: int, step: int) -> Sequence[int]:
        if self.order == "issue":
            return range(samples)
        return sorted(range(samples), key=lambda index: _draw(self.seed, step, index))


def _draw(seed: int, step: int, index: int) -> bytes:
    """16 pseudorandom bytes, the same on every machine."""
    return hashlib.blake2b(f"{seed} {step} {index}".encode(), digest_size=16).digest()


class RankBalancing(Protocol):
    """Which rank trains which of the step's groups?"""

    @property
    def whole_step(self) -> bool:
        """True if `split` is to be called when all groups of the step are ready, before any is trained."""
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

    Starts with one partition per weight, which has that weight in one part and nothing in the others, and repeatedly
    merges the two partitions with the largest differences, heavy parts of one with light parts of the other.
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
        parts = [_merge(heavy, light) for heavy, light in zip(one, reversed(other), strict=True)]
        parts.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], age, parts))
        age += 1
    return [sorted(indices) for _, indices in heap[0][2]]


def _merge(one: tuple[int, list[int]], other: tuple[int, list[int]]) -> tuple[int, list[int]]:
    """The sum and the indices of both; appends the shorter list to the longer one, for speed."""
    longer, shorter = sorted((one[1], other[1]), key=len, reverse=True)
    longer.extend(shorter)
    return one[0] + other[0], longer
