"""Copies of bytes."""

import ctypes

import torch


def copy_bytes(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
    """Fill ``target`` with ``source``: uint8 tensors of one shape, on any devices; ``non_blocking`` as torch has it.

    In host memory, where torch has one thread, the C library copies: it needs a fifth less time for large pieces than
    one thread of torch. Not by way of numpy: whatever memory numpy has seen, torch will never resize again, and FSDP
    frees its weights by resizing them.
    """
    if torch.get_num_threads() == 1 and all(one.is_cpu and one.is_contiguous() for one in (target, source)):
        if target.shape != source.shape:
            raise ValueError(f"{tuple(source.shape)} bytes do not fill {tuple(target.shape)}")
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
    else:
        target.copy_(source, non_blocking=non_blocking)
