"""Outcomes of calls of reward functions: a value, or one of the ways to fail."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Result(StrEnum):
    """Kinds of outcomes."""

    OK = "ok"
    NOT_APPLICABLE = "not_applicable"
    """The function returned None."""
    TIMEOUT = "timeout"
    MEMORY = "memory"
    """The function raised MemoryError."""
    ERROR = "error"
    """The function raised another exception."""
    DIED = "died"
    """The process of the function ended."""
    INVALID = "invalid"
    """The function returned something else than a finite number, None, or named finite numbers."""
    HTTP = "http"
    """The server did not return a reward."""


FAILURES = (Result.TIMEOUT, Result.MEMORY, Result.ERROR, Result.DIED, Result.INVALID, Result.HTTP)


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """The outcome of one call."""

    result: Result
    value: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named numbers of the call: the parts whose sum is the value, and numbers that are logged alone."""
    detail: str = ""
    """How the call failed, as the end of a sentence; empty if it did not fail."""
    line: int = 0
    """The line in the user's file; 0 if unknown."""
    seconds: float = 0.0
    """Duration of the call, in seconds."""

    @property
    def is_failure(self) -> bool:
        """Whether the call failed; None as a returned value is no failure."""
        return self.result in FAILURES
