"""``flowrt doctor``: looks at every node before a run does, and says what to do about what it finds.

Alone it looks at this node. ``--json`` prints the facts of this node as a line, ``--merge`` judges such lines of many
nodes. With ``--on`` it does all of that itself: it listens as a controller would and starts ``flowrt doctor --json``
behind these words on all nodes at once, and so also measures the lanes between each pair.
"""

import argparse
import asyncio
import dataclasses
import os
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrt.launch.checks import Finding, State, is_well, judge, wanted
from flowrt.launch.facts import PROBE_S, START_S, Facts, collect, from_json
from flowrt.launch.memory import estimate, shape_of
from flowrt.workers.rounds import longest_s
from rich.console import Console
from rich.table import Table

from flowrt.controller.core import Core
from flowrt.controller.server import Server
from flowrt.controller.settings import Dataflow, Settings
from flowrt.errors import EXIT_FAILED, EXIT_OK, ConfigError, WaitExpired
from flowrt.recipes import grpo
from flowrt.recipes.config import RunConfig
from flowrt.recipes.load import from_file, parse
from flowrt.waiting import until
from flowrt.wire.hosts import reachable
from flowrt.wire.keys import KEYS_VARIABLE, controller_keys
from flowrt.wire.loops import run_loop

SPARE_S = 30.0
"""For what starts a command on all nodes to do so."""


@dataclass(frozen=True)
class Order:
    """What to look at."""

    config: RunConfig
    controller: str
    peers: int
    keys: str
    on: tuple[str, ...]
    nodes: int
    deadline_s: float


def doctor(arguments: Sequence[str], console: Console) -> int:
    """Returns the exit code: 0 when there is no red line, else 1. Raises ConfigError on bad input."""
    parser = _parser()
    given = parser.parse_args(list(arguments))
    config = from_file(Path(given.config)) if given.config else parse([])
    config = dataclasses.replace(config, run_dir=given.run_dir or config.run_dir, model=given.model or config.model)
    try:
        on = tuple(shlex.split(given.on))
    except ValueError as error:
        raise ConfigError(f"--on cannot be cut into words ({error}): {given.on!r}; mind the quotes") from None
    order = Order(config, given.controller, given.peers, given.keys, on, given.nodes, given.deadline_s)
    if given.json:
        sys.stdout.write(_look(order).to_json() + "\n")
        return EXIT_OK
    shape = shape_of(config)
    if given.merge:
        all_facts = [facts for path in given.merge for facts in _read(Path(path))]
    elif order.on:
        all_facts = run_loop(_look_everywhere(order))
    else:
        all_facts = [_look(order)]
    want = wanted(config, estimate(config, shape), all_facts, bool(order.controller or order.on))
    findings = judge(sorted(told_apart(all_facts), key=lambda facts: facts.node), want)
    return report(findings, console)


def told_apart(all_facts: Sequence[Facts]) -> list[Facts]:
    """Nodes that have one name are called by their addresses too: machines made from one image often have."""
    count = Counter(facts.node for facts in all_facts)
    return [
        dataclasses.replace(facts, node=f"{facts.node} ({facts.own_address})") if count[facts.node] > 1 else facts
        for facts in all_facts
    ]


