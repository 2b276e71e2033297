"""Terminal view of a local run: a live display during the run, and the table of its summary."""

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from time import monotonic
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flowrt.launcher.terminal import printable_tree
from flowrt.launcher.views.waits import duration, grouped

HISTORY = 50
"""Steps in the reward bars."""
SLOW_RATE = 10.0
"""Number a second below which a rate has decimals."""
MIN_SHARE = 0.005
"""Share of a role's time below which it is not shown."""
PRINT_EVERY = 10
"""Steps between lines without a terminal."""
PREPARE_EVERY_S = 30.0
"""Seconds between lines of the preparation without a terminal."""
MAX_WAITS = 8
"""Lines of waits; the whole display fits a terminal of 24 lines."""
MAX_BUSY = 12
_BARS = "▁▂▃▄▅▆▇█"


class LiveView:
    """Live display, redrawn at every status; without a terminal a plain line every `PRINT_EVERY` steps."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._rewards: list[float] = []
        self._printed_step = -1
        self._prepared_s = monotonic()
        self._vacant: set[str] = set()
        self._warned: set[tuple[int, str]] = set()

    def __enter__(self) -> "LiveView":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def report(self, text: str) -> None:
        """Print a line above the display."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, status: Mapping[str, Any]) -> None:
        """Show a status of the run, as made by `Server.status`."""
        status = printable_tree(status)
        latest = status["latest"]
        for role, (_, why) in status["vacancies"].items():
            if role not in self._vacant:
                self.report(f"no {role} worker: {why}")
        self._vacant = set(status["vacancies"])
        for step, text in status["guards"]["log"]:
            if (step, text) not in self._warned:
                self.report(f"step {step}: {text}")
                self._warned.add((step, text))
        if latest and (not self._rewards or latest["step"] != self._printed_step):
            self._rewards = [*self._rewards, latest.get("reward", math.nan)][-HISTORY:]
        if self._live is not None:
            self._live.update(self._draw(status))
        elif latest and (latest["step"] >= self._printed_step + PRINT_EVERY or self._printed_step < 0):
            self.report(_line(status))
        else:
            return
        if latest:
            self._printed_step = latest["step"]

    def prepare(self, text: str) -> None:
        """Show the progress of the preparation; without a terminal at most a line every `PREPARE_EVERY_S` seconds."""
        text = printable_tree(text)
        if self._live is not None:
            self._live.update(Text(text, style="dim"))
        elif monotonic() - self._prepared_s >= PREPARE_EVERY_S:
            self._prepared_s = monotonic()
            self.report(text)

    def _draw(self, status: Mapping[str, Any]) -> Group:
        step, steps = status["step"], status["steps"]
        bar = Table.grid()  # a ProgressBar outside a table does not end its line
        bar.add_row(ProgressBar(total=steps, completed=step, width=HISTORY))
        waits = Table.grid(padding=(0, 2))
        for who, what, seconds in grouped((what, who, seconds) for who, what, seconds in status["waits"])[:MAX_WAITS]:
            waits.add_row(Text(who, style="cyan"), f"waits {seconds:5.1f} s for", Text(what, style="dim"))
        waits.add_row(Text("busy", style="green"), "", Text(_busy(status), style="dim"))
        return Group(
            Text(_line(status) if status["latest"] else f"step 0/{steps}: waiting for the first samples"),
            bar,
            *(Text(evaluation_text(name, of), style="magenta") for name, of in status.get("evaluated", {}).items()),
            Text(f"reward {bars(self._rewards)}"),
            waits,
            *(Text(text, style="bold red") for text in status["guards"]["firing"]),
        )


