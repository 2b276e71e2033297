"""``flowrt status``: one look at a run, as a table of its workers and of who waits for whom."""

import argparse
import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrt.launch.observer import look
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from flowrt.errors import EXIT_OK, ConfigError, FlowError
from flowrt.recipes.load import from_toml
from flowrt.recipes.paths import address_file
from flowrt.wire.keys import KEYS_VARIABLE, WorkerKeys, worker_keys

OBSERVER = "observer"
DEADLINE_S = 5.0
RED = "bold red"


def run(words: Sequence[str], console: Console) -> int:
    """Returns the exit code. Raises FlowError when the run has ended, or nothing answers."""
    parser = argparse.ArgumentParser(prog="flowrt status", description="who waits for whom in a run")
    parser.add_argument("run", nargs="?", metavar="RUN", help="the run's directory")
    parser.add_argument("--controller", default="", help="its address, tcp://HOST:PORT, where there is no directory")
    parser.add_argument("--keys", default="", help="directory of keys (else those of the run, or FLOWRT_KEYS)")
    parser.add_argument("--json", action="store_true", help="print what the controller said, as JSON")
    parser.add_argument("--deadline-s", type=float, default=DEADLINE_S, help="how long to wait for an answer")
    arguments = parser.parse_args(words)
    if (arguments.run is None) == (not arguments.controller):
        raise ConfigError("flowrt status takes the directory of a run, or --controller tcp://HOST:PORT")
    run_dir = None if arguments.run is None else Path(arguments.run)
    address = arguments.controller if run_dir is None else address_of(run_dir)
    where = address if run_dir is None else f"{address} (of {run_dir})"
    keys = find_keys(arguments.keys, run_dir)
    status = asyncio.run(look(address, keys, arguments.deadline_s, where))
    if arguments.json:
        console.file.write(json.dumps(status) + "\n")
    else:
        console.print(draw(status))
    return EXIT_OK


def address_of(run_dir: Path) -> str:
    """Where the run's controller listens. Raises FlowError when it does not (any more), saying how the run ended."""
    try:
        return (address_file(run_dir)).read_text().strip()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"{address_file(run_dir)} cannot be read: {error.strerror}") from error
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
    except (OSError, ValueError):
        if not (run_dir / "config.toml").is_file():
            raise ConfigError(f"{run_dir} is no directory of a run; name one, or use --controller ADDRESS") from None
        raise FlowError(
            f"the controller of {run_dir} does not listen: it has not started yet, or was killed; look at "
            f"{run_dir / 'logs'}"
        ) from None
    raise FlowError(f"the run in {run_dir} has ended with exit code {summary['exit_code']}: {summary['reason']}")


def find_keys(named: str, run_dir: Path | None) -> WorkerKeys | None:
    """The observer's keys: those that were named, those of the run, or those of the environment."""
    directory = named
    if not directory and run_dir is not None and (run_dir / "config.toml").is_file():
        directory = from_toml((run_dir / "config.toml").read_text()).controller.keys
    directory = directory or os.environ.get(KEYS_VARIABLE, "")
    return worker_keys(Path(directory), OBSERVER) if directory else None


def draw(status: Mapping[str, Any]) -> Group:
    """What is wrong comes first, in red."""
    graph = status["graph"]
    alarms = [Text(f"these wait for each other: {', '.join(knot)}", style=RED) for knot in graph["knots"]]
    alarms += [
        Text(f"nothing has come from {worker} for {since_s:.0f} s: its link is cut, or its machine is gone", style=RED)
        for worker, since_s in status["cut_off"].items()
    ]
    alarms += [
        Text(f"{wait['who']} waits for {wait['what']}, and nobody is there to act", style=RED)
        for wait in graph["waits"]
        if wait["nobody"]
    ]
    alarms += [
        Text(
            f"{wait['who']} waits {wait['age_s']:.0f} s for {wait['what']}, over its {wait['limit_s']:.0f} s: "
            f"it is the turn of {wait['turn'] or 'nobody'}",
            style=RED,
        )
        for wait in graph["waits"]
        if wait["overdue"]
    ]
    title = f"step {status['step']} of {status['steps']}, {status['live_groups']} groups live"
    left_out = graph["more"] + graph["others"]
    last = [Text(f"{graph['more']} waits and {graph['others']} workers are not shown")] if left_out else []
    return Group(*alarms, _workers(graph["workers"], title), _waits(graph["waits"], graph["knots"]), *last)


def _workers(workers: Sequence[Sequence[Any]], title: str) -> Table:
    table = Table("worker", "role", "state", "silent for", "holds", title=title)
    for worker, role, state, silent_s, holds in workers:
        table.add_row(worker, role, state, f"{silent_s:.1f} s", holds)
    return table


def _waits(waits: Sequence[Mapping[str, Any]], knots: Sequence[Sequence[str]]) -> Table:
    table = Table("who waits", "for", "since", "at most", "whose turn", title="who waits for whom")
    knotted = {who for knot in knots for who in knot}
    for wait in waits:
        limit = "-" if wait["limit_s"] is None else f"{wait['limit_s']:.0f} s"
        wrong = wait["overdue"] or wait["nobody"] or wait["who"] in knotted
        cells = (wait["who"], wait["what"], f"{wait['age_s']:.1f} s", limit, wait["turn"] or "nobody")
        table.add_row(*map(Text, cells), style=RED if wrong else None)
    return table