def report(findings: Sequence[Finding], console: Console) -> int:
    """Print the table; returns the exit code."""
    table = Table(title="flowrt doctor")
    for heading in ("check", "where", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in folded(findings):
        table.add_row(finding.check, finding.where, finding.found, finding.fix, style=finding.state.value)
    console.print(table)
    red = [finding for finding in findings if finding.state is State.BAD]
    for finding in red:
        said = f"flowrt: {finding.check}, {finding.where}: {finding.found}; {finding.fix}"
        console.print(said, style="red", highlight=False, markup=False, soft_wrap=True)
    return EXIT_OK if is_well(findings) else EXIT_FAILED


def folded(findings: Sequence[Finding]) -> list[Finding]:
    """One line for what is good in several places; every line that is not, as it is."""
    good: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.state is State.GOOD:
            good.setdefault(finding.check, []).append(finding)
    lines = []
    for check, same in good.items():
        found = list(dict.fromkeys(finding.found for finding in same))
        where = same[0].where if len(same) == 1 else f"{same[0].where} and {len(same) - 1} more"
        more = "" if len(found) == 1 else f"; {found[-1]}" if len(found) == 2 else f"; …; {found[-1]}"
        lines.append(Finding(check, where, State.GOOD, found[0] + more))
    return [*lines, *(finding for finding in findings if finding.state is not State.GOOD)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flowrt doctor", description="look at every node before a run does")
    parser.add_argument(
        "--config", default="", help="config.toml of the run: its memory is estimated (default: the default job)"
    )
    parser.add_argument("--run-dir", default="", help="where the run will be written")
    parser.add_argument("--model", default="", help="the model that it will start from")
    parser.add_argument(
        "--controller", default="", help="tcp://HOST:PORT of one that listens: the round trip is measured"
    )
    parser.add_argument(
        "--peers", type=int, default=1, help="how many nodes look at once: lanes between them are measured"
    )
    parser.add_argument("--keys", default=os.environ.get(KEYS_VARIABLE, ""), help="directory that flowrt keys made")
    parser.add_argument("--on", default="", help="words that start a command on all nodes at once, srun and its flags")
    parser.add_argument("--nodes", type=int, default=1, help="how many nodes that is")
    parser.add_argument("--deadline-s", type=float, default=PROBE_S, help="for the controller and the others to answer")
    parser.add_argument("--json", action="store_true", help="print this node's facts as one line")
    parser.add_argument(
        "--merge", nargs="+", default=[], metavar="FILE", help="judge what --json has printed on each node"
    )
    return parser


def _look(order: Order) -> Facts:
    probe = []
    if order.controller:
        probe = ["--controller", order.controller, "--peers", str(order.peers)]
        probe += ["--keys", order.keys] if order.keys else []
    return collect(Path(order.config.run_dir or "."), order.config.model, probe, order.deadline_s, order.peers)


def _read(path: Path) -> list[Facts]:
    """The facts in a file: a line for each node; what else a launcher has written into it is passed over."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    found = [from_json(line, str(path)) for line in lines if line.startswith("{")]
    if not found:
        raise ConfigError(f"{path} holds no facts; flowrt doctor --json prints them")
    return found


async def _look_everywhere(order: Order) -> list[Facts]:
    """Listen, and let every node look at the others. Raises ConfigError when the words start nothing."""
    keys = controller_keys(Path(order.keys)) if order.keys else None
    core = Core(Settings(), Dataflow((), ()), grpo.policies(order.config))
    with tempfile.TemporaryDirectory(prefix="flowrt-doctor-") as directory:
        server = Server(core, (), "", Path(directory), heartbeat_s=1.0, wait_s=order.deadline_s, keys=keys)
        address = reachable(server.bind("tcp://*:0" if keys else "tcp://127.0.0.1:0"), order.config.controller.host)
        async with server.running():
            return await _start_everywhere(order, address)


async def _start_everywhere(order: Order, address: str) -> list[Facts]:
    words = [*order.on, sys.executable, "-m", "flowrt.cli", "doctor", "--json"]
    words += ["--controller", address, "--peers", str(order.nodes), "--deadline-s", str(order.deadline_s)]
    words += ["--keys", order.keys] if order.keys else []
    words += ["--run-dir", order.config.run_dir] if order.config.run_dir else []
    words += ["--model", order.config.model] if order.config.model else []
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise ConfigError(f"--on {' '.join(order.on)} cannot be started: {error.strerror}") from None
    deadline_s = START_S + order.deadline_s + longest_s(order.nodes) + SPARE_S
    try:
        output, _ = await until(process.communicate(), deadline_s, "all nodes to answer", " ".join(order.on))
    except WaitExpired:
        process.kill()
        output = b""
    lines = output.decode(errors="replace").splitlines()
    found = [from_json(line, " ".join(order.on)) for line in lines if line.startswith("{")]
    if len(found) < order.nodes:
        raise ConfigError(
            f"{len(found)} of {order.nodes} nodes answered within {deadline_s:.0f} s to {' '.join(order.on)} (exit "
            f"code {process.returncode}); does it start one command on each of them? Say how many with --nodes"
        )
    return found
