import zlib

import numpy as np
import pytest
import torch

from flowrt.errors import TransferError
from flowrt.transport.weights.delta import BLOCK_BYTES, BlockEncoding, Delta, Record, apply_block
from flowrt.transport.weights.snapshot import Crc32, Snapshot

ANY = float("inf")


def snapshot(version: int, *buckets: np.ndarray) -> Snapshot:
    return Snapshot(
        version, [torch.from_numpy(np.frombuffer(bytearray(bucket.tobytes()), np.uint8)) for bucket in buckets]
    )


def same(first: Snapshot, second: Snapshot) -> bool:
    return first.version == second.version and all(map(torch.equal, first.buckets, second.buckets))


def round_trip(base: Snapshot, new: Snapshot, *, width: int = 2, max_fraction: float = ANY) -> Delta:
    """The delta, encoded and decoded, after a check that it gives the new version and leaves the base unchanged."""
    before = base.checksum()
    delta = Delta.between(base, new, width=width, max_fraction=max_fraction)
    assert delta is not None
    buffers = delta.buffers()
    assert delta.nbytes == sum(buffer.numel() for buffer in buffers)
    assert all(buffer.dtype == torch.uint8 and buffer.numel() for buffer in buffers)
    arrived = Delta.from_buffers([buffer.clone() for buffer in buffers])
    assert same(arrived.apply(base), new)
    assert base.checksum() == before
    return arrived


