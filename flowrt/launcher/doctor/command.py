"""``flowrt doctor``: checks one node, or many nodes at once.

``--on PREFIX`` starts `facts` on all nodes; this process is the controller of their probes, which also measure the
lanes between each pair of nodes.
"""

import asyncio
import dataclasses
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flowrt.controller.core import Core
from flowrt.controller.server.server import Server
from flowrt.controller.settings import Dataflow, Settings
from flowrt.errors import EXIT_FAILED, EXIT_OK, ConfigError, FlowError, WaitExpired
from flowrt.launcher.doctor.checks import Finding, Verdict, is_well, judge, wanted
from flowrt.launcher.doctor.estimate import estimate
from flowrt.launcher.doctor.facts import START_S, Facts, from_json, lanes_s
from flowrt.launcher.doctor.model_shape import shape_of
from flowrt.launcher.observer import locate
from flowrt.net.curve_keys import controller_keys
from flowrt.recipes import grpo
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import from_file, parse
from flowrt.recipes.tables import merge
from flowrt.runtime.event_loop import run_loop
from flowrt.runtime.host import reachable
from flowrt.runtime.interpreter import RUN_MODULE, last_line
from flowrt.runtime.waits import wait_until

FACTS = "flowrt.launcher.doctor.facts"
SPARE_S = 30.0
"""Time for the prefix to start a command on all nodes."""


@dataclass(frozen=True)
class DoctorOptions:
    """The arguments of ``flowrt doctor``; an empty string was not given."""

    config: str
    device: str
    run_dir: str
    model: str
    controller: str
    keys: str
    on: str
    nodes: int
    deadline_s: float


def doctor(options: DoctorOptions, console: Console) -> int:
    """Check and print; returns the exit code: 1 if any finding is BAD. Raises ConfigError on bad input."""
    config = from_file(Path(options.config)) if options.config else parse([])
    given = {"run_dir": options.run_dir, "model": options.model, "device": options.device}
    config = merge(config, {key: value for key, value in given.items() if value}, "flowrt doctor", are_flags=True)
    try:
        prefix = shlex.split(options.on)
    except ValueError as error:
        raise ConfigError(f"--on cannot be split into words ({error}): {options.on!r}; check the quotes") from None
    shape = shape_of(config)
    all_facts = run_loop(_collect_everywhere(options, config, prefix)) if prefix else [_collect(options, config)]
    want = wanted(config, estimate(config, shape), all_facts, bool(options.controller or prefix))
    return report(judge(sorted(with_unique_names(all_facts), key=lambda facts: facts.node), want), console)


def with_unique_names(all_facts: Sequence[Facts]) -> list[Facts]:
    """Add the address to names that several nodes share, as machines installed from one image often do."""
    count = Counter(facts.node for facts in all_facts)
    return [
        dataclasses.replace(facts, node=f"{facts.node} ({facts.own_address})") if count[facts.node] > 1 else facts
        for facts in all_facts
    ]


def report(findings: Sequence[Finding], console: Console) -> int:
    """Print the table, then each BAD finding as a line; returns the exit code."""
    table = Table(title="flowrt doctor")
    for heading in ("check", "where", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in merge_good(findings):
        table.add_row(finding.check, finding.where, finding.state, finding.fix, style=finding.verdict.value)
    console.print(table)
    for finding in findings:
        if finding.verdict is Verdict.BAD:
            line = f"flowrt: {finding.check}, {finding.where}: {finding.state}; {finding.fix}"
            console.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
    return EXIT_OK if is_well(findings) else EXIT_FAILED


def merge_good(findings: Sequence[Finding]) -> list[Finding]:
    """The findings with the GOOD ones of each check merged into one, followed by all other findings unchanged."""
    good: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.verdict is Verdict.GOOD:
            good.setdefault(finding.check, []).append(finding)
    lines = []
    for check, same in good.items():
        facts = list(dict.fromkeys(finding.state for finding in same))
        where = same[0].where if len(same) == 1 else f"{same[0].where} and {len(same) - 1} more"
        more = "" if len(facts) == 1 else f"; {facts[-1]}" if len(facts) == 2 else f"; …; {facts[-1]}"
        lines.append(Finding(check, where, Verdict.GOOD, facts[0] + more))
    return [*lines, *(finding for finding in findings if finding.verdict is not Verdict.GOOD)]


def _flags(options: DoctorOptions, config: RunConfig, controller: str, nodes: int) -> list[str]:
    """The flags with which a node collects its facts."""
    words = ["--deadline-s", str(options.deadline_s), "--nodes", str(nodes)]
    given = {"controller": controller, "keys": options.keys, "run-dir": config.run_dir, "model": config.model}
    for flag, value in given.items():
        words += [f"--{flag}", value] if value else []
    return words


def _collect(options: DoctorOptions, config: RunConfig) -> Facts:
    """The facts of this node. Raises FlowError if the process that collects them fails."""
    controller = locate(options.controller)[0] if options.controller else ""
    limit_s = START_S + options.deadline_s
    try:
        return from_json(last_line(FACTS, _flags(options, config, controller, 1), limit_s, FACTS), FACTS)
    except WaitExpired:
        raise
    except FlowError as error:
        raise FlowError(f"python -m {FACTS} failed on this host: {error}") from None


async def _collect_everywhere(options: DoctorOptions, config: RunConfig, prefix: list[str]) -> list[Facts]:
    """The facts of all nodes, from probes of this controller. Raises ConfigError if a node does not answer."""
    keys = controller_keys(Path(options.keys)) if options.keys else None
    core = Core(Settings(), Dataflow((), ()), grpo.policies(config))
    with tempfile.TemporaryDirectory(prefix="flowrt-doctor-") as directory:
        server = Server(core, "", Path(directory), heartbeat_s=1.0, request_timeout_s=options.deadline_s, keys=keys)
        address = reachable(server.bind("tcp://*:0" if keys else "tcp://127.0.0.1:0"), config.controller.host)
        async with server.running():
            return await _start_everywhere(options, config, prefix, address)


async def _start_everywhere(options: DoctorOptions, config: RunConfig, prefix: list[str], address: str) -> list[Facts]:
    words = [*prefix, sys.executable, RUN_MODULE, FACTS, *_flags(options, config, address, options.nodes)]
    command = " ".join(prefix)
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise ConfigError(f"--on {command} cannot be started: {error.strerror}") from None
    deadline_s = START_S + options.deadline_s + lanes_s(options.nodes) + SPARE_S
    try:
        output, _ = await wait_until(process.communicate(), deadline_s, "all nodes to answer", command)
    except WaitExpired:
        process.kill()
        raise ConfigError(
            f"--on {command} has not ended within {deadline_s:.0f} s; can each of the nodes reach {address}?"
        ) from None
    lines = output.decode(errors="replace").splitlines()  # also those of a job launcher, which are skipped
    answers = [from_json(line, f"--on {command}") for line in lines if line.startswith("{")]
    if len(answers) < options.nodes:
        raise ConfigError(
            f"{len(answers)} of {options.nodes} nodes answered before --on {command} ended with exit code "
            f"{process.returncode}; does it start one command on each of them? Set their number with --nodes"
        )
    return answers
