"""The process group of a trainer's ranks."""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from datetime import timedelta

import torch.distributed as dist

from flowrt.errors import EngineError
from flowrt.transport.devices import Device
from flowrt.transport.rendezvous import local_address
from flowrt.wire.hosts import interfaces

STORE_VARIABLE = "FLOWRT_RANKS_STORE"
"""Environment variable with the file by which the ranks of one host meet; without it they meet as torchrun says."""
LOOPBACK = "lo"
INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the network interface that gloo listens on."""
REACH_S = 10.0
HCCL_TIMEOUTS_S = {"HCCL_CONNECT_TIMEOUT": 120, "HCCL_EXEC_TIMEOUT": 1836, "HCCL_EVENT_TIMEOUT": 1868}
"""HCCL's own timeouts, by environment variable, and what they are by default; 0: none."""
HCCL_SPARE_S = 60.0


def choose_interface(controller: str, environment: MutableMapping[str, str]) -> None:
    """Have gloo meet over the network of the controller at ``tcp://HOST:PORT``, if nobody has said otherwise.

    Left to itself it listens where this host's own name leads: on many hosts that is 127.0.1.1, which no other reaches.
    """
    if STORE_VARIABLE in environment or environment.get("WORLD_SIZE", "1") == "1":
        return
    if environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"]:
        environment.setdefault(INTERFACE, LOOPBACK)
        return
    own = local_address(controller)
    for name, address in interfaces().items():
        if address == own:
            environment.setdefault(INTERFACE, name)


def meet(device: Device, deadline_s: float) -> None:
    """The process group of all ranks; of one alone where no launcher has said otherwise."""
    deadline = timedelta(seconds=group_timeout_s(device, deadline_s, os.environ))
    if STORE_VARIABLE in os.environ:
        # All are on this host: what they listen on need not be reached from another.
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", LOOPBACK)
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        _meet_by(dist.FileStore(os.environ[STORE_VARIABLE], ranks), rank, ranks, device, deadline)
    elif "MASTER_ADDR" in os.environ:
        with _telling(os.environ):
            _check_store(os.environ)
            dist.init_process_group(device.backend, timeout=deadline)
    else:
        _meet_by(dist.HashStore(), 0, 1, device, deadline)


def group_timeout_s(device: Device, deadline_s: float, environment: Mapping[str, str]) -> float:
    """How long the ranks may wait for each other: on NPUs longer than HCCL does, whose own error is told first then."""
    if device.kind != "npu":
        return deadline_s
    given = {name: environment.get(name, "") for name in HCCL_TIMEOUTS_S}
    own_s = [int(text) if text.isdigit() else HCCL_TIMEOUTS_S[name] for name, text in given.items()]
    return max(deadline_s, max(own_s) + HCCL_SPARE_S)


def _check_store(environment: Mapping[str, str]) -> None:
    """Raises EngineError where the store that torchrun has announced to this host cannot be reached from it.

    It is there before any rank is: torch would try again until its deadline, and then not say what to do.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    try:
        socket.create_connection((host, port), timeout=REACH_S).close()
    except OSError as error:
        raise EngineError(
            f"{_rank(environment)} cannot reach the store of the ranks at {host}:{port}{_found_at(host)}: "
            f"{error.strerror or error}; torchrun has announced the name that the host of rank 0 has for itself: start "
            "torchrun on each host with --local-addr and that host's own address"
        ) from error


def _found_at(host: str) -> str:
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(host)
        return f", which is {address} here" if address != host else ""
    return ", a name that is not known here"


@contextlib.contextmanager
def _telling(environment: Mapping[str, str]) -> Iterator[None]:
    """What ranks that do not reach each other raise becomes an EngineError that says where they tried, and the fix."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error).lower()):
            raise
        over = environment.get(INTERFACE, "the one of its own name")
        raise EngineError(
            f"{_rank(environment)} did not get to the other ranks over interface {over}: "
            f"{str(error).splitlines()[0]}; can the hosts reach each other there? {INTERFACE} names another"
        ) from error


def _rank(environment: Mapping[str, str]) -> str:
    return f"rank {environment['RANK']} on host {socket.gethostname()!r}"


def _meet_by(store: dist.Store, rank: int, ranks: int, device: Device, deadline: timedelta) -> None:
    store.set_timeout(deadline)
    dist.init_process_group(device.backend, store=store, rank=rank, world_size=ranks, timeout=deadline)
