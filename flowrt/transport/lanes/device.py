"""Lanes between accelerators: one two-rank nccl or hccl group per lane, made on demand.

Both libraries ignore tags and match messages in the order of their issue, which is that of the controller's turns at
both ends. A send that is issued early would occupy the device, so the sender waits until the receiver is ready. Rows in
host memory are staged through device memory chunk by chunk; rows on the device are sent without a copy.

Neither library has waits with a deadline, so completion is polled, and the group is aborted if the peer hangs.

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
from flowrt.runtime.waits import poll_until
from flowrt.transport.buffers import BufferPool
from flowrt.transport.devices import Kind, has_cuda, has_npu, own_index, torch_npu
from flowrt.transport.lanes.channel import (
    MAX_CHUNK_BYTES,
    RECEIVER_RANK,
    SENDER_RANK,
    Chunk,
    ColumnRun,
    SignalStore,
    TransferRateLimit,
    split_run,
)

POLL_S = 0.0002
LIBRARY_TIMEOUT_FACTOR = 4
"""The library's own timeout, which ends the process, as a multiple of the lane's, which only fails the lane."""
_environment = threading.Lock()


class NcclTransport:
    """Opens nccl channels on the CUDA device that is current when this is made, else on this process's own device."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device() if has_cuda() else None

    def open(self, store: SignalStore, sending: bool, rate_limit: TransferRateLimit) -> "DeviceChannel":
        device = _own_index("cuda", store) if self._device is None else self._device
        rank = SENDER_RANK if sending else RECEIVER_RANK
        kind: Any = torch.distributed.ProcessGroupNCCL
        options = kind.Options()
        options._timeout = timedelta(seconds=rate_limit.deadline_s * LIBRARY_TIMEOUT_FACTOR)
        # The current device is per thread.
        torch.cuda.set_device(device)
        with _abort_on_error("TORCH_NCCL_ASYNC_ERROR_HANDLING"):
            group = kind(store, rank, 2, options)
        return DeviceChannel(
            group=group, abort=group.abort, store=store, device=torch.device("cuda", device), rate_limit=rate_limit
        )


class HcclTransport:
    """Opens hccl channels on the NPU that is current when this is made, else on this process's own device."""

    def __init__(self) -> None:
        self._device: int | None = None
        if has_npu():
            self._device = torch_npu().npu.current_device()

    def open(self, store: SignalStore, sending: bool, rate_limit: TransferRateLimit) -> "DeviceChannel":
        device = _own_index("npu", store) if self._device is None else self._device
        rank = SENDER_RANK if sending else RECEIVER_RANK
        kind: Any = torch_npu()._C._distributed_c10d.ProcessGroupHCCL
        options = kind.Options()
        options.is_high_priority_stream = False
        options._timeout = timedelta(seconds=rate_limit.deadline_s * LIBRARY_TIMEOUT_FACTOR)
        options.global_ranks_in_group = [SENDER_RANK, RECEIVER_RANK]
        # The default is 200 MB of buffers per communicator.
        options.hccl_config = {"hccl_buffer_size": MAX_CHUNK_BYTES >> 19}
        torch_npu().npu.set_device(device)
        with _abort_on_error("TORCH_HCCL_ASYNC_ERROR_HANDLING", "HCCL_ASYNC_ERROR_HANDLING"):
            group = kind(store, rank, 2, options)

        def abort() -> None:
            # `abort` is not bound for hccl: Python finds c10d's, which does nothing.
            group.abort_hccl_comm("the lane has ended")

        return DeviceChannel(
            group=group, abort=abort, store=store, device=torch.device("npu", device), rate_limit=rate_limit
        )


def _own_index(kind: Kind, store: SignalStore) -> int:
    try:
        return own_index(kind)
    except ConfigError as error:
        raise TransferError(f"lane {store.lane}: {error}") from None


@contextmanager
def _abort_on_error(variable: str, older: str = "") -> Iterator[None]:
    """Groups made in this block abort their communicator on an error instead of ending the process.

    If the variable has an ``older`` name, a user's setting of either name is kept. nccl's variable has none and is
    overridden, because torchrun sets it.
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
    """One end of a two-rank group; received bytes are copied to host memory."""

    def __init__(
        self,
        group: Any,
        abort: Callable[[], object],
        store: SignalStore,
        device: torch.device,
        rate_limit: TransferRateLimit,
    ) -> None:
        self._group = group
        self._abort: Callable[[], object] | None = abort
        self._store = store
        self._device = device
        self._rate_limit = rate_limit
        self._message = 0
        self._buffers = BufferPool()
        self._interrupted = threading.Event()

    def send(self, runs: Sequence[ColumnRun]) -> None:
        self._store.take(self._ready())
        for run in runs:
            for chunk in split_run(run.sizes, MAX_CHUNK_BYTES):
                self._complete(self._group.send([self._on_device(run, chunk)], RECEIVER_RANK, 0))
                self._rate_limit.moved(chunk.size)

    def receive(self, sizes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        self._store.set(self._ready(), b"1")
        received = []
        for rows in sizes:
            flat = self._buffers.take(sum(rows))
            for chunk in split_run(rows, MAX_CHUNK_BYTES):
                staged = torch.empty(chunk.size, dtype=torch.uint8, device=self._device)
                self._complete(self._group.recv([staged], SENDER_RANK, 0))
                self._rate_limit.moved(chunk.size)
                flat[chunk.start : chunk.start + chunk.size].copy_(staged)
            received.append(flat)
        return received

    def on_idle(self) -> None:
        self._buffers.release_idle()

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        abort = self._abort
        self._abort = None
        self._group = None
        if abort is not None:
            abort()

    def _ready(self) -> str:
        self._message += 1
        return f"ready/{self._message}"

    def _on_device(self, run: ColumnRun, chunk: Chunk) -> torch.Tensor:
        view = run.view(chunk)
        if view is not None and view.device == self._device:
            return view
        staged = torch.empty(chunk.size, dtype=torch.uint8, device=self._device)
        if view is not None:
            staged.copy_(view)
            return staged
        gathered = torch.empty(chunk.size, dtype=torch.uint8)
        run.copy(chunk, gathered)
        return staged.copy_(gathered)

    def _complete(self, work: Any) -> None:
        what = f"a chunk over lane {self._store.lane}"
        deadline_s = self._rate_limit.deadline_s
        try:
            poll_until(work.is_completed, self._interrupted, POLL_S, deadline_s, what, self._store.peer)
        except WaitExpired:
            reason = f"nothing moved on {self._device} for {self._rate_limit.deadline_s:.0f} s, or the peer left"
            raise TransferError(reason) from None
        # Both libraries report failed work as completed, with undefined contents.
        if (error := work.exception()) is not None:
            raise TransferError(f"{what} failed on {self._device}: {error}")
