"""Facts about one node, evaluated by `checks`.

``python -m flowrt.launcher.doctor.facts`` prints those of its node as a line of JSON. `command` starts it on each node;
it is a process of its own on this one too, because the import of torch may crash.
"""

import argparse
import dataclasses
import json
import os
import platform
import resource
import shutil
import socket
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NoReturn, TypedDict

from flowrt.errors import EXIT_OK, ConfigError
from flowrt.protocol.messages import PROTOCOL
from flowrt.runtime.addresses import is_ipv6
from flowrt.runtime.bounds import seconds
from flowrt.runtime.host import interfaces, own_address
from flowrt.runtime.resource_limits import available_bytes

PACKAGES = ("flowrt", "torch", "transformers", "pyzmq", "msgpack", "numpy", "safetensors")
START_S = 60.0
ROUND_S = 15.0
"""Time limit for two nodes to measure a lane in both directions; a working lane takes less than half of it."""


class Accelerator(TypedDict):
    """An accelerator and its free memory."""

    name: str
    free_bytes: int


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
        bytes_per_s: bandwidth of the lane to this node, by the name of the sending probe.
        lane_errors: failures of lane tests, by the name of the other probe.
    """

    node: str
    python: str
    versions: dict[str, str]
    protocol: int
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
    bytes_per_s: dict[str, float] = field(default_factory=dict)
    peer_error: str = ""
    lane_errors: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def from_json(text: str, source: str) -> Facts:
    """Parse the output of `Facts.to_json`. Raises ConfigError, naming the ``source``, for that of another version."""
    try:
        return Facts(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{source} printed no facts of this version of flowrt: {error}") from None


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


def collect(run_dir: str, model: str) -> Facts:
    """This node's facts, without those that need torch.

    Args:
        run_dir: where the run would be written; empty for the working directory.
        model: the model's directory; empty for a built one.
    """
    directory = Path(run_dir or ".")
    existing = next((path for path in (directory, *directory.absolute().parents) if path.exists()), Path("/"))
    return Facts(
        node=node_name(),
        python=platform.python_version(),
        versions={name: _version(name) for name in PACKAGES},
        protocol=PROTOCOL,
        free_memory_bytes=available_bytes(),
        free_disk_bytes=shutil.disk_usage(existing).free,
        directory_error="" if os.access(existing, os.W_OK) else f"{existing} is not writable",
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        addresses=interfaces(),
        own_address=own_address(),
        port_error=_port_error(),
        model_error=_model_error(Path(model)) if model else "",
    )


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


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description="print facts about this node as a line of JSON")
    parser.add_argument("--run-dir", default="")
    parser.add_argument("--model", default="")
    parser.add_argument("--controller", default="", help="tcp://HOST:PORT, whose round trip is measured")
    parser.add_argument("--keys", default="", help="directory of keys")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes that measure lanes, this one included")
    parser.add_argument("--deadline-s", type=seconds, default=60.0)
    arguments = parser.parse_args()
    facts = collect(arguments.run_dir, arguments.model)
    try:
        from flowrt.launcher.doctor import probe
    except (ImportError, OSError) as error:
        facts = dataclasses.replace(facts, torch_error=f"{type(error).__name__}: {error}")
    else:
        measured = probe.measure(
            facts.node, arguments.controller, arguments.keys, arguments.nodes, arguments.deadline_s
        )
        facts = dataclasses.replace(facts, **measured)
    sys.stdout.write(facts.to_json() + "\n")
    sys.stdout.flush()
    os._exit(EXIT_OK)  # a lane's thread may be inside gloo, which cannot be interrupted


if __name__ == "__main__":
    main()
