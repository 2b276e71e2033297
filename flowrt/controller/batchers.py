"""The batcher seam: when is a micro-batch full?"""

from dataclasses import dataclass
from typing import Protocol

from flowrt.errors import ConfigError


class Batcher(Protocol):
    """When is a micro-batch full? The remainder of a step always is."""

    def full(self, groups: int, tokens: int, rows: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Full as soon as it holds at least ``tokens`` tokens."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"a micro-batch of {self.tokens} tokens would never be filled; use 1 or more")

    def full(self, groups: int, tokens: int, rows: int) -> bool:  # noqa: ARG002 (the seam offers all)
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
