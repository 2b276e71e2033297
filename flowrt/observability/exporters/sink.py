"""What an exporter is: it takes the steps, events and samples of a run, in the order in which they were written."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Line = Mapping[str, Any]
"""A line of a file of the run, or a sample."""


class Exporter(Protocol):
    """What a user's class has to have. `event(line)` and `rewound(step)` of a `Sink` are called too if it has them."""

    def step(self, line: dict[str, Any]) -> None:
        """A step was closed: its line of metrics.jsonl."""

    def samples(self, rows: list[dict[str, Any]]) -> None:
        """Stored samples of a step or an evaluation, by column; see docs/reference/metrics.md."""

    def close(self) -> None:
        """The run has ended, or the exporter is to end."""


class Sink:
    """An exporter of flowrt; what it does not override, it leaves out."""

    def step(self, line: Line) -> None:
        """A step was closed: its line of metrics.jsonl."""

    def event(self, line: Line) -> None:
        """A line of events.jsonl."""

    def shares(self, line: Line) -> None:
        """A line of attribution.jsonl."""

    def samples(self, rows: Sequence[Line]) -> None:
        """Stored samples of one step, or of one evaluation."""

    def rewound(self, step: int) -> None:
        """The run has gone back: this step and all later ones come again."""

    def close(self) -> str:
        """The end; returns a sentence for the user, or nothing."""
        return ""
