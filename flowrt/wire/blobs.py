"""Records as bytes that are kept: MessagePack as on the wire, without a tag, checked when they are read again."""

from collections.abc import Hashable
from typing import Any, TypeVar, cast

import msgpack

from flowrt.errors import FlowError
from flowrt.wire.fields import record_decoder, record_encoder
from flowrt.wire.misfit import Misfit

Record = TypeVar("Record")
_pack = msgpack.Packer(use_bin_type=True).pack


def to_blob(record: Any) -> bytes:
    """The fields of a record."""
    data: bytes = _pack(record_encoder(cast(Hashable, type(record)))(record, []))
    return data


def from_blob(kind: type[Record], data: bytes) -> Record:
    """The record that `to_blob` was given. Raises FlowError for anything else."""
    try:
        record: Record = record_decoder(cast(Hashable, kind))(msgpack.unpackb(data, use_list=False), [])
    except (Misfit, ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise FlowError(f"{len(data)} bytes are no {kind.__name__}: {error}") from error
    return record
