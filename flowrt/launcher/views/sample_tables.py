"""``flowrt samples --by``: the groups of the stored samples of a run, and their distributions, as tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from flowrt.observability.sample_statistics import SampleSettings, SampleStatistics
from flowrt.observability.stored_samples import Order, SampleFilter

By = Literal["group", "reward", "length", "data_set", "solve_rate"]
PROMPT_CHARS = 60
BAR = 30
"""Width of the longest bar, in characters."""
_MEANS: dict[By, tuple[str, str]] = {
    "data_set": ("sets", "data set"),
    "solve_rate": ("solve_rates", "solve rate"),
}


def group_table(
    run_dir: Path, wanted: SampleFilter, settings: SampleSettings, order: Order, limit: int
) -> Table | None:
    """Groups in an order; None if there are none."""
    answer = SampleStatistics(run_dir).groups(wanted, settings, order, limit)
    if not answer["groups"]:
        return None
    title = f"{len(answer['groups'])} of {answer['total']} groups of {run_dir.absolute().name}"
    table = Table(title=f"{title}{_cut(answer)}", box=SIMPLE, title_style="", header_style="")
    for name in ("step", "prompt", "reward", "spread", "right", "tokens", "cut off", "stale"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("prompt text", max_width=PROMPT_CHARS)  # shrinks first where the terminal is narrow
    for group in answer["groups"]:
        text = Text(" ".join(group["prompt_text"].split()), no_wrap=True, overflow="ellipsis")
        lengths = f"{_number(group['tokens'])} ({group['least_tokens']} to {group['most_tokens']})"
        table.add_row(
            f"{group['step']} (rolled back)" if group["is_rolled_back"] else str(group["step"]),
            f"{group['epoch']}:{group['name']}" if group["epoch"] else group["name"],
            *(_number(group["reward"]), _number(group["spread"]), f"{group['right']} of {group['scored']}", lengths),
            *(str(group["truncated"]), _number(group["staleness"]), text),
        )
    return table


def distribution_table(
    run_dir: Path, wanted: SampleFilter, settings: SampleSettings, by: By, *, with_dropped: bool = False
) -> Table | None:
    """Samples by their reward, length, data set or the solve rate of their prompt; None if there are none."""
    answer = SampleStatistics(run_dir).distributions(wanted, settings, with_dropped=with_dropped)
    if not answer["samples"]:
        return None
    first, last = answer["steps"]
    what = "version" if wanted.eval_name else "step"
    where = f"{what} {first}" if first == last else f"{what}s {first} to {last}"
    title = f"{answer['samples']} samples of {where} of {run_dir.absolute().name}{_cut(answer)}"
    table = Table(title=title, box=SIMPLE, title_style="", header_style="")
    if by in _MEANS:
        key, label = _MEANS[by]
        _add_means(table, label, answer[key])
    else:
        _add_bins(table, by, answer["reward" if by == "reward" else "tokens"])
    if answer["without_reward"]:
        table.caption = f"{answer['without_reward']} samples have no reward"
    return table


def _add_means(table: Table, label: str, lines: Sequence[dict[str, Any]]) -> None:
    table.add_column(label)
    for name in ("prompts", "samples", "reward", "right %", "tokens", "cut off %"):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(
            *(
                line["name"],
                str(line["prompts"]),
                str(line["samples"]),
                _number(line["reward"]),
                _percent(line["right"]),
            ),
            *(_number(line["tokens"]), _percent(line["truncated"])),
        )


def _add_bins(table: Table, by: By, bins: dict[str, list[Any]]) -> None:
    table.add_column("reward" if by == "reward" else "tokens", justify="right")
    for name in ("samples", "cut off", *(() if by == "reward" else ("mean reward",))):
        table.add_column(name, justify="right")
    table.add_column("")
    most = max(bins["count"], default=1)
    for at, count in enumerate(bins["count"]):
        name = bin_name(bins["edges"], at)
        reward = [] if by == "reward" else [_number(bins["reward"][at])]
        table.add_row(name, str(count), str(bins["truncated"][at]), *reward, "█" * round(BAR * count / most))


def bin_name(edges: Sequence[float], at: int) -> str:
    """A bin of a histogram: its only value if it has whole numbers and is 1 wide, else its first and last value."""
    low, high = edges[at], edges[at + 1]
    if not all(edge.is_integer() for edge in edges):
        return f"{low:g} to {high:g}"
    return f"{low:.0f}" if high - low <= 1 else f"{low:.0f} to {high - 1:.0f}"


def _cut(answer: dict[str, Any]) -> str:
    first = answer["from_step"]
    return "" if first is None else f", counted from step {first} on: name earlier ones with --steps"


def _number(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:.4g}"


def _percent(share: float) -> str:
    return "" if share != share else f"{100 * share:.1f}"
