"""Facts about one node: collected there, sent as a line of JSON, evaluated by `checks`."""

import dataclasses
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
from types import UnionType
from typing import Any, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

from flowrt.errors import ConfigError
from flowrt.protocol.messages import PROTOCOL
from flowrt.runtime.addresses import is_ipv6
from flowrt.runtime.host import interfaces, own_address
from flowrt.runtime.interpreter import RUN_MODULE
from flowrt.runtime.memory import available_bytes
from flowrt.runtime.waits import blocking

PACKAGES = ("flowrt", "torch", "transformers", "pyzmq", "msgpack", "numpy", "safetensors")
START_S = 60.0
ROUND_S = 15.0
"""Time limit for two nodes to measure a lane in both directions; a working lane takes less than half of it."""


class Accelerator(TypedDict):
    """An accelerator and its memory."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Facts:
    """One node. A string ``..._error`` is empty if there is no error.

    Attributes:
        free_memory_bytes: host memory that is available without swapping.
        free_disk_bytes: free space on the file system of the run directory.
        open_files: hard limit of the open files of a process.
        addresses: one address of each network interface, by its name.
        lanes: transports that lanes can use.
        probe: name of this node's probe; empty if it measured nothing between nodes.
        round_trip_s: median round trip to the controller; None if it was not measured.
        delay_s: seconds from send to receipt by the two hosts' clocks, by the name of the sending probe.
        bytes_per_s: bandwidth of the lane to this node, by the name of the sending probe.
        lane_errors: failures of lane tests, by the name of the other probe.
    """

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
    devices: list[Accelerator] = field(default_factory=list)
    probe: str = ""
    round_trip_s: float | None = None
    delay_s: dict[str, float] = field(default_factory=dict)
    bytes_per_s: dict[str, float] = field(default_factory=dict)
    peer_error: str = ""
    lane_errors: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def from_json(text: str, source: str) -> Facts:
    """Parse the output of `Facts.to_json`. Raises ConfigError, naming the ``source``, for any other text."""
    try:
        facts = Facts(**json.loads(text))
        for name, kind in get_type_hints(Facts).items():
            if not _is_instance(getattr(facts, name), kind):
                raise TypeError(f"{name} is {getattr(facts, name)!r}")
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{source} holds no facts of flowrt doctor --json: {error}") from None
    return facts


def _is_instance(value: object, kind: Any) -> bool:
    """`isinstance` for the types of the fields of `Facts`."""
    if is_typeddict(kind):
        hints = get_type_hints(kind)
        return (
            isinstance(value, dict)
            and value.keys() == hints.keys()
            and all(_is_instance(value[key], hints[key]) for key in hints)
        )
    arguments = get_args(kind)
    match get_origin(kind):
        case None:
            return type(value) in ((int, float) if kind is float else (kind,))
        case origin if origin is UnionType:
            return any(_is_instance(value, one) for one in arguments)
        case origin if origin is list:
            return isinstance(value, list) and all(_is_instance(item, arguments[0]) for item in value)
    return isinstance(value, dict) and all(_is_instance(item, arguments[1]) for item in value.values())


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Rounds of lane measurements, as index pairs: each pair once, no node twice in a round (circle method)."""
    places = list(range(count + count % 2))
    schedule = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        schedule.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        places = [places[0], places[-1], *places[1:-1]]
    return schedule


def lanes_s(count: int) -> float:
    """Time limit of all lane measurements of ``count`` nodes, in seconds."""
    return len(rounds(count)) * ROUND_S


def collect(directory: Path, model: str, probe: list[str], limit_s: float) -> Facts:
    """This node's facts.

    Args:
        directory: where the run would be written.
        model: the model's directory; empty for a built one.
        probe: arguments of `flowrt.launcher.doctor.probe`.
        limit_s: time limit of the probe, in seconds.
    """
    existing = next((path for path in (directory, *directory.absolute().parents) if path.exists()), Path("/"))
    node = node_name()
    facts = Facts(
        node=node,
        python=platform.python_version(),
        versions={name: _version(name) for name in PACKAGES},
        protocol=PROTOCOL,
        cores=len(os.sched_getaffinity(0)),
        free_memory_bytes=available_bytes(),
        free_disk_bytes=shutil.disk_usage(existing).free,
        directory_error="" if os.access(existing, os.W_OK) else f"{existing} is not writable",
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        addresses=interfaces(),
        own_address=own_address(),
        port_error=_port_error(),
        model_error=_model_error(Path(model)) if model else "",
    )
    return dataclasses.replace(facts, **_probe(["--node", node, *probe], limit_s))


def _model_error(path: Path) -> str:
    """Why a model cannot be a directory; empty if it is one."""
    if path.is_dir():
        return ""
    return f"{path} is a file, and a model is a directory" if path.is_file() else f"there is no directory {path}"


def node_name() -> str:
    """SLURM's name of the node if there is one, else the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _port_error() -> str:
    """Why no port can be bound on the address of this node; empty if one can."""
    try:
        address = own_address()
        with socket.create_server((address, 0), family=socket.AF_INET6 if is_ipv6(address) else socket.AF_INET):
            return ""
    except OSError as error:
        return f"{own_address()}: {error.strerror}"


def _probe(arguments: list[str], limit_s: float) -> dict[str, Any]:
    """The facts that the probe prints. The probe is a process of its own: the import of torch may crash."""
    words = [sys.executable, RUN_MODULE, "flowrt.launcher.doctor.probe", *arguments]
    call = partial(subprocess.run, words, capture_output=True, text=True, timeout=limit_s, check=False)
    try:
        ended = blocking(call, limit_s, "the probe of this node", "the probe")
    except subprocess.TimeoutExpired:
        return {"torch_error": f"the probe did not end within {limit_s:.0f} s"}
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines()
        return {"torch_error": lines[-1] if lines else f"exit code {ended.returncode}"}
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found
