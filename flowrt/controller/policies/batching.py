"""Batching policy: when a micro-batch is full, and how many tokens a step trains.

`FixedTokens` applies to a whole step, after its groups are known: advantages are computed over every response, and only
the loss is cut to the budget (C3PO, arXiv 2506.14731). Which samples are trained depends on a seed and on their places
in the order of issue, never on the order of completion: short answers finish first, and a budget filled in that order
would train on them alone.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flowrt.errors import ConfigError


class Batcher(Protocol):
    """When is a micro-batch of this many whole groups, tokens and rows (samples) full?

    A full micro-batch must stay full when it grows. The remainder of a step is served without asking.
    """

    def full(self, groups: int, tokens: int, rows: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Full at this number of tokens or more. Raises ConfigError for less than 1."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"a micro-batch of {self.tokens} tokens would never be filled; use 1 or more")

    def full(self, groups: int, tokens: int, rows: int) -> bool:  # noqa: ARG002 (part of the protocol)
        return tokens >= self.tokens


@dataclass(frozen=True, slots=True)
class GroupCount:
    """Full at this number of groups. Raises ConfigError for less than 1."""

    groups: int

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ConfigError(f"a micro-batch of {self.groups} groups would never be filled; use 1 or more")

    def full(self, groups: int, tokens: int, rows: int) -> bool:  # noqa: ARG002
        return groups >= self.groups


@dataclass(frozen=True, slots=True)
class SampleCount:
    """Full at this number of samples or more: groups are never split. Raises ConfigError for less than 1."""

    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ConfigError(f"a micro-batch of {self.rows} rows would never be filled; use 1 or more")

    def full(self, groups: int, tokens: int, rows: int) -> bool:  # noqa: ARG002
        return rows >= self.rows


@dataclass(frozen=True, slots=True)
class FixedTokens:
    """Train the same number of response tokens in every step; a step that has fewer trains all of them.

    Samples are taken in an order drawn from the seed and the step until the budget is full; of the last one only the
    beginning is trained. Raises ConfigError for less than 1 token.
    """

    tokens: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"a step of {self.tokens} tokens would train nothing; use 1 or more")

    def kept(self, lengths: Sequence[int], step: int) -> list[int]:
        """The number of leading response tokens of each sample that are trained.

        Args:
            lengths: response tokens of every sample of the step, in order of issue.
            step: the optimiser step.
        """
        kept = [0] * len(lengths)
        left = self.tokens
        for index in sorted(range(len(lengths)), key=lambda index: _draw(self.seed, step, index)):
            kept[index] = min(lengths[index], left)
            left -= kept[index]
        return kept


def _draw(seed: int, step: int, index: int) -> bytes:
    """16 pseudorandom bytes, the same on every machine."""
    return hashlib.blake2b(f"{seed} {step} {index}".encode(), digest_size=16).digest()
