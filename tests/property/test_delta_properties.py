import zlib

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from flowrt.errors import TransferError
from flowrt.transport.weights.delta import RECORD, BlockEncoding, Delta, Record, apply_block
from flowrt.transport.weights.snapshot import Crc32, Snapshot

ANY = float("inf")
WIDTHS = st.sampled_from([2, 4])
STEPS = st.sampled_from([0, 0, 0, 0, 0, 1, 255, 2, 127, 128])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Snapshot, Snapshot]:
    """Two versions of the same layout: unrelated bytes, or a few steps apart."""
    sizes = draw(st.lists(st.integers(0, 300), min_size=1, max_size=4))
    base = [draw(arrays.arrays(np.uint8, size)) for size in sizes]
    if draw(st.booleans()):
        new = [draw(arrays.arrays(np.uint8, size)) for size in sizes]
    else:
        new = [bucket + draw(arrays.arrays(np.uint8, bucket.size, elements=STEPS)) for bucket in base]
    return tuple(Snapshot(version, list(map(torch.from_numpy, b))) for version, b in ((4, base), (9, new)))  # type: ignore


def delta_of(pair: tuple[Snapshot, Snapshot], width: int) -> Delta:
    delta = Delta.between(*pair, width=width, max_fraction=ANY)
    assert delta is not None
    return delta


@given(pairs(), WIDTHS)
def test_delta_of_any_pair_is_lossless(pair: tuple[Snapshot, Snapshot], width: int) -> None:
    base, new = pair
    before = [bucket.clone() for bucket in base.buckets]
    result = Delta.from_buffers(delta_of(pair, width).buffers()).apply(base)
    assert result.version == new.version
    assert all(map(torch.equal, result.buckets, new.buckets))
    assert all(map(torch.equal, base.buckets, before))


@given(pairs(), WIDTHS)
def test_delta_is_never_much_larger_than_the_full_version(pair: tuple[Snapshot, Snapshot], width: int) -> None:
    base, _ = pair
    full_bytes, buckets = sum(base.bucket_bytes()), len(base.buckets)
    assert delta_of(pair, width).nbytes <= full_bytes + 64 + buckets * (RECORD.itemsize + 12)


@given(pairs(), WIDTHS, st.data())
def test_delta_rejects_any_other_base(pair: tuple[Snapshot, Snapshot], width: int, data: st.DataObject) -> None:
    base, _ = pair
    delta = delta_of(pair, width)
    full = [bucket for bucket in base.buckets if bucket.numel()]
    assume(full)
    bucket = data.draw(st.sampled_from(full))
    bucket[data.draw(st.integers(0, bucket.numel() - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(TransferError, match="is not the one"):
        delta.apply(base)


@given(pairs(), WIDTHS, st.data())
def test_delta_rejects_any_flipped_or_missing_byte(
    pair: tuple[Snapshot, Snapshot], width: int, data: st.DataObject
) -> None:
    buffers = delta_of(pair, width).buffers()
    index = data.draw(st.integers(0, len(buffers) - 1))
    at = data.draw(st.integers(0, buffers[index].numel() - 1))
    if data.draw(st.booleans()):
        buffers[index] = buffers[index][:at]
    else:
        buffers[index] = buffers[index].clone()
        buffers[index][at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(TransferError):
        Delta.from_buffers(buffers)


@given(pairs(), WIDTHS, st.data())
def test_forged_piece_gives_the_right_version_or_raises(
    pair: tuple[Snapshot, Snapshot], width: int, data: st.DataObject
) -> None:
    """Forged bytes with a valid checksum reach the decoder, which must refuse them or return the right version."""
    base, new = pair
    buffers = delta_of(pair, width).buffers()
    index = data.draw(st.integers(1, len(buffers) - 1))
    body = bytearray(buffers[index][4:].numpy().tobytes())
    assume(body)
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    forged = zlib.crc32(body).to_bytes(4, "little") + body
    buffers[index] = torch.frombuffer(bytearray(forged), dtype=torch.uint8)
    try:
        result = Delta.from_buffers(buffers).apply(base)
    except TransferError:
        return
    assert all(map(torch.equal, result.buckets, new.buckets))


@given(
    st.builds(Record, st.sampled_from(list(BlockEncoding)), *[st.integers(0, 40)] * 4),
    st.integers(0, 40),
    st.data(),
    st.sampled_from([np.dtype("<u2"), np.dtype("<u4")]),
)
def test_block_of_any_bytes_stays_in_bounds(
    record: Record, elements: int, data: st.DataObject, type_: np.dtype[np.unsignedinteger]
) -> None:
    output = np.zeros(elements + 20, dtype=type_)
    try:
        size = record.body_bytes(elements, type_.itemsize)
        body = data.draw(arrays.arrays(np.uint8, size))
        apply_block(record, body, output[10 : 10 + elements])
    except TransferError:
        assert not output.any()
    assert not output[:10].any()
    assert not output[10 + elements :].any()


@given(st.lists(st.integers(0, 120_000), max_size=6), st.integers(0, 2**32 - 1))
def test_checksum_does_not_depend_on_the_split(sizes: list[int], seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, sum(sizes), dtype=np.uint8)
    crc = Crc32()
    for piece in np.split(data, np.cumsum(sizes[:-1], dtype=int)) if sizes else []:
        crc.update(piece)
    assert crc.value() == zlib.crc32(data.data)
