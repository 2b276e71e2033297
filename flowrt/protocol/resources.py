"""Resources that a worker uses, in a `Report`, packed: the controller passes them on without a look at them.

A record is a MessagePack array in the order of the fields of `ResourceUse`.
"""

from typing import NamedTuple

import msgspec

MAX_RECORD_BYTES = 256
"""Maximum size of a record; a longer one is not passed on."""


class EngineUse(NamedTuple):
    """What a rollout engine has done, and what it has in use."""

    generated: int
    """Number of tokens that it has generated since it was made."""
    cache_tokens: int = 0
    """Tokens of running sequences in its key-value cache."""
    cache_size: int = 0
    """Tokens for which the cache has memory; 0: unknown, or the engine has no cache of fixed size."""
    devices: int = 0
    """Accelerators of processes of its own."""


class ResourceUse(NamedTuple):
    """What a worker used in the time since its last record; sizes are in bytes, at the end of this time."""

    seconds: float
    processors: float
    """Mean number of processors that its process has used."""
    memory: float
    """Resident memory of its process."""
    tokens: int = -1
    """Tokens that it has generated; -1: it does not generate."""
    cache_tokens: int = 0
    cache_size: int = 0
    devices: int = 0
    """Number of accelerators; the following are sums over them."""
    device_allocated: float = 0.0
    """Memory of tensors."""
    device_reserved: float = 0.0
    """Memory that torch holds, with what is free in it."""
    device_total: float = 0.0
    device_use: float = -1.0
    """Mean share of time in which a device computed, from 0 to 1; -1: unknown."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ResourceUse).decode


def pack_use(use: ResourceUse) -> bytes:
    """The record of what a worker used."""
    return _encode(use)


def unpack_use(record: bytes) -> ResourceUse:
    """What a worker used. Raises ValueError for bytes that are no record."""
    return _decode(record)
