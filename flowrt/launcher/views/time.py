"""``flowrt time``: where the time of a run went, as a table of shares by role and a sentence for each."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrt.controller.attribution.causes import KINDS
from flowrt.controller.storage.time_files import ATTRIBUTION
from flowrt.errors import ConfigError
from flowrt.launcher.terminal import printable
from flowrt.observability.attribution import Times, add_up, of_worker, read
from flowrt.recipes.run_dir import CONFIG

STEPS = re.compile(r"(\d{0,10}):(\d{0,10})|(\d{1,10})")


def steps_range(text: str) -> tuple[int, int | None]:
    """The first and the last step (None: no limit) of A:B, A:, :B or one step. Raises ConfigError."""
    match = STEPS.fullmatch(text)
    if match is None:
        raise ConfigError(f"--steps {text!r} is no range of steps; write A:B, A:, :B or one step")
    if match[3]:
        return int(match[3]), int(match[3])
    first, last = int(match[1] or 0), int(match[2]) if match[2] else None
    if last is not None and last < first:
        raise ConfigError(f"--steps {text!r} has no step: the last step is before the first")
    return first, last


def show(run_dir: Path, steps: str, worker: str, console: Console, *, as_json: bool) -> None:
    """Print where the time went.

    Args:
        run_dir: the run directory.
        steps: a range of steps, see `steps_range`; empty: all.
        worker: print only the time of this worker; empty: of all roles.
        console: receives the table.
        as_json: print the numbers as JSON.

    Raises ConfigError for a directory that is no run directory, steps without a record, and an unknown worker.
    """
    if not (run_dir / CONFIG).is_file() and not (run_dir / ATTRIBUTION).is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has neither {CONFIG} nor {ATTRIBUTION}")
    first, last = steps_range(steps) if steps else (0, None)
    try:
        lines, damaged = read(run_dir)
    except OSError as error:
        raise ConfigError(f"{run_dir / ATTRIBUTION} cannot be read: {error.strerror}") from error
    if not lines:
        what = f"none of its {damaged} lines can be read" if damaged else "it is empty or missing"
        raise ConfigError(
            f"{run_dir / ATTRIBUTION} says nothing about the time of this run: {what}; a line is written up to three "
            "heartbeats after the end of each step"
        )
    chosen = [line for line in lines if line["step"] >= first and (last is None or line["step"] <= last)]
    if not chosen:
        raise ConfigError(f"no step of {steps} is there; {run_dir} has steps {lines[0]['step']} to {lines[-1]['step']}")
    times = add_up(chosen)
    if worker:
        times = _of_worker(run_dir, worker, times)
    if as_json:
        console.file.write(json.dumps(times.as_json()) + "\n")
        return
    console.print(table(times.shares(), times.workers, _title(times)))
    for role in times.roles:
        console.print(Text(printable(times.sentence(role), one_line=True)))
    if damaged:
        console.print(Text(f"{damaged} damaged lines of {ATTRIBUTION} are left out"))


def _of_worker(run_dir: Path, worker: str, of_all: Times) -> Times:
    try:
        times = of_worker(run_dir, worker, of_all.from_s, of_all.to_s)
    except OSError as error:
        raise ConfigError(f"the timeline of {run_dir} cannot be read: {error.strerror}") from error
    if times is None:
        named = sorted({name for of in of_all.worst.values() for name in of})
        raise ConfigError(
            f"the timeline of {run_dir} has nothing of worker {worker!r} in these steps; there are, among others: "
            f"{', '.join(named[:8]) or 'none'}"
        )
    return replace(times, steps=of_all.steps)


def _title(times: Times) -> str:
    first, last = times.steps
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"where the time went: {steps}, {times.from_s:.1f} s to {times.to_s:.1f} s"


def table(shares: Mapping[str, Mapping[str, float]], workers: Mapping[str, int], title: str) -> Table:
    """A row for each role with its shares of each kind of time; ``shares`` are fractions, printed in percent."""
    shown = Table(title=title, box=box.SIMPLE_HEAD)
    shown.add_column("workers", no_wrap=True)
    for kind in KINDS:
        shown.add_column(f"{kind} %" if kind == KINDS[0] else kind, justify="right", no_wrap=True)
    for role, of in shares.items():
        count = workers.get(role, 0)
        cells = [role if count <= 1 else f"{count} {role}", *(_percent(of.get(kind, 0.0)) for kind in KINDS)]
        shown.add_row(*map(Text, cells))
    return shown


def _percent(share: float) -> str:
    return "-" if share < 0.0005 else f"{100 * share:.1f}"
