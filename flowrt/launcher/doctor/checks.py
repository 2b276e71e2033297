"""Checks of `flowrt doctor`: pure functions from facts to findings."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from flowrt.ids import ROLLOUT, TRAINER
from flowrt.launcher.accelerators import shared_device_bytes
from flowrt.launcher.doctor.estimate import (
    ResourceEstimate,
    device_bytes,
    has_accelerated_reference,
    host_bytes,
    reference_bytes,
)
from flowrt.launcher.doctor.facts import PACKAGES, Facts
from flowrt.recipes.config import RunConfig
from flowrt.recipes.devices import named_accelerators, reference_device
from flowrt.runtime.addresses import is_loopback

MIN_PYTHON = (3, 11)
MIN_OPEN_FILES = 4096
MAX_ROUND_TRIP_S = 0.05
MIN_BYTES_PER_S = 100e6
MEMORY_HEADROOM = 1.2
GIB = 2**30


class Verdict(Enum):
    """The verdict of a check, and the colour of its row; the command fails if any verdict is BAD."""

    GOOD = "green"
    WARN = "yellow"
    BAD = "red"


@dataclass(frozen=True)
class Finding:
    """The result of one check at one place; ``fix`` is empty if the verdict is GOOD."""

    check: str
    where: str
    verdict: Verdict
    state: str
    fix: str = ""


@dataclass(frozen=True)
class Wanted:
    """What the run needs on every node; 0, empty and False for what it does not need."""

    host_bytes: int = 0
    device_bytes: int = 0
    device: str = ""  # cuda or npu, where trainer or rollout workers are to use one
    shared_device_bytes: int = 0  # of the fullest device, where several processes share one
    reference_device: str = ""  # of reference workers: cuda, npu, or auto where a node has accelerators
    reference_bytes: int = 0  # of the fullest device with reference workers
    disk_bytes: int = 0
    controller: bool = False
    lane_bytes_per_s: float = 0.0


def wanted(config: RunConfig, needs: ResourceEstimate, all_facts: Sequence[Facts], controller: bool) -> Wanted:
    """What the run needs of these nodes; device ``auto`` uses the accelerators that they have.

    Args:
        config: of the run.
        needs: memory of each process, and disk space, in bytes.
        all_facts: the facts of each node.
        controller: whether each node has to reach a controller.
    """
    there = any(facts.devices for facts in all_facts)
    named = named_accelerators(config)
    devices = max((len(facts.devices) for facts in all_facts), default=0)
    return Wanted(
        host_bytes=host_bytes(config, needs, len(all_facts), there),
        device_bytes=device_bytes(config, needs, there),
        device=named.get(TRAINER) or named.get(ROLLOUT, ""),
        shared_device_bytes=shared_device_bytes(config, needs, devices),
        reference_device=reference_device(config) if has_accelerated_reference(config, there) else "",
        reference_bytes=reference_bytes(config, needs, devices),
        disk_bytes=needs.disk,
        controller=controller,
        lane_bytes_per_s=config.controller.min_transfer_mb_per_s * 1e6,
    )


def judge(all_facts: Sequence[Facts], want: Wanted) -> list[Finding]:
    """The findings of all checks: node by node, then between nodes."""
    single_node = len(all_facts) == 1
    findings = [finding for facts in all_facts for finding in _node_checks(facts, want, single_node)]
    if want.reference_device:
        findings.append(_reference(all_facts, want))
    return findings if single_node else [*findings, *_versions(all_facts), *_lanes(all_facts, want)]


def is_well(findings: Iterable[Finding]) -> bool:
    """Whether no finding is BAD."""
    return all(finding.verdict is not Verdict.BAD for finding in findings)


def _finding(check: str, where: str, good: bool, state: str, fix: str, worst: Verdict = Verdict.BAD) -> Finding:
    return Finding(
        check=check, where=where, verdict=Verdict.GOOD if good else worst, state=state, fix="" if good else fix
    )


# ---- one node


def _node_checks(facts: Facts, want: Wanted, single_node: bool) -> Iterator[Finding]:
    def finding(check: str, good: bool, state: str, fix: str, worst: Verdict = Verdict.BAD) -> Finding:
        return _finding(check, facts.node, good, state, fix, worst)

    version = tuple(int(part) for part in facts.python.split(".")[:2] if part.isdigit())
    yield finding("Python", version >= MIN_PYTHON, facts.python, "install Python 3.11 or newer")
    torch = facts.torch_error or f"{facts.versions.get('torch') or 'no version'}, lanes {', '.join(facts.lanes)}"
    yield finding("torch", not facts.torch_error, torch, "see python -m flowrt.launcher.doctor.facts on that node")
    names = ", ".join(sorted({device["name"] for device in facts.devices}))
    yield finding(
        "devices",
        bool(facts.devices) or not want.device,
        f"{len(facts.devices)} ({names})" if facts.devices else "none, CPU only",
        f"trainer or rollout workers use {want.device}: ask for devices (--gpus), load their driver, install a torch "
        "built for them, or use device cpu",
    )
    yield finding(
        "model",
        not facts.model_error,
        facts.model_error or "exists, or will be built",
        "every worker reads it under this path: put it on a file system that all nodes mount",
    )
    yield _memory(facts, want)
    yield finding(
        "disk",
        not facts.directory_error and facts.free_disk_bytes >= want.disk_bytes,
        facts.directory_error
        or f"{_gib(facts.free_disk_bytes)} free, checkpoints and models need about {_gib(want.disk_bytes)}",
        "name another --run-dir, or make it writable"
        if facts.directory_error
        else "lower checkpoint.keep, or name a --run-dir with more space",
    )
    open_files = f"{facts.open_files} may be open"
    yield finding(
        "open files", facts.open_files >= MIN_OPEN_FILES, open_files, "raise the limit (ulimit -Hn)", Verdict.WARN
    )
    yield finding(
        "port",
        not facts.port_error,
        facts.port_error or "a free one can be bound",
        "controller and lanes listen on free ports: let processes listen on that address",
    )
    others = ", ".join(f"{name} {address}" for name, address in facts.addresses.items() if name != "lo")
    yield finding(
        "address",
        single_node or not is_loopback(facts.own_address),
        f"{facts.own_address} (of {others or 'none'})",
        "other nodes cannot reach it: bring up a network interface, or set controller.host",
    )
    if facts.devices:
        free = min(device["free_bytes"] for device in facts.devices)
        yield finding(
            "device memory",
            free >= want.device_bytes,
            f"at least {_gib(free)} free on each, the largest process on one needs about {_gib(want.device_bytes)}",
            "lower trainer.forward_tokens, use more ranks with --trainer.engine fsdp, --trainer.fsdp.gather pass, "
            "or --trainer.fsdp.recompute True",
        )
        if want.shared_device_bytes:
            yield finding(
                "shared device",
                free >= want.shared_device_bytes,
                f"{_gib(free)} free, the processes that share one need about {_gib(want.shared_device_bytes)}",
                "lower rollout.workers, rollout.max_running_requests or trainer.forward_tokens, use dtype bfloat16, or "
                "set a role's device to cpu",
            )
    if want.controller and facts.round_trip_s is None:
        yield finding(
            "controller",
            False,
            facts.peer_error or facts.torch_error or "was not measured",
            "is it running, is the address right, do the keys match, does a firewall close its port?",
        )
    elif want.controller and facts.round_trip_s is not None:
        yield finding(
            "controller",
            facts.round_trip_s <= MAX_ROUND_TRIP_S,
            f"answers in {facts.round_trip_s * 1e3:.2f} ms",
            "look for a slow or lossy network between this node and the controller's",
            Verdict.WARN,
        )


def _reference(all_facts: Sequence[Facts], want: Wanted) -> Finding:
    """Check that a node has accelerators with enough free memory for the reference workers."""
    free = {facts.node: min(device["free_bytes"] for device in facts.devices) for facts in all_facts if facts.devices}
    if not free:
        where = all_facts[0].node if len(all_facts) == 1 else "all"
        fix = f"reference.device is {want.reference_device}: ask for devices (--gpus), load their driver, or use cpu"
        return _finding("reference device", where, False, "no accelerator", fix)
    node = max(free, key=lambda candidate: free[candidate])
    return _finding(
        "reference device",
        node,
        free[node] >= want.reference_bytes,
        f"{_gib(free[node])} free on each, reference workers (and a trainer rank, where they share the device) need "
        f"about {_gib(want.reference_bytes)}",
        "set reference.device to cpu or reference.dtype to bfloat16, lower reference.workers, or give the run more "
        "devices than trainer.ranks",
    )


def _memory(facts: Facts, want: Wanted) -> Finding:
    fits = facts.free_memory_bytes >= want.host_bytes
    return _finding(
        "memory",
        facts.node,
        facts.free_memory_bytes >= MEMORY_HEADROOM * want.host_bytes,
        f"{_gib(facts.free_memory_bytes)} free, the run needs about {_gib(want.host_bytes)}",
        "lower rollout.max_running_requests, rollout.workers or trainer.forward_tokens, or spread the run over more "
        "nodes",
        Verdict.WARN if fits else Verdict.BAD,
    )


# ---- between nodes


def _versions(all_facts: Sequence[Facts]) -> list[Finding]:
    """Check that packages, Python's minor version and the protocol are equal on all nodes."""
    findings = []
    for name in (*PACKAGES, "Python", "protocol"):
        versions = {facts.node: _version(facts, name) for facts in all_facts}
        if len(set(versions.values())) > 1:
            text = ", ".join(f"{node} {version or 'none'}" for node, version in versions.items())
            findings.append(_finding(f"versions: {name}", "all", False, text, "install the same on every node"))
    return findings or [_finding("versions", "all", True, "the same everywhere", "")]


