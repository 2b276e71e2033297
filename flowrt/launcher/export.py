"""``flowrt export``: write a run in the formats of other tools, once, or until the run ends.

TensorBoard, W&B and exporters of the user are separate processes, so that a deadline can end one that hangs.
"""

import contextlib
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from flowrt.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, ConfigError
from flowrt.launcher.export_model import ModelExport, check_export, export_model
from flowrt.launcher.terminal import printable
from flowrt.observability.compared_runs import ComparedRuns
from flowrt.observability.exporters.perfetto import write_trace
from flowrt.observability.exporters.process import parse_steps
from flowrt.observability.exporters.prometheus import prometheus_text
from flowrt.observability.exporters.sink import TENSORBOARD, WANDB, WANDB_CLOSE_S, check_exporter, target_of
from flowrt.observability.run_reader import SUMMARY, RunReader, is_locked
from flowrt.runtime.files import atomic_write, check_target
from flowrt.runtime.interpreter import RUN_MODULE
from flowrt.runtime.parent_death import die_with_parent
from flowrt.runtime.waits import BoundedElsewhere, blocking

HTML = "flowrt.observability.page.single_file"
MODULE = "flowrt.observability.exporters.process"
GRACE_S = WANDB_CLOSE_S + 10.0
"""Time for an exporter's process to end after Ctrl-C."""
EXPORT = BoundedElsewhere("the end of the run, or a signal")


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The arguments of `flowrt export`."""

    run_dir: Path
    perfetto: Path | None = None
    tensorboard: Path | None = None
    wandb: bool = False
    wandb_dir: Path | None = None
    prometheus: str | None = None
    html: Path | None = None
    model: ModelExport | None = None
    compare: tuple[Path, ...] = ()
    """Directories of other runs, whose curves are in ``html`` too."""
    exporter: str = ""
    steps: str = ""
    follow: bool = False

    def processes(self) -> list[tuple[str, Path]]:
        """Name and target directory of each exporter that runs as a process."""
        processes: list[tuple[str, Path]] = []
        if self.tensorboard is not None:
            processes.append((TENSORBOARD, self.tensorboard))
        if self.wandb:
            processes.append((WANDB, self.wandb_dir or target_of(WANDB, self.run_dir)))
        if self.exporter:
            processes.append((self.exporter, self.run_dir))
        return processes


def export(options: ExportOptions, console: Console) -> int:
    """Export a run; returns the exit code. Raises ConfigError for bad input, with nothing written."""
    if options.model is not None:
        check_export(options.model)
    reader = RunReader(options.run_dir)
    ComparedRuns(options.run_dir, options.compare)  # raises ConfigError before anything is written
    first, last = _check(options)
    _check_range(options, reader, first, last)
    if options.perfetto is not None:
        trace = write_trace(options.run_dir, options.perfetto, first, last)
        left = (
            f"; {trace.left_out:,} later ones are left out, choose fewer steps with --steps" if trace.left_out else ""
        )
        console.print(f"{options.perfetto}: {trace.slices:,} slices{left}", soft_wrap=True, highlight=False)
        for problem in trace.problems:
            console.print(printable(problem), soft_wrap=True, highlight=False)
    if options.prometheus is not None:
        reader.read_attribution()
        text = prometheus_text(reader.figures())
        if options.prometheus == "-":
            sys.stdout.write(text)
        else:
            atomic_write(Path(options.prometheus), text)
            console.print(options.prometheus, soft_wrap=True, highlight=False)
    if options.html is not None:
        importlib.import_module(HTML).write(options.run_dir, options.html, options.compare)
        console.print(str(options.html), soft_wrap=True, highlight=False)
    if options.model is not None:
        version = export_model(options.model)
        console.print(f"{options.model.directory}: the model of version {version}", soft_wrap=True, highlight=False)
    return _run_processes(options)


def _check(options: ExportOptions) -> tuple[int, int | None]:
    """The first and last step to export. Raises ConfigError for options without effect, and unusable files."""
    steps = parse_steps(options.steps)
    processes = options.processes()
    formats = (options.perfetto, options.prometheus, options.html, options.model)
    if not processes and all(format_ is None for format_ in formats):
        raise ConfigError(
            "flowrt export needs a format: --hf DIR, --perfetto FILE, --tensorboard DIR, --wandb, --prometheus FILE, "
            "--html FILE or --exporter FILE.py:CLASS"
        )
    if options.compare and options.html is None:
        raise ConfigError("--compare changes nothing without --html FILE; leave it out")
    if options.follow and not processes:
        raise ConfigError("--follow changes nothing without --tensorboard, --wandb or --exporter; leave it out")
    if options.wandb_dir is not None and not options.wandb:
        raise ConfigError("--wandb-dir changes nothing without --wandb; leave it out")
    if options.steps and not processes and options.perfetto is None:
        raise ConfigError("--steps changes nothing for --hf, --prometheus and --html; leave it out (--hf has --step)")
    for name, _ in processes:
        check_exporter(name)
    for path in (options.perfetto, options.html, Path(options.prometheus or "-")):
        if path is not None and str(path) != "-":
            check_target(path)
    if options.html is not None and importlib.util.find_spec(HTML) is None:
        raise ConfigError("this flowrt cannot write a run as one HTML file")
    return steps


def _check_range(options: ExportOptions, reader: RunReader, first: int, last: int | None) -> None:
    """Raise ConfigError if there is no step to export now, and none is awaited."""
    steps = reader.steps
    at = bisect_left(steps, first)
    if at < len(steps) and (last is None or steps[at] <= last):
        return
    is_over = (options.run_dir / SUMMARY).exists() and not is_locked(options.run_dir)
    is_awaited = options.follow and not is_over and (last is None or last >= reader.next_step)
    if is_awaited or not (options.steps or options.processes()):
        return
    have = f"its steps are {steps[0]} to {steps[-1]}" if steps else "it has no step yet"
    if options.steps:
        raise ConfigError(f"--steps {options.steps}: run {options.run_dir} has no such step; {have}")
    raise ConfigError(f"run {options.run_dir} cannot be exported: {have}; --follow waits for its steps")


def _run_processes(options: ExportOptions) -> int:
    """Run the exporters that are processes to their end; returns the first exit code that is not 0."""
    running: list[subprocess.Popen[bytes]] = []
    for name, target in options.processes():
        words = [sys.executable, RUN_MODULE, MODULE, "--run", str(options.run_dir)]
        words += ["--to", name, "--target", str(target)]
        words += ["--steps", options.steps] if options.steps else []
        words += ["--follow"] if options.follow else []
        running.append(
            subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent)
        )
    codes: list[int] = []
    try:
        codes += [
            blocking(process.wait, EXPORT, "the end of an exporter", "the run that it follows") for process in running
        ]
    except KeyboardInterrupt:
        for process in running:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in running:
                blocking(partial(process.wait, GRACE_S), GRACE_S, "the end of an exporter", "its process")
        return EXIT_INTERRUPTED
    finally:
        for process in running:  # with their descendants
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    code = next((code for code in codes if code), EXIT_OK)
    return code if code in (EXIT_OK, EXIT_BAD_INPUT) else EXIT_FAILED
