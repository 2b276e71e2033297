"""The layout of a snapshot: the bytes of each tensor of the checkpoint."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from flowrt.errors import TransferError
from flowrt.transport.weights.snapshot import Snapshot

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of published weights; all parameters of a version have the same dtype."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the checkpoint; the dtype is torch's name without prefix, such as float32."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Layout:
    """The parameters of a model, in the order in which they are published."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}

    def buckets(self, snapshot: Snapshot) -> list[list[tuple[Parameter, torch.Tensor]]]:
        """The parameters of each bucket with their views of it.

        Raises TransferError if the snapshot is of another model.
        """
        dtype = self._dtype(snapshot)
        remaining = list(self._shapes.items())[::-1]
        buckets = []
        for bucket in snapshot.buckets:
            views: list[tuple[Parameter, torch.Tensor]] = []
            offset = 0
            while offset < bucket.numel() and remaining:
                name, shape = remaining.pop()
                end = offset + math.prod(shape) * dtype.itemsize
                if end > bucket.numel():
                    raise TransferError(f"{name} does not fit into its bucket of version {snapshot.version}")
                parameter = Parameter(name, str(dtype).removeprefix("torch."), shape)
                views.append((parameter, bucket[offset:end].view(dtype).view(shape)))
                offset = end
            buckets.append(views)
        return buckets

    def _dtype(self, snapshot: Snapshot) -> torch.dtype:
        elements, size = sum(map(math.prod, self._shapes.values())), sum(snapshot.bucket_bytes())
        for dtype in DTYPES:
            if elements * dtype.itemsize == size:
                return dtype
        raise TransferError(
            f"version {snapshot.version} has {size} bytes for {elements} parameters; "
            "do trainer and rollout load the same checkpoint?"
        )
