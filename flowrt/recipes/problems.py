"""What a recipe asks of its subject: problems to pose, and a reward for an answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt, the final answer that the reward looks for, and a full solution to learn from in the warm start."""

    prompt: str
    answer: str
    solution: str


class Subject(Protocol):
    """Problems and their reward; the same in every worker that makes it from the same configuration."""

    scores_unfinished: bool
    """Whether a response that was cut off is scored as it is; else it counts as none."""

    def training_problems(self) -> Sequence[Problem]: ...

    def held_out_problems(self) -> Sequence[Problem]: ...

    def lesson(self, rng: Random, bare: bool) -> Problem:
        """A problem to imitate in the warm start; ``bare`` asks for the second phase's mix of solutions."""
        ...

    def reward(self, response: str, answer: str) -> float:
        """Between 0 and 1; 1 for a right answer. ``response`` ends where the model ended it."""
        ...

    def tokenizer(self) -> Tokenizer:
        """A tokenizer for the embedded model, with the tokens <pad> and <eos>."""
        ...