def _version(facts: Facts, name: str) -> str:
    match name:
        case "Python":
            return ".".join(facts.python.split(".")[:2])
        case "protocol":
            return str(facts.protocol)
    return facts.versions.get(name, "")


def _lanes(all_facts: Sequence[Facts], want: Wanted) -> Iterator[Finding]:
    """Check that each pair of nodes has a lane in both directions, and that it is fast enough."""
    probed = [facts for facts in all_facts if facts.probe]
    for source, sink in itertools.permutations(probed, 2):
        where = f"{source.node} to {sink.node}"
        speed = sink.bytes_per_s.get(source.probe)
        if speed is None:
            error = sink.lane_errors.get(source.probe) or source.lane_errors.get(sink.probe)
            error_text = error or sink.peer_error or source.peer_error or "nothing arrived"
            fix = "does a firewall stand between them? Lanes use free ports"
            yield _finding("lane", where, False, error_text, fix)
            continue
        fails = speed < want.lane_bytes_per_s
        fix = "is this the fast network? See controller.host; else check that link"
        if fails:
            least = f"{want.lane_bytes_per_s / 1e6:g}"
            fix = f"transfers below controller.min_transfer_mb_per_s ({least}) fail: lower that, or {fix}"
        good = speed >= MIN_BYTES_PER_S and not fails
        yield _finding("lane", where, good, f"{speed / 1e6:.1f} MB/s", fix, Verdict.BAD if fails else Verdict.WARN)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
