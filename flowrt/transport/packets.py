"""Ragged columns as one message: a 16-byte head, then each part's tensors end to end, 8-byte aligned.

Both sides know the layout beforehand (the controller told them ids and lengths), so nothing is padded to a common
length, nothing is parsed, and the receiver's tensors are views of the one buffer that was received.
"""

from collections.abc import Iterable, Iterator

import torch

from flowrt.errors import TransferError
from flowrt.transport.store import TensorStore
from flowrt.wire.records import Part

HEAD_BYTES = 16
_ALIGN = 8


def packet_bytes(store: TensorStore, parts: Iterable[Part]) -> int:
    """Size of the message that carries these parts."""
    return HEAD_BYTES + sum(_padded(sum(part.lengths) * store.dtype(part.column).itemsize) for part in parts)


def pack(store: TensorStore, parts: Iterable[Part], sequence: int) -> torch.Tensor:
    """One uint8 buffer with the tensors of ``parts`` from the store."""
    parts = tuple(parts)
    packet = torch.empty(packet_bytes(store, parts), dtype=torch.uint8)
    packet[:HEAD_BYTES].view(torch.int64).copy_(torch.tensor([sequence, len(packet)]))
    offset = HEAD_BYTES
    for part in parts:
        tensors = [store.get(part.column, item) for item in part.ids]
        for tensor, length in zip(tensors, part.lengths, strict=True):
            if len(tensor) != length:
                raise TransferError(f"column {part.column} has {len(tensor)} elements where {length} were announced")
        flat = torch.cat(tensors) if tensors else torch.empty(0, dtype=store.dtype(part.column))
        packet[offset : offset + flat.nbytes].copy_(flat.view(torch.uint8))
        offset += _padded(flat.nbytes)
    return packet


def unpack(
    store: TensorStore, parts: Iterable[Part], sequence: int, packet: torch.Tensor
) -> list[tuple[str, int, torch.Tensor]]:
    """(column, id, tensor) of all that arrived; tensors are views. Raises TransferError when it is another message."""
    head = packet[:HEAD_BYTES].view(torch.int64).tolist()
    if head != [sequence, len(packet)]:
        raise TransferError(f"received message {head[0]} of {head[1]} bytes in place of {sequence} of {len(packet)}")
    return [
        (part.column, item, tensor)
        for part, flat in _views(store, parts, packet)
        for item, tensor in zip(part.ids, torch.split(flat, list(part.lengths)), strict=True)
    ]


def _views(store: TensorStore, parts: Iterable[Part], packet: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
    offset = HEAD_BYTES
    for part in parts:
        dtype = store.dtype(part.column)
        size = sum(part.lengths) * dtype.itemsize
        yield part, packet[offset : offset + size].view(dtype)
        offset += _padded(size)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
