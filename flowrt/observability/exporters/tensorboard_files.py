"""TensorBoard: metrics as scalars, samples and warnings as text, in event files written by tensorboardX."""

import importlib.util
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrt.errors import ConfigError
from flowrt.observability.exporters.feed import numbers
from flowrt.observability.exporters.sink import Line, Sink

MODULE = "tensorboardX"
MISSING = f"exporting to TensorBoard needs {MODULE}; install it: pip install 'flowrt[tensorboard]'"
SAMPLES_PER_STEP = 4
MAX_CHARS = 2_000
SHOWN_EVENTS = ("guard", "warning", "gone", "rolled_back", "version_lost")
GROUPS = {
    "reward": ("reward", "reward_std", "reward_p10", "reward_p90", "zero_variance_groups", "zero_variance_fraction"),
    "length": ("response_length", "length_mean", "length_max", "truncated", "tokens"),
    "staleness": ("staleness_mean", "staleness_max"),
    "time": ("wall_s", "samples_per_s"),
}
_ILLEGAL = re.compile(r"[^-/\w.]")
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


def tag(name: str) -> str:
    """The tag of a metric, GROUP/NAME; a character that a tag must not contain becomes an underscore."""
    name = _ILLEGAL.sub("_", name)
    if "/" in name:
        return name
    return f"{'guard' if name.startswith('guard_') else _GROUP_OF.get(name, 'train')}/{name}"


def check() -> None:
    """Raise ConfigError if tensorboardX is not installed."""
    if importlib.util.find_spec(MODULE) is None:
        raise ConfigError(MISSING)


class TensorBoardFiles(Sink):
    """Event files in one directory. A start or a rollback purges the steps that are written again."""

    def __init__(self, directory: Path, first: int = 0) -> None:
        """``first``: the first step that will be written. Raises ConfigError without tensorboardX."""
        check()
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._offset_s = 0.0
        self._last_s = 0.0
        self._writer = self._opened(first)

    def _opened(self, purge_step: int) -> Any:
        from tensorboardX import SummaryWriter

        # TensorBoard reads files by name. Names begin with the time in seconds; the suffix orders those of one second.
        suffix = f".{time.time_ns()}.{os.getpid()}"
        return SummaryWriter(str(self._directory), purge_step=purge_step, filename_suffix=suffix, flush_secs=2)

    def step(self, line: Line) -> None:
        self._last_s = self._offset_s + line["wall_s"]
        for name, value in numbers(line):
            self._writer.add_scalar(tag(name), value, line["step"], walltime=self._last_s)

    def shares(self, line: Line) -> None:
        for role, found in line.get("roles", {}).items():
            seconds = {cause: value for cause, value in found.items() if cause != "workers"}
            total_s = sum(seconds.values())
            for cause, value in seconds.items() if total_s > 0 else ():
                self._writer.add_scalar(
                    f"time/{role}/{cause}", value / total_s, line["step"], walltime=self._offset_s + line["to_s"]
                )

    def event(self, line: Line) -> None:
        if isinstance(line.get("unix_s"), float | int) and isinstance(line.get("wall_s"), float | int):
            self._offset_s = line["unix_s"] - line["wall_s"]
        if line["kind"] in SHOWN_EVENTS:
            at_s = self._offset_s + line.get("wall_s", 0.0)
            self._writer.add_text(f"events/{line['kind']}", _quoted(line["text"]), line.get("step", 0), walltime=at_s)

    def samples(self, rows: Sequence[Line]) -> None:
        for place, row in enumerate(rows[:SAMPLES_PER_STEP]):
            name = row["eval_name"] or "train"
            reward = "" if row["reward"] is None else f"reward {row['reward']:g}, "
            text = f"{reward}{row['finish']}\n\n{_quoted(row['prompt_text'])}\n\n---\n\n{_quoted(row['completion'])}"
            self._writer.add_text(f"samples/{name}/{place}", text, row["step"], walltime=self._last_s or None)

    def rewound(self, step: int) -> None:
        self._writer.close()
        self._writer = self._opened(step)

    def close(self) -> str:
        self._writer.close()
        return f"TensorBoard files in {self._directory}: tensorboard --logdir {self._directory}"


def _quoted(text: str) -> str:
    """The text, cut at `MAX_CHARS`, as an indented code block, so that no Markdown in it is interpreted."""
    clean = "".join(one if one.isprintable() or one == "\n" else f"\\u{ord(one):04x}" for one in text[:MAX_CHARS])
    return "\n".join(f"    {line}" for line in clean.splitlines())
