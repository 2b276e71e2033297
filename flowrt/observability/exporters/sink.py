"""Interface of exporters: they are given the steps, events and samples of a run, each in the order of its file.

An exporter is named by an entry of ``exporters`` in a configuration.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from flowrt.errors import ConfigError, suggested

TENSORBOARD, WANDB = "tensorboard", "wandb"
NAMED = (TENSORBOARD, WANDB)
CLOSE_S, WANDB_CLOSE_S = 10.0, 40.0
"""Seconds that an exporter, or that of W&B, may take to close; afterwards its process exits."""


def close_timeout_s(name: str) -> float:
    """Seconds that an exporter may take to close."""
    return WANDB_CLOSE_S if name == WANDB else CLOSE_S


def check_exporter(name: str) -> None:
    """Raise ConfigError for an exporter that is unknown, or whose library or file is missing."""
    if name == TENSORBOARD:
        from flowrt.observability.exporters import tensorboard_files

        tensorboard_files.check()
    elif name == WANDB:
        from flowrt.observability.exporters import wandb_run

        wandb_run.check()
    elif ".py:" not in name:
        raise ConfigError(
            f"exporters has {name!r}, which is neither {' nor '.join(NAMED)} nor FILE.py:CLASS{suggested(name, NAMED)}"
        )
    elif not Path(name.rpartition(":")[0]).is_file():
        raise ConfigError(f"exporters has {name!r}, and there is no file {name.rpartition(':')[0]!r}; correct it")


def own_path(name: str) -> str:
    """The file of a user's exporter; empty for one of flowrt."""
    return name.rpartition(":")[0] if name not in NAMED else ""


def log_name(name: str) -> str:
    """Name of the exporter's process and of its log."""
    return f"exporter-{name if name in NAMED else Path(own_path(name)).stem}"


def target_of(name: str, run_dir: Path) -> Path:
    """Directory for the files of an exporter; for a user's exporter the run directory."""
    return run_dir / name if name in NAMED else run_dir


Line = Mapping[str, Any]
"""A line of a file of the run, or a sample, by column."""


class Exporter(Protocol):
    """Methods that a user's class must have.

    If it has `event(line)` and `rewound(step)` of a `Sink`, these are called too.
    """

    def step(self, line: dict[str, Any]) -> None:
        """Take the line of metrics.jsonl of a closed step."""

    def samples(self, rows: list[dict[str, Any]]) -> None:
        """Take stored samples of one step or evaluation, by column; see docs/reference/metrics.md."""

    def close(self) -> None:
        """Finish: the run has ended, or the exporter is told to end."""


class Sink:
    """Base class of exporters; its methods ignore what they are given."""

    @property
    def steps_until_s(self) -> float:
        """Time of the run clock in seconds: steps that ended until then were passed on by an earlier process."""
        return float("-inf")

    @property
    def shares_until_s(self) -> float:
        """The same of the lines of attribution.jsonl."""
        return float("-inf")

    def step(self, line: Line) -> None:
        """Take the line of metrics.jsonl of a closed step."""

    def event(self, line: Line) -> None:
        """Take a line of events.jsonl."""

    def shares(self, line: Line) -> None:
        """Take a line of attribution.jsonl."""

    def samples(self, rows: Sequence[Line]) -> None:
        """Take stored samples of one step or of one evaluation."""

    def rewound(self, step: int) -> None:
        """Note a rollback of the run: this step and all later ones are passed on again."""

    def close(self) -> str:
        """Finish; returns a sentence for the user, or an empty text."""
        return ""
