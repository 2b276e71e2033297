"""What an exporter is: it takes the steps, events and samples of a run, in the order in which they were written.

Its name is one of `exporters` of a configuration.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from flowrt.errors import ConfigError, suggested

TENSORBOARD, WANDB = "tensorboard", "wandb"
NAMED = (TENSORBOARD, WANDB)
CLOSE_S, WANDB_CLOSE_S = 10.0, 40.0
"""Time for the end of an exporter; afterwards its process is killed."""


def close_timeout_s(name: str) -> float:
    """The time that an exporter has to end, in seconds."""
    return WANDB_CLOSE_S if name == WANDB else CLOSE_S


def check_exporter(name: str) -> None:
    """Raises ConfigError for an exporter that is not known, whose library is missing, or whose file is."""
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
    """The file of an exporter of the user; empty for one of flowrt."""
    return name.rpartition(":")[0] if name not in NAMED else ""


def log_name(name: str) -> str:
    """The name of its process and log."""
    return f"exporter-{name if name in NAMED else Path(own_path(name)).stem}"


def target_of(name: str, run_dir: Path) -> Path:
    """Where the files of an exporter of a run go."""
    return run_dir / name if name in NAMED else run_dir


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