def adam_steps(learning_rate: float, *, elements: int = 400_000, at_steps: tuple[int, ...]) -> dict[int, Delta]:
    """bf16 copies of fp32 weights ~ N(0, 0.02) before and after some steps of Adam on noisy gradients."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(elements, generator=generator) * 0.02
    scale = torch.exp(torch.randn(elements, generator=generator)) * 1e-5
    signal = torch.randn(elements, generator=generator) * 0.1
    first, second = torch.zeros(elements), torch.zeros(elements)
    deltas = {}
    for step in range(1, max(at_steps) + 1):
        base = Snapshot.take(step - 1, {"weights": weights.bfloat16()})
        gradient = scale * (signal + torch.randn(elements, generator=generator))
        first.mul_(0.9).add_(gradient, alpha=0.1)
        second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        denominator = (second / (1 - 0.999**step)).sqrt() + 1e-8
        weights -= learning_rate * (first / (1 - 0.9**step)) / denominator
        if step in at_steps:
            deltas[step] = round_trip(base, Snapshot.take(step, {"weights": weights.bfloat16()}))
    return deltas


def test_delta_of_an_rl_step_is_below_two_percent() -> None:
    deltas = adam_steps(1e-6, at_steps=(1, 3, 5, 30))
    assert deltas[30].fraction < 0.01
    assert deltas[5].fraction < 0.015
    assert deltas[3].fraction < 0.02
    # The first step of Adam changes every element by the whole learning rate: no encoding gets below 2 %.
    assert deltas[1].fraction < 0.032


def test_delta_without_changes_is_tiny() -> None:
    base = snapshot(3, np.arange(3 * BLOCK_BYTES // 2, dtype=np.uint16))
    delta = round_trip(base, Snapshot(4, base.buckets))
    assert delta.nbytes < 150


@pytest.mark.parametrize("width", [2, 4])
def test_delta_of_all_elements_is_hardly_larger_than_the_version(width: int) -> None:
    random = np.random.default_rng(1)
    base, new = (random.integers(0, 256, 2 * BLOCK_BYTES + 6, dtype=np.uint8) for _ in range(2))
    delta = round_trip(snapshot(1, base), snapshot(2, new), width=width)
    assert delta.nbytes < base.nbytes + 150
    assert Delta.between(snapshot(1, base), snapshot(2, new), width=width) is None


@pytest.mark.parametrize("density", [0.00001, 0.001, 0.03, 0.09, 0.11, 0.13, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("far", [0.0, 0.1, 1.0])
def test_delta_of_any_density_and_difference_is_lossless(density: float, far: float) -> None:
    random = np.random.default_rng(2)
    base = random.integers(0, 2**16, BLOCK_BYTES // 2 + 12_345, dtype=np.uint16)
    steps = random.choice(np.array([1, -1], dtype=np.int16), base.size)
    wild = random.random(base.size) < far
    steps[wild] = random.integers(-400, 400, int(wild.sum()), dtype=np.int16)
    steps[random.random(base.size) >= density] = 0
    round_trip(snapshot(1, base), snapshot(2, base + steps.view(np.uint16)))


def test_delta_keeps_the_bits_of_special_values() -> None:
    bits = np.array([0x7FC0, 0x7FC1, 0xFFC0, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0x8001, 0xFFFF], dtype=np.uint16)
    pairs = np.array([(bit, other) for bit in bits for other in bits], dtype=np.uint16)
    round_trip(snapshot(1, pairs[:, 0]), snapshot(2, pairs[:, 1]))


def test_delta_of_buckets_of_any_size() -> None:
    random = np.random.default_rng(3)
    sizes = [0, 1, 2, 3, 5, BLOCK_BYTES, BLOCK_BYTES - 1, 0, BLOCK_BYTES + 3, 70_001]
    base = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    for width in (2, 4):
        new = [bucket + (random.random(bucket.size) < 0.02).astype(np.uint8) for bucket in base]
        new[1][0] ^= 7
        round_trip(snapshot(1, *base), snapshot(2, *new), width=width)
    round_trip(snapshot(1), snapshot(2))


def test_delta_above_the_maximum_fraction_is_none() -> None:
    random = np.random.default_rng(4)
    base = random.integers(0, 2**16, 200_000, dtype=np.uint16)
    new = base + (random.random(base.size) < 0.05)
    delta = round_trip(snapshot(1, base), snapshot(2, new.astype(np.uint16)))
    for max_fraction, pays in ((delta.fraction * 1.01, True), (delta.fraction * 0.99, False)):
        limited = Delta.between(snapshot(1, base), snapshot(2, new.astype(np.uint16)), max_fraction=max_fraction)
        assert (limited is not None) == pays


def test_given_checksum_is_not_recomputed() -> None:
    base, new = snapshot(1, np.zeros(5000, np.uint16)), snapshot(2, np.eye(1, 5000, 77, dtype=np.uint16))
    delta = Delta.between(base, new, base_checksum=base.checksum(), checksum=new.checksum())
    assert delta is not None
    assert (delta.base_checksum, delta.checksum) == (round_trip(base, new).base_checksum, new.checksum())


def test_wrong_base_raises_with_its_version() -> None:
    base, new = np.arange(5000, dtype=np.uint16), np.arange(5000, dtype=np.uint16)
    new[77] += 1
    delta = round_trip(snapshot(1, base), snapshot(2, new))
    for changed in (77, 4000):
        other = base.copy()
        other[changed] ^= 4
        with pytest.raises(TransferError, match="is not the one that the delta to version 2 starts from"):
            delta.apply(snapshot(1, other))
    with pytest.raises(TransferError, match="starts from version 1"):
        delta.apply(snapshot(3, base))
    with pytest.raises(TransferError, match="starts from version 1"):
        delta.apply(snapshot(1, base[:-1]))
    with pytest.raises(TransferError, match="take both from the same model"):
        Delta.between(snapshot(1, base), snapshot(2, new[1:]))
    with pytest.raises(TransferError, match="with 2 or 4 bytes"):
        Delta.between(snapshot(1, base), snapshot(2, new), width=3)


def test_spare_memory_is_reused_unless_it_is_the_base() -> None:
    base, new = snapshot(1, np.zeros(5000, np.uint16)), snapshot(2, np.eye(1, 5000, 77, dtype=np.uint16))
    delta = round_trip(base, new)
    spare = snapshot(0, np.full(5000, 9, np.uint16))
    result = delta.apply(base, spare)
    assert same(result, new)
    assert result.buckets[0].data_ptr() == spare.buckets[0].data_ptr()
    for useless in (base, Snapshot(0, [base.buckets[0][:]]), snapshot(0, np.zeros(4, np.uint16))):
        with pytest.raises(TransferError, match="cannot make room"):
            delta.apply(base, useless)


def test_buffers_without_a_delta_raise() -> None:
    base, new = snapshot(1, np.zeros(500, np.uint16)), snapshot(2, np.eye(1, 500, 77, dtype=np.uint16))
    head, piece = round_trip(base, new).buffers()
    text = torch.frombuffer(bytearray(b"\0\0\0\0hello"), dtype=torch.uint8)
    for buffers in (
        [],
        [head],
        [head, piece, piece],
        [piece, head],
        [text],
        [head.to(torch.int32), piece],
        [head, head],
    ):
        with pytest.raises(TransferError):
            Delta.from_buffers(buffers)


@pytest.mark.parametrize(
    ("record", "body"),
    [
        (Record(BlockEncoding.GAPS, 2, 2), b"\x05\x60\0\0"),  # position out of bounds
        (Record(BlockEncoding.GAPS, 2, 2), b"\x05\xff\0\0"),  # one position for two changes
        (Record(BlockEncoding.BITMAP, 2), b"\x80" + bytes(12) + b"\0\0"),  # one bit for two changes
        (Record(BlockEncoding.GAPS, 1, 1, 1), b"\x05\0\0\x09"),  # a far byte without a far bit
        (
            Record(form=BlockEncoding.GAPS, changed=1, gap_bytes=1, far=1, words=0),
            b"\x05\0\x80\0",
        ),  # a missing word
    ],
)
def test_block_with_inconsistent_counts_raises(record: Record, body: bytes) -> None:
    elements = np.zeros(100, dtype=np.uint16)
    assert record.body_bytes(100, 2) == len(body)
    with pytest.raises(TransferError):
        apply_block(record, np.frombuffer(body, dtype=np.uint8), elements)
    assert not elements.any()


@pytest.mark.parametrize(
    "record",
    [
        Record(9),
        Record(1, 101),
        Record(1, 5, 101),
        Record(2, 5, 1),
        Record(1, 5, 5, 6),
        Record(form=1, changed=5, gap_bytes=5, far=1, words=2),
    ],
)
def test_impossible_record_raises(record: Record) -> None:
    with pytest.raises(TransferError, match="describes no block"):
        record.body_bytes(100, 2)


@pytest.mark.parametrize("size", [0, 1, 4, 5, 41_678, 41_679, 91_638, 91_639, 91_640, 300_001, 1_000_003])
def test_checksum_equals_that_of_zlib(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    whole = Crc32()
    whole.update(data)
    assert whole.value() == zlib.crc32(data.data)
    pieces = np.split(data, [size // 7, size // 3, size // 3])
    in_pieces = Crc32()
    for piece in pieces:
        in_pieces.update(piece)
    assert in_pieces.value() == zlib.crc32(data.data)
