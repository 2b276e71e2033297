"""The process group of a trainer's ranks."""

import os
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from flowrt.transport.devices import Device

STORE_VARIABLE = "FLOWRT_RANKS_STORE"
"""Environment variable with the file by which the ranks of one host meet; without it they meet as torchrun says."""
LOOPBACK = "lo"
HCCL_TIMEOUTS_S = {"HCCL_CONNECT_TIMEOUT": 120, "HCCL_EXEC_TIMEOUT": 1836, "HCCL_EVENT_TIMEOUT": 1868}
"""HCCL's own timeouts, by environment variable, and what they are by default; 0: none."""
HCCL_SPARE_S = 60.0


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


def _meet_by(store: dist.Store, rank: int, ranks: int, device: Device, deadline: timedelta) -> None:
    store.set_timeout(deadline)
    dist.init_process_group(device.backend, store=store, rank=rank, world_size=ranks, timeout=deadline)
