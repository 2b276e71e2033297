"""A worker's tensors by (column, id): what it made, what it fetched, and what is on its way here."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from flowrt.errors import LocalProtocolError
from flowrt.wire.records import Column, Part

Key = tuple[str, int]


@dataclass(slots=True)
class _Shared:
    """Memory that several stored tensors are views of."""

    size: int
    live_bytes: int
    keys: set[Key]


class TensorStore:
    """Lives on the event loop's thread. Readers get the stored tensors themselves and may keep them."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = {column.name: column for column in columns}
        self._tensors: dict[Key, torch.Tensor] = {}
        self._arriving: dict[Key, asyncio.Future[None]] = {}
        self._shared: dict[int, _Shared] = {}  # by address
        self._thinned: set[int] = set()  # addresses of shared memory of which something was dropped just now

    def put(self, column: str, item: int, tensor: torch.Tensor) -> None:
        """Keep a 1-D tensor. Raises LocalProtocolError when its dtype or shape is not the column's."""
        self.check(column, (tensor,))
        key = column, item
        self._drop(key)
        self._move_out()
        self._tensors[key] = tensor
        memory = tensor.untyped_storage()
        if memory.nbytes() != tensor.nbytes:
            shared = self._shared.setdefault(memory.data_ptr(), _Shared(memory.nbytes(), 0, set()))
            shared.keys.add(key)
            shared.live_bytes += tensor.nbytes

    def _drop(self, key: Key) -> None:
        tensor = self._tensors.pop(key, None)
        shared = None if tensor is None else self._shared.get(tensor.untyped_storage().data_ptr())
        if tensor is not None and shared is not None and key in shared.keys:
            shared.keys.remove(key)
            shared.live_bytes -= tensor.nbytes
            self._thinned.add(tensor.untyped_storage().data_ptr())

    def _move_out(self) -> None:
        """One row must not keep a whole packet in memory: what is left of one that was mostly dropped moves out."""
        for address in self._thinned:
            shared = self._shared[address]
            if shared.live_bytes * 2 < shared.size:
                for one in shared.keys:
                    self._tensors[one] = self._tensors[one].clone()
                del self._shared[address]
        self._thinned.clear()

    def check(self, column: str, tensors: Iterable[torch.Tensor]) -> None:
        """Raises LocalProtocolError when one of these is not what the column takes."""
        dtype = self.dtype(column)
        for tensor in tensors:
            if tensor.dtype != dtype or tensor.dim() != 1:
                raise LocalProtocolError(
                    f"column {column!r} takes 1-D {dtype}, not {tensor.dim()}-D {tensor.dtype}; convert it first"
                )

    def dtype(self, column: str) -> torch.dtype:
        try:
            found = getattr(torch, self._columns[column].dtype)
        except KeyError:
            raise LocalProtocolError(
                f"there is no tensor column {column!r}; the recipe has {sorted(self._columns)}"
            ) from None
        assert isinstance(found, torch.dtype)
        return found

    def scope(self, column: str) -> str:
        return self._columns[column].scope

    def get(self, column: str, item: int) -> torch.Tensor:
        """A tensor that is here. Raises LocalProtocolError when it is not."""
        try:
            return self._tensors[column, item]
        except KeyError:
            raise LocalProtocolError(f"{column} of {item} is not in this worker's store") from None

    def expect(self, parts: Iterable[Part], arrival: asyncio.Future[None]) -> None:
        """These tensors come with ``arrival``; a copy that is here already is void from now on."""
        for part in parts:
            for item in part.ids:
                self._drop((part.column, item))
                self._arriving[part.column, item] = arrival
        self._move_out()

    def arrive(self, column: str, item: int, tensor: torch.Tensor, arrival: asyncio.Future[None]) -> None:
        """It is here; kept unless it was freed on its way or is expected anew."""
        if self._arriving.get((column, item)) is arrival:
            del self._arriving[column, item]
            self.put(column, item, tensor)

    def fail(self, parts: Iterable[Part], arrival: asyncio.Future[None]) -> None:
        """It will not come."""
        for part in parts:
            for item in part.ids:
                if self._arriving.get((part.column, item)) is arrival:
                    del self._arriving[part.column, item]

    def missing(self, parts: Iterable[Part]) -> tuple[Part, ...]:
        """Of these parts, what is not here."""
        found = []
        for part in parts:
            rows = [
                row for row in zip(part.ids, part.lengths, strict=True) if (part.column, row[0]) not in self._tensors
            ]
            if rows:
                ids, lengths = zip(*rows, strict=True)
                found.append(Part(part.column, ids, lengths))
        return tuple(found)

    async def wait_for(self, parts: Iterable[Part]) -> None:
        """Return when all these tensors are here. Raises what their transfer raised."""
        arrivals = {
            self._arriving[part.column, item]
            for part in parts
            for item in part.ids
            if (part.column, item) in self._arriving
        }
        if arrivals:
            # Not gather: a waiter that is cancelled must not cancel the arrival that others wait for.
            await asyncio.wait(arrivals)
        for arrival in arrivals:
            arrival.result()

    def free(self, columns: Sequence[str], slots: Iterable[int], groups: Iterable[int]) -> None:
        """Drop columns (none named: all) of these slots and groups."""
        for name in columns or list(self._columns):
            for item in slots if self.scope(name) == "slot" else groups:
                self._drop((name, item))
                self._arriving.pop((name, item), None)
        self._move_out()

    def statistics(self) -> tuple[int, int]:
        """Tensors held and their bytes."""
        return len(self._tensors), sum(tensor.nbytes for tensor in self._tensors.values())