def bars(values: Sequence[float]) -> str:
    """A bar for each value, between the least and the largest one, and these two: ``▁▄█  -2 to 40.5``.

    A value that is not finite is a gap. Equal values have bars of half the height.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    drawn = "".join(_bar(value, low, high) if math.isfinite(value) else " " for value in values)
    return f"{drawn}  {low:.3g} to {high:.3g}" if low < high else f"{drawn}  {low:.3g}"


def _bar(value: float, low: float, high: float) -> str:
    share = (value / 2 - low / 2) / (high / 2 - low / 2) if low < high else 0.5  # halves: the range may overflow
    return _BARS[round((len(_BARS) - 1) * share)]


def evaluation_text(name: str, results: Mapping[str, Any]) -> str:
    """The newest evaluation of data set ``name`` of a run that trains, as a line."""
    return results_text(f"{name} of version {results['version']}", results)


def results_text(what: str, results: Mapping[str, Any]) -> str:
    """The results of an evaluation as a line: averages and pass@k, with their standard errors."""
    shown = [
        f"{metric} {value:.3f} ± {results.get(f'{metric}_error', 0.0):.3f}"
        for metric, value in results.items()
        if "@" in metric and not metric.endswith("_error")
    ]
    return f"evaluation {what}: {'  '.join(shown)}"


def _busy(status: Mapping[str, Any]) -> str:
    """The workers that wait for nothing."""
    waiting = {who for who, _, _ in status["waits"]}
    busy = sorted(worker for worker in status["workers"] if worker not in waiting)
    of_others = sum(of.get("at work", 0) for of in status.get("counts", {}).get("states", {}).values())
    if len(busy) <= MAX_BUSY:
        return ", ".join(busy)
    return f"{', '.join(busy[:MAX_BUSY])} and {max(of_others, len(busy)) - MAX_BUSY} more"


def _line(status: Mapping[str, Any]) -> str:
    latest = status["latest"]
    parts = [
        f"step {status['step']}/{status['steps']}",
        f"reward {latest.get('reward', float('nan')):.3f}",
        f"length {latest.get('response_length', float('nan')):.1f}",
        f"staleness {latest['staleness_mean']:.2f} (max {latest['staleness_max']})",
        f"{_rate(latest['samples_per_s'])} samples/s",
    ]
    if status.get("eta_s"):
        parts.append(f"{duration(status['eta_s'])} left")
    return "  ".join(parts)


def summary_table(summary: Mapping[str, Any], prepared_s: float | None = None) -> Table:
    """The summary of a run as a table; ``prepared_s``: seconds before the run, for checks and building the model."""
    table = Table(title=f"flowrt run: {summary['recipe']}, seed {summary['seed']}", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    rows = {
        "steps": summary["steps"],
        "wall time": f"{summary['wall_s']:.1f} s"
        + (f", after {prepared_s:.1f} s of preparation" if prepared_s else ""),
        f"reward, first to last {_steps(summary['reward_window'])}": _arrow(
            summary["reward_first"], summary["reward_last"]
        ),
        "evaluation, first to last": _arrow(summary["eval_first"], summary["eval_last"]),
        **{
            f"{name}, version {of['version']}": ", ".join(
                f"{metric} {value:.3f}" for metric, value in of.items() if "@" in metric and "error" not in metric
            )
            for name, of in summary.get("evaluations", {}).items()
        },
        "samples": f"{summary['samples']} ({_rate(summary['samples_per_s'])}/s)",
        "tokens/s": _rate(summary["tokens_per_s"]),
        "staleness, mean (max, bound)": (
            f"{summary['staleness_mean']:.2f} ({summary['staleness_max']}, {summary['staleness_bound']})"
        ),
        "prompts lost, trained twice": f"{summary['prompts_lost']}, {summary['prompts_trained_twice']}",
        **{f"time of {role}": _times(of) for role, of in summary.get("time", {}).items()},
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _rate(per_s: float) -> str:
    return f"{per_s:.0f}" if per_s >= SLOW_RATE else f"{per_s:.2g}"


def _times(shares: Mapping[str, float]) -> str:
    """What a role's time went to, the largest share first."""
    shown = sorted(shares.items(), key=itemgetter(1), reverse=True)
    return ", ".join(f"{kind} {share:.0%}" for kind, share in shown if share >= MIN_SHARE) or "-"


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _arrow(first: float | None, last: float | None) -> str:
    return " → ".join("-" if value is None else f"{value:.3f}" for value in (first, last))
