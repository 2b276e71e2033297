"""Cost models of simulated work, in simulated seconds."""

import math
from dataclasses import dataclass

from flowrt.controller.policies.dispatch.length_aware.cost import completion_s


@dataclass(frozen=True, slots=True)
class GenerationCost:
    """Generation on one worker.

    A decoding step of b sequences takes max(base_s, b per_row_s): the time to read the weights, or that of computing
    all rows if it is longer.

    Attributes:
        base_s: a step that is bound by reading the weights.
        per_row_s: per sequence, for a step that is bound by computation.
        prefill_token_s: per token of a new prompt; decoding pauses meanwhile.
        load_s: to load new weights; decoding pauses meanwhile.
    """

    base_s: float
    per_row_s: float = 0.0
    prefill_token_s: float = 0.0
    load_s: float = 0.0

    def step_s(self, rows: int) -> float:
        """Duration of a step of ``rows`` sequences; 0 for none."""
        return max(self.base_s, rows * self.per_row_s) if rows else 0.0

    def together_s(self, lengths: list[int]) -> float:
        """Duration of a batch of sequences of these lengths that start together."""
        return completion_s(lengths, self.step_s)


@dataclass(frozen=True, slots=True)
class ScoreCost:
    """Forward passes over samples, or a reward function, in passes of at most ``pass_samples`` samples."""

    token_s: float = 0.0
    sample_s: float = 0.0
    pass_s: float = 0.0
    pass_samples: int = 16

    def score(self, tokens: int, samples: int) -> float:
        """Duration of one call."""
        passes = math.ceil(samples / self.pass_samples)
        return passes * self.pass_s + tokens * self.token_s + samples * self.sample_s


@dataclass(frozen=True, slots=True)
class TrainCost:
    """Training: a cost per token, and a constant cost of each pass of at most ``pass_tokens`` tokens."""

    token_s: float
    pass_s: float = 0.0
    pass_tokens: int = 16384
    optimizer_s: float = 0.0
    """Duration of the optimiser step."""
    snapshot_s: float = 0.0
    """Duration of copying the weights to host memory before they are published."""

    def accumulate(self, tokens: int) -> float:
        """Duration of the forward and backward passes over a micro-batch."""
        return tokens * self.token_s + math.ceil(tokens / self.pass_tokens) * self.pass_s
