"""What simulated work takes, in simulated seconds: plain values, and the arithmetic on them."""

import math
from dataclasses import dataclass

from flowrt.controller.decode_cost import completion_s


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Generation on one worker.

    A decoding step of b sequences takes ``base_s`` as long as it is bound by reading the weights, and ``per_row_s``
    for each sequence when that is more: tau(b) = max(base_s, b per_row_s).
    """

    base_s: float
    per_row_s: float = 0.0
    prefill_token_s: float = 0.0  # decoding stands still for so long for each token of a new prompt
    load_s: float = 0.0  # to put new weights into use; nothing is generated meanwhile

    def step_s(self, rows: int) -> float:
        """Seconds a token of each of ``rows`` sequences that run together; 0 for none."""
        return max(self.base_s, rows * self.per_row_s) if rows else 0.0

    def together_s(self, lengths: list[int]) -> float:
        """Seconds until all of these are complete when they begin together."""
        return completion_s(lengths, self.step_s)


@dataclass(frozen=True, slots=True)
class ScoreCost:
    """Forward passes over samples, or a reward function: at most ``pass_samples`` at a time, ``pass_s`` more each."""

    token_s: float = 0.0
    sample_s: float = 0.0
    pass_s: float = 0.0
    pass_samples: int = 16

    def score(self, tokens: int, samples: int) -> float:
        """Seconds for one call."""
        passes = math.ceil(samples / self.pass_samples)
        return passes * self.pass_s + tokens * self.token_s + samples * self.sample_s


@dataclass(frozen=True, slots=True)
class TrainCost:
    """Training: the same tokens take the same time however a step was cut, but for ``pass_s``.

    A micro-batch is cut again into passes of at most ``pass_tokens`` tokens, each of which costs ``pass_s`` more.
    """

    token_s: float
    pass_s: float = 0.0
    pass_tokens: int = 16384
    optimizer_s: float = 0.0  # the optimiser step
    snapshot_s: float = 0.0  # to copy the weights to the host before they are published

    def accumulate(self, tokens: int) -> float:
        """Seconds of forward and backward passes over a micro-batch."""
        return tokens * self.token_s + math.ceil(tokens / self.pass_tokens) * self.pass_s
