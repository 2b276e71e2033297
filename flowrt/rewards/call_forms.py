"""What reward functions are called with: samples, the forms of their calls, and a limit on the rate of calls."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

Form = Literal["sample", "batch", "group"]
"""What a call of a function has: one sample, any samples, or all samples of a prompt."""


@dataclass(frozen=True, slots=True)
class RewardSample:
    """A sample to be scored."""

    response: str
    row: bytes
    """The row's columns, with the answer, as `flowrt.rewards.rows` writes them."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """Further arguments that a function can take by name, see `FACTS`."""


FACTS = ("step", "truncated", "finish_reason", "completion_ids", "prefix", "turn")
"""step: the number of training steps before the last token was generated; truncated: whether the response was cut at
the length limit; finish_reason: length, stop or stop_string; completion_ids: the generated tokens; prefix: the
beginning of the turn that was not generated; turn: the whole turn."""


def facts(response: str) -> dict[str, object]:
    """The facts of a response that no model has generated."""
    return {
        "step": 0,
        "truncated": False,
        "finish_reason": "stop",
        "completion_ids": [],
        "prefix": "",
        "turn": response,
    }


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a function is called."""

    form: Form = "sample"
    is_async: bool = False
    facts: tuple[str, ...] = ()
    """Names of `RewardSample.facts` that it takes."""


class Rate:
    """A limit on the number of calls that begin in a second; 0: none."""

    def __init__(self, per_s: float) -> None:
        self._interval_s = 1.0 / per_s if per_s else 0.0
        self._next_s = 0.0

    def due_in_s(self) -> float:
        """Seconds until the next call may begin."""
        return max(0.0, self._next_s - monotonic()) if self._interval_s else 0.0

    def take(self) -> float:
        """Count a call; returns the seconds after which it may begin."""
        delay_s = self.due_in_s()
        self._next_s = max(self._next_s, monotonic()) + self._interval_s
        return delay_s
