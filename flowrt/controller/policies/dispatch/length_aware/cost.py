"""Cost model of decoding: the time of a batch of rows that are decoded together."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowrt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds per decoding step of ``rows`` sequences: a constant for reading the weights, plus a cost per row."""

    base_s: float
    per_row_s: float

    def __post_init__(self) -> None:
        if self.base_s < 0 or self.per_row_s < 0 or self.base_s + self.per_row_s == 0:
            raise ConfigError(
                f"decoding costs {self.base_s} s and {self.per_row_s} s per row; give times, not both of them 0"
            )

    def __call__(self, rows: int) -> float:
        return self.base_s + self.per_row_s * rows


def completion_s(tokens: Sequence[float], cost: Callable[[int], float]) -> float:
    """Seconds until the last of these sequences ends if all start together in one batch; exact.

    While j rows run, every step costs cost(j): T = Σ L_(j) · (cost(j) − cost(j − 1)), with the longest
    first and cost(0) = 0.
    """
    total, slower = 0.0, 0.0
    for row, length in enumerate(sorted(tokens, reverse=True), 1):
        faster, slower = slower, cost(row)
        total += length * (slower - faster)
    return total


def pool_s(tokens: Sequence[float], workers: int, rows: int, cost: Callable[[int], float]) -> float:
    """Predicted seconds of a pool of equal workers; sequences, longest first, are assigned round robin.

    It is the time of the worker with the longest sequence. A sequence without a free row waits for the first row that
    ends. Rows of one worker advance together, so a row with several sequences counts as one of their total length.
    """
    longest_share = tokens[::workers]
    chains = list(longest_share[:rows])
    if len(longest_share) > rows:
        heapq.heapify(chains)
        for length in longest_share[rows:]:
            heapq.heapreplace(chains, chains[0] + length)
    return completion_s(chains, cost)
