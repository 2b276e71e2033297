"""Weights between a device and host memory: through pinned memory, on a stream of their own.

Pinned memory is what a device reads and writes by itself, at the full rate of its link and beside what it computes. On
a CPU nothing of this is done. Written against torch's interface for CUDA, whose names torch_npu has for NPUs; IT HAS
NOT RUN ON A GPU OR AN NPU YET: its tests run where there is one.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from flowrt.transport.devices import torch_npu

CPU = torch.device("cpu")


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The device that some of these are on; the CPU if that is where all of them are."""
    return next((tensor.device for tensor in tensors if tensor.device.type in ("cuda", "npu")), CPU)


def host_buffer(size: int, device: torch.device = CPU) -> torch.Tensor:
    """So many bytes of host memory, for what comes from this device; torch keeps pinned ones warm."""
    if device.type == "cpu":
        # numpy asks the system for huge pages, torch does not: fresh memory is ready in half the time.
        return torch.from_numpy(np.empty(size, dtype=np.uint8))
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def for_device(bucket: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The bucket, or a copy of it in pinned memory, which torch does not use again before the device has read it."""
    return bucket if device.type == "cpu" or bucket.is_pinned() else bucket.pin_memory()


@contextmanager
def copying(device: torch.device) -> Iterator[None]:
    """Around copies with ``non_blocking``: they begin when the device has done what it was told before, at once with
    each other, and whoever leaves has waited for all of them: nobody reads, or changes, what is half copied.
    """
    if device.type == "cpu":
        yield
        return
    module: Any = torch_npu().npu if device.type == "npu" else torch.cuda
    with module.device(device):
        beside = module.Stream()
        beside.wait_stream(module.current_stream())
        with module.stream(beside):
            yield
            done = beside.record_event()
        done.synchronize()
