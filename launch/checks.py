"""What `flowrt doctor` judges: pure functions of facts, each line with what to do about it."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from flowrt.launch.facts import PACKAGES, Facts
from flowrt.launch.memory import Needs, device_bytes, host_bytes

from flowrt.recipes.config import RunConfig

OLDEST_PYTHON = (3, 11)
FEWEST_FILES = 4096
LONGEST_TRIP_S = 0.05
LARGEST_CLOCK_DIFFERENCE_S = 1.0
SLOWEST_BYTES_PER_S = 100e6
UNEVEN = 4.0
SPARE = 1.2
GIB = 2**30


class State(Enum):
    """The colour of a line; only red ones make the command fail."""

    GOOD = "green"
    WARN = "yellow"
    BAD = "red"


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at where, what was found, and what to do where that is not good."""

    check: str
    where: str
    state: State
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Wanted:
    """What the run wants of every node; None and 0 for what is not asked."""

    host_bytes: int = 0
    device_bytes: int = 0
    device: str = ""  # cuda or npu, where the configuration names one
    disk_bytes: int = 0
    controller: bool = False
    lane_bytes_per_s: float = 0.0


def wanted(config: RunConfig, needs: Needs, all_facts: Sequence[Facts], controller: bool) -> Wanted:
    """What the run needs of nodes like these: with ``auto`` it takes the accelerators that there are."""
    there = any(facts.devices for facts in all_facts)
    device = config.trainer.fsdp.device if config.trainer.engine == "fsdp" else ""
    return Wanted(
        host_bytes=host_bytes(config, needs, len(all_facts), there),
        device_bytes=device_bytes(config, needs, there),
        device=device if device in ("cuda", "npu") else "",
        disk_bytes=needs.disk,
        controller=controller,
        lane_bytes_per_s=config.controller.lane_mb_per_s * 1e6,
    )


def _line(check: str, facts: Facts, bad: bool, found: str, fix: str, worse: State = State.BAD) -> Finding:
    return Finding(check, facts.node, worse if bad else State.GOOD, found, fix if bad else "")


# ---- one node


def python(facts: Facts) -> Finding:
    version = tuple(int(part) for part in facts.python.split(".")[:2] if part.isdigit())
    return _line("Python", facts, version < OLDEST_PYTHON, facts.python, "install Python 3.11 or newer")


def torch(facts: Facts) -> Finding:
    found = facts.torch_error or f"{facts.versions.get('torch') or 'no version'}, lanes {', '.join(facts.lanes)}"
    return _line("torch", facts, bool(facts.torch_error), found, "see python -m flowrt.workers.probe on that node")


def devices(facts: Facts, want: Wanted) -> Finding:
    names = ", ".join(sorted({str(device["name"]) for device in facts.devices}))
    found = f"{len(facts.devices)} ({names})" if facts.devices else "none, CPU only"
    fix = f"trainer.fsdp.device is {want.device}: ask for devices (--gpus), load their driver, or use cpu"
    return _line("devices", facts, bool(want.device) and not facts.devices, found, fix)


def device_memory(facts: Facts, want: Wanted) -> Finding:
    free = min((int(device["free_bytes"]) for device in facts.devices), default=0)
    found = f"{_gib(free)} free on the fullest, the largest process on one needs about {_gib(want.device_bytes)}"
    fix = (
        "lower trainer.forward_tokens, use more ranks with --trainer.engine fsdp, --trainer.fsdp.gather pass, "
        "or --trainer.fsdp.recompute True"
    )
    return _line("device memory", facts, free < want.device_bytes, found, fix)


def memory(facts: Facts, want: Wanted) -> Finding:
    found = f"{_gib(facts.free_memory_bytes)} free, the run needs about {_gib(want.host_bytes)}"
    fix = "lower rollout.rows, rollout.workers or trainer.forward_tokens, or spread the run over more nodes"
    if want.host_bytes <= facts.free_memory_bytes < SPARE * want.host_bytes:
        return Finding("memory", facts.node, State.WARN, f"{found}: little is spare", fix)
    return _line("memory", facts, facts.free_memory_bytes < want.host_bytes, found, fix)


def disk(facts: Facts, want: Wanted) -> Finding:
    if facts.directory_error:
        return Finding(
            "disk", facts.node, State.BAD, facts.directory_error, "name another --run-dir, or let it be written"
        )
    found = f"{_gib(facts.free_disk_bytes)} free, checkpoints and models need about {_gib(want.disk_bytes)}"
    fix = "lower checkpoint.keep, or name a --run-dir with more room"
    return _line("disk", facts, facts.free_disk_bytes < want.disk_bytes, found, fix)


def model(facts: Facts) -> Finding:
    fix = "every worker reads it under this path: put it on a file system that all nodes mount"
    return _line("model", facts, bool(facts.model_error), facts.model_error or "is there, or will be built", fix)


def files(facts: Facts) -> Finding:
    found = f"{facts.open_files} may be open"
    return _line(
        "open files", facts, facts.open_files < FEWEST_FILES, found, "raise the limit (ulimit -Hn)", State.WARN
    )


def port(facts: Facts) -> Finding:
    fix = "controller and lanes listen on free ports: let processes listen on that address"
    return _line("port", facts, bool(facts.port_error), facts.port_error or "one can be listened on", fix)


