"""What is so on one node: gathered there, sent as a line of JSON, judged elsewhere."""

import dataclasses
import inspect
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from flowrt.workers.rounds import longest_s

from flowrt.errors import ConfigError
from flowrt.waiting import blocking
from flowrt.wire.hosts import interfaces, own_address
from flowrt.wire.messages import PROTOCOL

PACKAGES = ("flowrt", "torch", "transformers", "pyzmq", "msgpack", "numpy", "safetensors")
PROBE_S = 60.0
START_S = 60.0


@dataclass(frozen=True)
class Facts:
    """One node. Sizes in bytes; ``delay_s``, ``bytes_per_s``, ``lane_errors`` are of what came from another probe."""

    node: str
    python: str
    versions: dict[str, str]
    protocol: int
    cores: int
    free_memory_bytes: int
    free_disk_bytes: int
    directory_error: str
    open_files: int
    addresses: dict[str, str]
    own_address: str
    port_error: str
    model_error: str
    torch_error: str = ""
    lanes: list[str] = field(default_factory=list)
    devices: list[dict[str, Any]] = field(default_factory=list)
    probe: str = ""
    round_trip_s: float | None = None
    delay_s: dict[str, float] = field(default_factory=dict)
    bytes_per_s: dict[str, float] = field(default_factory=dict)
    peer_error: str = ""
    lane_errors: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def from_json(text: str, source: str) -> Facts:
    """Raises ConfigError when the text is not what `Facts.to_json` makes."""
    try:
        table = json.loads(text)
        facts = Facts(**table)
        for one in dataclasses.fields(Facts):
            _check(one.name, getattr(facts, one.name), inspect.formatannotation(one.type))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{source} holds no facts of flowrt doctor --json: {error}") from None
    return facts


def _check(name: str, value: Any, expected: str) -> None:
    """Only the kinds of values that `Facts` has."""
    right = {
        "str": lambda: isinstance(value, str),
        "int": lambda: type(value) is int,
        "float | None": lambda: value is None or isinstance(value, float | int),
        "list[str]": lambda: _all(value, list, str),
        "list[dict[str, typing.Any]]": lambda: _all(value, list, dict) and all(_device(one) for one in value),
        "dict[str, str]": lambda: isinstance(value, dict) and _all(list(value.values()), list, str),
        "dict[str, float]": lambda: isinstance(value, dict) and _all(list(value.values()), list, float | int),
    }
    if not right[expected]():
        raise TypeError(f"{name} is {value!r}")


def _all(values: Any, container: type, kind: Any) -> bool:
    return isinstance(values, container) and all(isinstance(value, kind) for value in values)  # type: ignore[attr-defined]


def _device(table: dict[str, Any]) -> bool:
    return isinstance(table.get("name"), str) and all(
        type(table.get(key)) is int for key in ("free_bytes", "total_bytes")
    )


def collect(directory: Path, model: str, probe: list[str], deadline_s: float, peers: int = 1) -> Facts:
    """This node's facts. ``directory`` is where a run would write, ``probe`` what else to tell `workers/probe.py`.

    ``deadline_s`` is for the controller and other nodes to answer; ``peers`` meet then, this one included.
    """
    existing = next((path for path in (directory, *directory.absolute().parents) if path.exists()), Path("/"))
    node = node_name()
    facts = Facts(
        node=node,
        python=platform.python_version(),
        versions={name: _version(name) for name in PACKAGES},
        protocol=PROTOCOL,
        cores=len(os.sched_getaffinity(0)),
        free_memory_bytes=_free_memory_bytes(),
        free_disk_bytes=shutil.disk_usage(existing).free,
        directory_error="" if os.access(existing, os.W_OK) else f"{existing} cannot be written to",
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        addresses=interfaces(),
        own_address=own_address(),
        port_error=_port_error(),
        model_error="" if not model or Path(model).is_dir() else f"there is no directory {model}",
    )
    return dataclasses.replace(facts, **_ask_torch(node, probe, deadline_s, longest_s(peers)))


def node_name() -> str:
    """SLURM's name of the node where there is one: it is what the user can act upon."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _free_memory_bytes() -> int:
    """What can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _port_error() -> str:
    """Whether a port can be listened on, on the address by which others find this node."""
    try:
        with socket.create_server((own_address(), 0)):
            return ""
    except OSError as error:
        return f"{own_address()}: {error.strerror}"


def _ask_torch(node: str, probe: list[str], deadline_s: float, meetings_s: float) -> dict[str, Any]:
    """In a process of its own: torch may be broken, and this one does without it."""
    words = [sys.executable, "-m", "flowrt.workers.probe", "--node", node, "--deadline-s", str(deadline_s), *probe]
    limit_s = START_S + deadline_s + meetings_s
    ask = partial(subprocess.run, words, capture_output=True, text=True, timeout=limit_s, check=False)
    try:
        ended = blocking(ask, limit_s, "what torch says of this node", "the probe")
    except subprocess.TimeoutExpired:
        return {"torch_error": f"it said nothing for {limit_s:.0f} s"}
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines()
        return {"torch_error": lines[-1] if lines else f"exit code {ended.returncode}"}
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer
