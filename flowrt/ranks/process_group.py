"""The process group of a trainer's ranks."""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from datetime import timedelta

import torch.distributed as dist

from flowrt.errors import EngineError, first_line
from flowrt.runtime.addresses import Endpoint
from flowrt.runtime.host import interface_of, local_address
from flowrt.transport.devices import Device

STORE_VARIABLE = "FLOWRT_RANKS_STORE"
"""Environment variable: rendezvous file of the ranks of one host. If unset, they use torchrun's rendezvous."""
LOOPBACK = "lo"
INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable: network interface that gloo listens on."""
STORE_CONNECT_TIMEOUT_S = 10.0
HCCL_TIMEOUTS_S = {"HCCL_CONNECT_TIMEOUT": 120, "HCCL_EXEC_TIMEOUT": 1836, "HCCL_EVENT_TIMEOUT": 1868}
"""Defaults of HCCL's own timeouts, by environment variable; 0: no timeout."""
HCCL_MARGIN_S = 60.0


def choose_interface(controller: str, environment: MutableMapping[str, str]) -> None:
    """Set gloo's interface in ``environment`` to the one that reaches ``tcp://HOST:PORT``, unless one is already set.

    Ranks that are all on one host get loopback. By default gloo listens on the address of this host's name, on many
    hosts 127.0.1.1, which other hosts cannot reach. Raises ConfigError if this host has no route to the controller.
    """
    if STORE_VARIABLE in environment or environment.get("WORLD_SIZE", "1") == "1":
        return
    if environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"]:
        environment.setdefault(INTERFACE, LOOPBACK)
        return
    own = local_address(controller)
    if name := interface_of(own):
        environment.setdefault(INTERFACE, name)


def init_ranks(device: Device, deadline_s: float) -> None:
    """Initialise the process group of all ranks: of this process alone if no launcher has set a rendezvous.

    ``deadline_s`` limits each collective call, see `group_timeout_s`.

    Raises EngineError if the ranks cannot reach the store or each other.
    """
    deadline = timedelta(seconds=group_timeout_s(device, deadline_s, os.environ))
    if STORE_VARIABLE in os.environ or "MASTER_ADDR" not in os.environ:
        # All ranks are on this host, which may have no other interface and no name that resolves.
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", LOOPBACK)
    if STORE_VARIABLE in os.environ:
        rank = int(os.environ["RANK"])
        ranks = int(os.environ["WORLD_SIZE"])
        _init_by_store(dist.FileStore(os.environ[STORE_VARIABLE], ranks), rank, ranks, device, deadline)
    elif "MASTER_ADDR" in os.environ:
        with _connection_errors(os.environ):
            _check_store(os.environ)
            dist.init_process_group(device.backend, timeout=deadline)
    else:
        _init_by_store(dist.HashStore(), 0, 1, device, deadline)


def group_timeout_s(device: Device, deadline_s: float, environment: Mapping[str, str]) -> float:
    """Timeout of the process group in seconds. On NPUs HCCL's own timeouts are shorter, so its error comes first."""
    if device.kind != "npu":
        return deadline_s
    texts = {name: environment.get(name, "") for name in HCCL_TIMEOUTS_S}
    hccl_s = [int(text) if text.isdigit() else HCCL_TIMEOUTS_S[name] for name, text in texts.items()]
    return max(deadline_s, max(hccl_s) + HCCL_MARGIN_S)


def _check_store(environment: Mapping[str, str]) -> None:
    """Raise EngineError if the store that torchrun has announced cannot be reached from this host.

    The store exists before any rank starts. torch would retry until its deadline, and its error names no fix.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    try:
        socket.create_connection((host, port), timeout=STORE_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise EngineError(
            f"{_rank(environment)} cannot reach the store of the ranks at {Endpoint(host, port)}{_resolution(host)}: "
            f"{error.strerror or error}; torchrun announces the host name of rank 0: start torchrun on each host with "
            "--local-addr and that host's own address"
        ) from error


def _resolution(host: str) -> str:
    with contextlib.suppress(OSError):
        address = socket.getaddrinfo(host, None)[0][4][0]
        return f", which resolves to {address} here" if address != host else ""
    return ", a name that does not resolve here"


@contextlib.contextmanager
def _connection_errors(environment: Mapping[str, str]) -> Iterator[None]:
    """Convert torch's connection errors to EngineError with the interface that was used and the fix."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error).lower()):
            raise
        interface = environment.get(INTERFACE, "of the host name")
        raise EngineError(
            f"{_rank(environment)} cannot connect to the other ranks over interface {interface}: "
            f"{first_line(error)}; check that the hosts reach each other there, or set {INTERFACE}"
        ) from error


def _rank(environment: Mapping[str, str]) -> str:
    return f"rank {environment['RANK']} on host {socket.gethostname()!r}"


def _init_by_store(store: dist.Store, rank: int, ranks: int, device: Device, deadline: timedelta) -> None:
    store.set_timeout(deadline)
    dist.init_process_group(device.backend, store=store, rank=rank, world_size=ranks, timeout=deadline)