def round_trip(facts: Facts, want: Wanted) -> Finding:
    if facts.round_trip_s is None:
        found = facts.peer_error or facts.torch_error or "was not measured"
        fix = "is it running, is the address right, do the keys fit, does a firewall close its port?"
        return _line("controller", facts, want.controller, found, fix)
    slow = facts.round_trip_s > LONGEST_TRIP_S
    fix = "look for a slow or lossy network between this node and the controller's"
    return _line("controller", facts, slow, f"answers in {facts.round_trip_s * 1e3:.2f} ms", fix, State.WARN)


def address(facts: Facts, alone: bool) -> Finding:
    others = ", ".join(f"{name} {address}" for name, address in facts.addresses.items() if name != "lo")
    loopback = facts.own_address.startswith("127.")
    fix = "other nodes cannot reach it: bring up a network interface, or set controller.host"
    return _line("address", facts, loopback and not alone, f"{facts.own_address} (of {others or 'none'})", fix)


# ---- all nodes


def versions(all_facts: Sequence[Facts]) -> list[Finding]:
    """Every package, Python's minor version and the protocol are the same everywhere."""
    kinds: dict[str, Callable[[Facts], str]] = {name: _package(name) for name in PACKAGES}
    kinds["Python"] = lambda facts: ".".join(facts.python.split(".")[:2])
    kinds["protocol"] = lambda facts: str(facts.protocol)
    findings = []
    for name, kind in kinds.items():
        found = {facts.node: kind(facts) for facts in all_facts}
        if len(set(found.values())) > 1:
            text = ", ".join(f"{node} {version or 'none'}" for node, version in found.items())
            findings.append(Finding(f"versions: {name}", "all", State.BAD, text, "install the same on every node"))
    return findings or [Finding("versions", "all", State.GOOD, "the same everywhere")]


def _package(name: str) -> Callable[[Facts], str]:
    return lambda facts: facts.versions.get(name, "")


def clocks(all_facts: Sequence[Facts]) -> list[Finding]:
    """The differences between clocks: half of that between the delays of both directions."""
    findings = []
    for one, other in _pairs(all_facts):
        there, back = other.delay_s.get(one.probe), one.delay_s.get(other.probe)
        if there is None or back is None:
            continue
        difference_s = (there - back) / 2
        bad = abs(difference_s) > LARGEST_CLOCK_DIFFERENCE_S
        fix = "logs and timelines will not fit together: start chrony or ntpd there" if bad else ""
        found = f"{other.node} is {difference_s * 1e3:+.1f} ms from {one.node}"
        findings.append(Finding("clock", f"{one.node} and {other.node}", State.BAD if bad else State.GOOD, found, fix))
    return findings


def lanes(all_facts: Sequence[Facts], want: Wanted) -> list[Finding]:
    """Every pair reached each other, fast enough for a run, and no pair is much slower than the others."""
    speeds: dict[tuple[str, str], float] = {}
    findings = []
    for one, other in _pairs(all_facts):
        if not (one.probe and other.probe):
            continue
        for source, sink in ((one, other), (other, one)):
            speed = sink.bytes_per_s.get(source.probe)
            if speed is None:
                where, fix = (
                    f"{source.node} to {sink.node}",
                    "does a firewall stand between them? Lanes take free ports",
                )
                findings.append(Finding("lane", where, State.BAD, _why(source, sink), fix))
            else:
                speeds[source.node, sink.node] = speed
    usual = statistics.median(speeds.values()) if speeds else 0.0
    for (source_node, sink_node), speed in speeds.items():
        slow = speed < max(SLOWEST_BYTES_PER_S, usual / UNEVEN)
        fix = "is this the fast network? See controller.host; else look at that link" if slow else ""
        state = State.WARN if slow else State.GOOD
        if speed < want.lane_bytes_per_s:
            state, least = State.BAD, f"{want.lane_bytes_per_s / 1e6:g}"
            fix = f"transfers below controller.lane_mb_per_s ({least}) fail: lower that, or {fix}"
        findings.append(Finding("lane", f"{source_node} to {sink_node}", state, f"{speed / 1e6:.1f} MB/s", fix))
    return findings


def _why(source: Facts, sink: Facts) -> str:
    """What either end of a lane knows of why nothing was measured over it."""
    met = sink.lane_errors.get(source.probe) or source.lane_errors.get(sink.probe)
    return met or sink.peer_error or source.peer_error or "nothing came"


def _pairs(all_facts: Sequence[Facts]) -> list[tuple[Facts, Facts]]:
    return [(one, other) for index, one in enumerate(all_facts) for other in all_facts[index + 1 :]]


def judge(all_facts: Sequence[Facts], want: Wanted) -> list[Finding]:
    """Every check, node by node, then what concerns several."""
    findings: list[Finding] = []
    for facts in all_facts:
        findings += [
            *(python(facts), torch(facts), devices(facts, want), model(facts)),
            *(memory(facts, want), disk(facts, want)),
            *(files(facts), port(facts), address(facts, alone=len(all_facts) == 1)),
        ]
        if facts.devices:
            findings.append(device_memory(facts, want))
        if want.controller:
            findings.append(round_trip(facts, want))
    if len(all_facts) > 1:
        findings += [*versions(all_facts), *clocks(all_facts), *lanes(all_facts, want)]
    return findings


def is_well(findings: Iterable[Finding]) -> bool:
    return all(finding.state is not State.BAD for finding in findings)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
