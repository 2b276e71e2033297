"""Plot of a run, run.png: rewards and response lengths by step, and what each worker did when."""

import logging
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrt.controller.storage.timeline_file import read_timeline
from flowrt.runtime.timeline import is_span, is_step, read_lines

log = logging.getLogger(__name__)

KIND_COLOURS = {
    "load": "#bbbbbb",
    "generate": "#4477aa",
    "swap": "#ee6677",
    "reward": "#ccbb44",
    "reference": "#66ccee",
    "train": "#228833",
    "step": "#aa3377",
    "snapshot": "#ee6677",
    "save": "#bbbbbb",
}
WINDOW = 10
"""Steps of the moving average."""


def draw(run_dir: Path) -> Path:
    """Draw run.png from metrics.jsonl and the timeline; returns its path."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    steps = _lines(run_dir / "metrics.jsonl", is_step)
    spans = [line for line in read_timeline(run_dir) if is_span(line)]
    start_s = min((span["start_s"] for span in spans), default=0.0)
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(10, 7), height_ratios=(3, 2), layout="constrained")
    _draw_reward(above, steps)
    _draw_timeline(below, spans, start_s)
    path = run_dir / "run.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _draw_reward(axes: Any, steps: list[dict[str, Any]]) -> None:
    numbers = [line["step"] for line in steps]
    rewards = [line.get("reward", 0.0) for line in steps]
    means = [statistics.fmean(rewards[max(0, end - WINDOW) : end]) for end in range(1, len(rewards) + 1)]
    axes.plot(numbers, rewards, color="#4477aa", alpha=0.35, label="reward, each step")
    axes.plot(numbers, means, color="#4477aa", label=f"reward, mean of {WINDOW} steps")
    axes.set(xlabel="optimiser step", ylabel="mean reward", ylim=(0, 1.02))
    lengths = axes.twinx()
    lengths.plot(
        numbers, [line.get("response_length", 0.0) for line in steps], color="#ee6677", label="response length"
    )
    lengths.set_ylabel("mean response length, tokens")
    lines = [*axes.get_lines(), *lengths.get_lines()]
    axes.legend(lines, [line.get_label() for line in lines], loc="lower right")
    axes.grid(alpha=0.3)


def _draw_timeline(axes: Any, spans: list[dict[str, Any]], start_s: float) -> None:
    workers = sorted({span["worker"] for span in spans})
    kinds = sorted({span["kind"] for span in spans})
    for kind in kinds:
        for row, worker in enumerate(workers):
            bars = [
                (span["start_s"] - start_s, max(span["end_s"] - span["start_s"], 0.002))
                for span in spans
                if span["worker"] == worker and span["kind"] == kind
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=KIND_COLOURS.get(kind, "#000000"), linewidth=0)
        axes.plot([], [], color=KIND_COLOURS.get(kind, "#000000"), linewidth=6, label=kind)
    axes.set(xlabel="seconds", yticks=range(len(workers)), yticklabels=workers)
    if kinds:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=max(len(kinds), 1), fontsize="small")


def _lines(path: Path, is_valid: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """The readable lines of a file; missing and damaged ones are logged and left out."""
    try:
        lines, damaged = read_lines(path, is_valid)
    except OSError as error:
        log.warning("%s cannot be read and is left out of the plot: %s", path, error.strerror)
        return []
    if damaged:
        log.warning("%s has %d damaged lines, left out of the plot", path, damaged)
    return lines
