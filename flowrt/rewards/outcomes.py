"""What comes of a call of a reward function: a value, or one of the ways to fail."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Result(StrEnum):
    """The kinds of outcomes."""

    OK = "ok"
    NOT_APPLICABLE = "not_applicable"
    """It returned None."""
    TIMEOUT = "timeout"
    MEMORY = "memory"
    """It raised MemoryError."""
    ERROR = "error"
    """It raised another exception."""
    DIED = "died"
    """Its process ended."""
    INVALID = "invalid"
    """It returned something else than a finite number, None, or named numbers."""
    HTTP = "http"
    """The server did not give a reward."""


FAILURES = (Result.TIMEOUT, Result.MEMORY, Result.ERROR, Result.DIED, Result.INVALID, Result.HTTP)


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """What came of one call."""

    result: Result
    value: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    """The parts whose sum is the value, if the function returns several."""
    detail: str = ""
    """How it failed, as the end of a sentence."""
    line: int = 0
    """The line of the user's file; 0: unknown."""
    seconds: float = 0.0
    """How long the call took."""

    @property
    def is_failure(self) -> bool:
        """Whether the call gave no value, although it should have."""
        return self.result in FAILURES
