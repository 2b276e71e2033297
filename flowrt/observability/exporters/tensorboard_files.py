"""TensorBoard: metrics as scalars, samples and warnings as text, in event files written by tensorboardX."""

import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrt.errors import ConfigError
from flowrt.observability.exporters.exported_names import exported_numbers, exported_shares
from flowrt.observability.exporters.sink import Line, Sink

MODULE = "tensorboardX"
MISSING = f"exporting to TensorBoard needs {MODULE}; install it: pip install 'flowrt[tensorboard]'"
SAMPLES_PER_STEP = 4
MAX_CHARS = 2_000
SHOWN_EVENTS = ("guard", "warning", "gone", "rolled_back", "version_lost", "evaluation_skipped")


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
        self._add(exported_numbers(line), line["step"], self._last_s)

    def shares(self, line: Line) -> None:
        self._add(exported_shares(line), line["step"], self._offset_s + line["to_s"])

    def _add(self, numbers: Mapping[str, float], step: int, at_s: float) -> None:
        """Write scalars; not by ``add_scalar``, which replaces characters of names that TensorBoard accepts."""
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._writer.file_writer.add_summary(Summary(value=values), step, at_s)

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
    clean = "".join(
        character if character.isprintable() or character == "\n" else f"\\u{ord(character):04x}"
        for character in text[:MAX_CHARS]
    )
    return "\n".join(f"    {line}" for line in clean.splitlines())
