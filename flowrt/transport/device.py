"""Lanes between accelerators: a two-rank nccl or hccl group for each, made on demand.

Both libraries ignore tags and order messages by issue alone; the controller's turns give both ends the same order. A
send that is issued early would occupy the device, so it waits until the receiver has said that it is ready. Rows in
host memory are staged through device memory piece by piece; rows that are on the device are sent from where they are.

Neither library can be waited for with a deadline of our own: whether a piece is complete is looked at in short turns,
and a group whose peer hangs is aborted.

nccl is written against torch's interface and HAS NOT RUN BETWEEN TWO CUDA DEVICES YET; its tests run where there are
two. hccl is written against torch_npu's interface, a test compares names and signatures with torch_npu's sources, and
IT HAS NOT RUN ON AN NPU.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from flowrt.errors import ConfigError, TransferError, WaitExpired
from flowrt.transport.devices import Kind, has_cuda, has_npu, own_index, torch_npu
from flowrt.transport.pace import Pace
from flowrt.transport.pieces import PIECE_BYTES, Piece, Run, cut
from flowrt.transport.rendezvous import RECEIVER_RANK, SENDER_RANK, SignalStore
from flowrt.transport.warm import WarmMemory
from flowrt.waiting import looked_for

LOOK_S = 0.0002
GROUP_PATIENCE = 4
"""The library's own timeout ends processes; ours, which only ends the lane, must come first by far."""
_environment = threading.Lock()


class NcclTransport:
    """Groups on the CUDA device that is current where this is made; else on the one that an engine here would take."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device() if has_cuda() else None

    def open(self, store: SignalStore, sending: bool, pace: Pace) -> "DeviceChannel":
        device = _own_index("cuda", store) if self._device is None else self._device
        rank = SENDER_RANK if sending else RECEIVER_RANK
        kind: Any = torch.distributed.ProcessGroupNCCL
        options = kind.Options()
        options._timeout = timedelta(seconds=pace.deadline_s * GROUP_PATIENCE)
        # A lane's thread has a current device of its own.
        torch.cuda.set_device(device)
        with _errors_stay_here("TORCH_NCCL_ASYNC_ERROR_HANDLING"):
            group = kind(store, rank, 2, options)
        return DeviceChannel(group, group.abort, store, torch.device("cuda", device), pace)


class HcclTransport:
    """Groups on the NPU that is current where this is made; else on the one that an engine here would take."""

    def __init__(self) -> None:
        self._device: int | None = None
        if has_npu():
            self._device = torch_npu().npu.current_device()

    def open(self, store: SignalStore, sending: bool, pace: Pace) -> "DeviceChannel":
        device = _own_index("npu", store) if self._device is None else self._device
        rank = SENDER_RANK if sending else RECEIVER_RANK
        kind: Any = torch_npu()._C._distributed_c10d.ProcessGroupHCCL
        options = kind.Options()
        options.is_high_priority_stream = False
        options._timeout = timedelta(seconds=pace.deadline_s * GROUP_PATIENCE)
        options.global_ranks_in_group = [SENDER_RANK, RECEIVER_RANK]
        # A communicator has 200 MB of buffers unless it is told otherwise.
        options.hccl_config = {"hccl_buffer_size": PIECE_BYTES >> 19}
        torch_npu().npu.set_device(device)
        with _errors_stay_here("TORCH_HCCL_ASYNC_ERROR_HANDLING", "HCCL_ASYNC_ERROR_HANDLING"):
            group = kind(store, rank, 2, options)

        def abort() -> None:
            # Its own `abort` overrides nothing and is not bound: what Python finds is c10d's, which does nothing.
            group.abort_hccl_comm("the lane has ended")

        return DeviceChannel(group, abort, store, torch.device("npu", device), pace)


def _own_index(kind: Kind, store: SignalStore) -> int:
    try:
        return own_index(kind)
    except ConfigError as error:
        raise TransferError(f"lane {store.lane}: {error}") from None


@contextmanager
def _errors_stay_here(variable: str, older: str = "") -> Iterator[None]:
    """Groups made in here abort their communicator on an error in place of ending the process; others are untouched.

    With an ``older`` name, what a user has set by either stays. nccl's is set by torchrun, which is nobody's wish.
    """
    with _environment:
        before = os.environ.get(variable)
        if not older or (before is None and older not in os.environ):
            os.environ[variable] = "2"
        try:
            yield
        finally:
            os.environ.pop(variable, None)
            if before is not None:
                os.environ[variable] = before


class DeviceChannel:
    """One end of a group; what arrives is staged back to host memory."""

    def __init__(
        self, group: Any, abort: Callable[[], object], store: SignalStore, device: torch.device, pace: Pace
    ) -> None:
        self._group = group
        self._abort: Callable[[], object] | None = abort
        self._store = store
        self._device = device
        self._pace = pace
        self._message = 0
        self._memory = WarmMemory()
        self._interrupted = threading.Event()

    def send(self, runs: Sequence[Run]) -> None:
        self._store.take(self._ready())
        for run in runs:
            for piece in cut(run.sizes, PIECE_BYTES):
                self._complete(self._group.send([self._on_device(run, piece)], RECEIVER_RANK, 0))
                self._pace.moved(piece.size)

    def receive(self, sizes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        self._store.set(self._ready(), b"1")
        received = []
        for rows in sizes:
            flat = self._memory.take(sum(rows))
            for piece in cut(rows, PIECE_BYTES):
                staged = torch.empty(piece.size, dtype=torch.uint8, device=self._device)
                self._complete(self._group.recv([staged], SENDER_RANK, 0))
                self._pace.moved(piece.size)
                flat[piece.start : piece.start + piece.size].copy_(staged)
            received.append(flat)
        return received

    def rest(self) -> None:
        self._memory.rest()

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        abort, self._abort, self._group = self._abort, None, None
        if abort is not None:
            abort()

    def _ready(self) -> str:
        self._message += 1
        return f"ready/{self._message}"

    def _on_device(self, run: Run, piece: Piece) -> torch.Tensor:
        found = run.in_place(piece)
        if found is not None and found.device == self._device:
            return found
        staged = torch.empty(piece.size, dtype=torch.uint8, device=self._device)
        if found is not None:
            staged.copy_(found)
            return staged
        gathered = torch.empty(piece.size, dtype=torch.uint8)
        run.copy(piece, gathered)
        return staged.copy_(gathered)

    def _complete(self, work: Any) -> None:
        what, turn = f"a piece over lane {self._store.lane}", self._store.peer
        try:
            looked_for(work.is_completed, self._interrupted, LOOK_S, self._pace.deadline_s, what, turn)
        except WaitExpired:
            reason = f"nothing moved on {self._device} for {self._pace.deadline_s:.0f} s, or the peer left"
            raise TransferError(reason) from None
        # Of a work that failed both libraries say that it is completed, and what it was to fill holds anything.
        if (error := work.exception()) is not None:
            raise TransferError(f"{what} failed on {self._device}: {error}")
