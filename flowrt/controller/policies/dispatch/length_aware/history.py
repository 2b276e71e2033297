"""Predicted response lengths, from the responses to the same prompt in earlier epochs."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from flowrt.controller.state.samples import Group

MEMORY = 16  # samples: about the last two epochs of a prompt
RECENT = 512  # samples from which the variance within a prompt is estimated
MAX_PROMPTS = 1_000_000  # beyond this, the least recently sampled prompt is removed


@dataclass(slots=True)
class History:
    """The mean response length of each prompt in tokens; an exponential mean after ``memory`` samples."""

    memory: int = MEMORY
    prompts: int = MAX_PROMPTS
    _mean: dict[tuple[str, int], tuple[float, int]] = field(default_factory=dict)  # with the number of samples
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  # actual over predicted length

    def learn(self, group: Group, tokens: int) -> None:
        """Add a sample of this group's prompt."""
        prompt = (group.flow, group.prompt)
        mean, samples = self._mean.pop(prompt, (0.0, 0))
        if mean > 0:
            self._ratios.append(tokens / mean)
        samples = min(samples + 1, self.memory)
        self._mean[prompt] = (mean + (tokens - mean) / samples, samples)
        if len(self._mean) > self.prompts:
            del self._mean[next(iter(self._mean))]

    def predict(self, group: Group) -> float | None:
        """The predicted length in tokens; None for a prompt without samples."""
        known = self._mean.get((group.flow, group.prompt))
        return None if known is None else known[0]

    def shrunk_means(self, groups: Sequence[Group]) -> list[float]:
        """The predictions of known groups, shrunk towards their mean by the part of their variance due to chance.

        Means of few samples differ even if all prompts are alike. The variance within a prompt gives the expected
        difference; only what exceeds it is kept (shrinkage of log lengths).
        """
        known = [self._mean[group.flow, group.prompt] for group in groups]
        logs = [math.log(max(1.0, mean)) for mean, _ in known]
        within = _variance([math.log(max(1e-3, ratio)) for ratio in self._ratios])
        chance = within * _mean([1 / samples for _, samples in known])
        total = _variance(logs)
        weight = max(0.0, 1 - chance / total) if total > 0 else 0.0
        middle = _mean(logs)
        return [math.exp(middle + weight * (log - middle)) for log in logs]

    def spread(self) -> list[float]:
        """Recent ratios of actual to predicted length in ascending order; [1.0] before the first."""
        return sorted(self._ratios) or [1.0]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    return _mean([(value - mean) ** 2 for value in values])
