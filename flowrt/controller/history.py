"""What earlier epochs tell about the length of an answer: a prompt whose answers were long gets long ones again."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from flowrt.controller.slots import Group

MEMORY = 16  # samples: an average over the last two or so epochs of a prompt
RECENT = 512  # samples from which it is learned how far samples of one prompt lie apart
PROMPTS = 1_000_000  # beyond so many, the prompt that has been silent for longest is forgotten


@dataclass(slots=True)
class History:
    """The mean response length of every prompt, in tokens; newer samples count more once there are ``memory``."""

    memory: int = MEMORY
    prompts: int = PROMPTS
    _mean: dict[tuple[str, int], tuple[float, int]] = field(default_factory=dict)  # with the number of samples
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  # of a sample to what was expected

    def learn(self, group: Group, tokens: int) -> None:
        """One more sample of this group's prompt."""
        prompt = (group.flow, group.prompt)
        mean, samples = self._mean.pop(prompt, (0.0, 0))
        if mean > 0:
            self._ratios.append(tokens / mean)
        samples = min(samples + 1, self.memory)
        self._mean[prompt] = (mean + (tokens - mean) / samples, samples)
        if len(self._mean) > self.prompts:
            del self._mean[next(iter(self._mean))]

    def predict(self, group: Group) -> float | None:
        """The length to expect; None for a prompt that has not been seen."""
        known = self._mean.get((group.flow, group.prompt))
        return None if known is None else known[0]

    def believed(self, groups: Sequence[Group]) -> list[float]:
        """The predictions of known groups, drawn together by the part of their differences that chance explains.

        Means of few samples differ even where all prompts are alike, and the longest of many is long by luck as well.
        How far samples of one prompt lie apart says how much of that to expect: only what is beyond is believed.
        """
        known = [self._mean[group.flow, group.prompt] for group in groups]
        logs = [math.log(max(1.0, mean)) for mean, _ in known]
        apart = _variance([math.log(max(1e-3, ratio)) for ratio in self._ratios])
        chance = apart * _mean([1 / samples for _, samples in known])
        differ = _variance(logs)
        belief = max(0.0, 1 - chance / differ) if differ > 0 else 0.0
        middle = _mean(logs)
        return [math.exp(middle + belief * (log - middle)) for log in logs]

    def spread(self) -> list[float]:
        """What recent samples were, in multiples of what was expected of them, in ascending order; [1.0] at first."""
        return sorted(self._ratios) or [1.0]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    return _mean([(value - mean) ** 2 for value in values])
