"""Mean rewards of the earlier groups of each prompt, for the curriculum."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Outcome(NamedTuple):
    """The mean reward of a group that was trained, or dropped by the group filter, in a step."""

    step: int
    epoch: int
    prompt: int
    reward: float


class RewardHistory:
    """The last ``length`` outcomes of each prompt, ordered by step and epoch; 0: none are kept.

    Outcomes of the step in training are kept apart until it is closed: before that, which of them there are depends on
    timing.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._of: dict[int, tuple[Outcome, ...]] = {}
        self._in_training: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        """Add an outcome of the step in training."""
        if self._length:
            self._in_training.append(outcome)

    def close_step(self) -> None:
        """Add the outcomes of the step in training, which is closed, to those of the prompts."""
        self._count_in(self._in_training)
        self._in_training = []

    def restore(self, outcomes: Iterable[Outcome], step: int) -> None:
        """Add the outcomes of earlier controllers; ``step`` is the step in training."""
        if self._length:
            known = list(outcomes)
            self._count_in([outcome for outcome in known if outcome.step < step])
            self._in_training = [outcome for outcome in known if outcome.step >= step]

    def rewards(self, prompt: int) -> Sequence[float]:
        """Mean rewards of the prompt's last groups, oldest first."""
        return [outcome.reward for outcome in self._of.get(prompt, ())]

    def _count_in(self, outcomes: Iterable[Outcome]) -> None:
        new: dict[int, list[Outcome]] = defaultdict(list)
        for outcome in outcomes:
            new[outcome.prompt].append(outcome)
        for prompt, of_prompt in new.items():
            self._of[prompt] = (*self._of.get(prompt, ()), *sorted(of_prompt))[-self._length :]
