"""``flowrt status``: the workers of a run and its wait-for graph, as tables."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from flowrt.errors import EXIT_OK
from flowrt.launcher.observer import fetch_status, find_keys, locate
from flowrt.launcher.terminal import printable_tree
from flowrt.launcher.views.live import evaluation_text
from flowrt.launcher.views.waits import duration, grouped
from flowrt.observability.attribution import add_up

RED = "bold red"


def show(run: str, keys: str, deadline_s: float, console: Console, *, as_json: bool) -> int:
    """Print the status of a run; returns the exit code. Raises FlowError if the run has ended or does not answer.

    Args:
        run: the directory of a run, or the address of its controller.
        keys: directory of keys; empty: those of the run, or of the environment.
        deadline_s: time limit for the answer, in seconds.
        console: what the tables are printed to.
        as_json: print the controller's answer as JSON, without tables.
    """
    address, run_dir = locate(run)
    where = address if run_dir is None else f"{address} (of {run_dir})"
    status = asyncio.run(fetch_status(address, find_keys(keys, run_dir), deadline_s, where))
    if as_json:
        console.file.write(json.dumps(status) + "\n")
    else:
        console.print(draw(status))
    return EXIT_OK


def draw(status: Mapping[str, Any]) -> Group:
    """The tables of a status, with problems first, in red."""
    status = printable_tree(status)
    graph = status["graph"]
    alarms = [Text(f"deadlock: {', '.join(workers)}", style=RED) for workers in graph["deadlocks"]]
    alarms += [
        Text(f"no {role} worker for {for_s:.0f} s: {why}", style=RED)
        for role, (for_s, why) in status["vacancies"].items()
    ]
    alarms += [Text(sentence, style=RED) for sentence in status.get("unjoined", {}).values()]
    alarms += [
        Text(f"no network traffic from {worker} for {since_s:.0f} s: its link or its machine is down", style=RED)
        for worker, since_s in status["cut_off"].items()
    ]
    alarms += [
        Text(f"{wait['who']} waits for {wait['what']}, and no worker can satisfy this", style=RED)
        for wait in graph["waits"]
        if wait["unsatisfiable"]
    ]
    alarms += [
        Text(
            f"{wait['who']} waits {wait['age_s']:.0f} s for {wait['what']}, over its {wait['limit_s']:.0f} s: "
            f"blocked on {wait['blocked_on'] or 'no worker'}",
            style=RED,
        )
        for wait in graph["waits"]
        if wait["overdue"]
    ]
    alarms += [Text(text, style=RED) for text in status["guards"]["firing"]]
    title = f"step {status['step']} of {status['steps']}, {status['live_groups']} groups live"
    if status.get("eta_s"):
        title += f", {duration(status['eta_s'])} left"
    tables = [_workers(graph["workers"], title), _waits(graph["waits"], graph["deadlocks"])]
    omitted = graph["more"] + graph["others"]
    notes = [Text(text, style="dim") for text in _times(status.get("time"))]
    notes += [Text(f"{graph['more']} waits and {graph['others']} workers are not shown")] if omitted else []
    notes += [Text(f"step {step}: {text}", style="dim") for step, text in status["guards"]["log"]]
    evaluated = [Text(evaluation_text(name, of), style="magenta") for name, of in status.get("evaluated", {}).items()]
    return Group(*alarms, *tables, *evaluated, *notes)


def _times(line: Mapping[str, Any] | None) -> list[str]:
    """Sentences on where the time of the last step went, one for each role."""
    if not line:
        return []
    times = add_up([line])
    return [f"step {line['step']}: {times.sentence(role)}" for role in times.roles]


def _workers(workers: Sequence[Sequence[Any]], title: str) -> Table:
    table = Table("worker", "role", "state", "silent for", "holds", title=title)
    for worker, role, state, silent_s, holds in workers:
        table.add_row(worker, role, state, f"{silent_s:.1f} s", holds)
    return table


def _waits(waits: Sequence[Mapping[str, Any]], deadlocks: Sequence[Sequence[str]]) -> Table:
    table = Table("worker", "waits for", "since", "at most", "blocked on", title="wait-for graph")
    deadlocked = {who for workers in deadlocks for who in workers}
    alike = (
        (
            (
                wait["what"],
                "-" if wait["limit_s"] is None else f"{wait['limit_s']:.0f} s",
                wait["blocked_on"] or "no worker",
                wait["overdue"] or wait["unsatisfiable"] or wait["who"] in deadlocked,
            ),
            wait["who"],
            wait["age_s"],
        )
        for wait in waits
    )
    for who, (what, limit, blocked_on, is_wrong), age_s in grouped(alike):
        cells = (who, what, f"{age_s:.1f} s", limit, blocked_on)
        table.add_row(*map(Text, cells), style=RED if is_wrong else None)
    return table
