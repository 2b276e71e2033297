"""Tensor stores and snapshots: exact bytes, named errors."""

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrt.errors import LocalProtocolError, TransferError
from flowrt.protocol.messages import Column, Part
from flowrt.transport.tensor_store import TensorStore
from flowrt.transport.weights.snapshot import BUCKET_BYTES, Snapshot, device_of, for_device

DTYPES = ("int32", "float32", "uint8", "int64", "bfloat16", "bool")
COLUMNS = [Column(dtype, dtype, "slot") for dtype in DTYPES]


def random_tensor(dtype: str, length: int) -> torch.Tensor:
    return torch.randint(0, 2, (length,)).to(getattr(torch, dtype))


def test_store_rejects_wrong_dtype_or_shape_unchanged() -> None:
    store = TensorStore(COLUMNS)
    store.put("int32", 1, torch.arange(3, dtype=torch.int32))
    for wrong in (torch.zeros(3), torch.zeros(3, 1, dtype=torch.int32)):
        with pytest.raises(LocalProtocolError, match=r"takes 1-D torch\.int32"):
            store.put("int32", 1, wrong)
    assert store.get("int32", 1).tolist() == [0, 1, 2]
    with pytest.raises(LocalProtocolError, match="no tensor column 'reward'"):
        store.put("reward", 1, torch.zeros(1))


def test_free_drops_by_scope() -> None:
    store = TensorStore([Column("prompt", "int32", "group"), Column("response", "int32", "slot")])
    for column in ("prompt", "response"):
        store.put(column, 1, torch.zeros(2, dtype=torch.int32))
    store.free((), slots=(1,), groups=())
    assert store.statistics() == (1, 8)
    store.free((), slots=(), groups=(1,))
    assert store.statistics() == (0, 0)


async def test_cancelled_waiter_does_not_cancel_the_arrival() -> None:
    store = TensorStore(COLUMNS)
    parts = [Part("int32", (1,), (1,))]
    arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    store.expect(parts, arrival)
    cancelled, remaining = (asyncio.create_task(store.wait_for(parts)) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    store.put_arrived(parts[0], torch.zeros(4, dtype=torch.uint8), arrival)
    arrival.set_result(None)
    await remaining


async def test_rows_freed_before_arrival_are_missing() -> None:
    store = TensorStore(COLUMNS)
    parts = [Part("int32", (1, 2), (1, 1))]
    arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    store.expect(parts, arrival)
    store.free((), slots=(1,), groups=())
    store.put_arrived(parts[0], torch.zeros(8, dtype=torch.uint8), arrival)
    assert store.missing(parts) == (Part("int32", (1,), (1,)),)


@given(st.lists(st.tuples(st.sampled_from(["float32", "bfloat16", "uint8"]), st.integers(0, 33)), max_size=8))
def test_snapshot_restores_the_tensors(shapes: list[tuple[str, int]]) -> None:
    tensors = {str(index): random_tensor(dtype, size) for index, (dtype, size) in enumerate(shapes)}
    snapshot = Snapshot.take(3, tensors)
    checksum = snapshot.checksum()
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    snapshot.restore(target)
    assert all(torch.equal(target[name], tensors[name]) for name in tensors)
    for tensor in tensors.values():  # a snapshot is a copy of the parameters
        tensor.fill_(0)
    assert snapshot.checksum() == checksum


def test_checksum_finds_a_flipped_byte_in_any_bucket() -> None:
    half = BUCKET_BYTES // 2
    tensors = {str(index): torch.full((half + 8,), index, dtype=torch.uint8) for index in range(3)}
    snapshot = Snapshot.take(1, tensors)
    assert snapshot.bucket_bytes() == [half + 8] * 3
    before = snapshot.checksum()
    snapshot.buckets[1][5] += 1
    assert snapshot.checksum() != before


def test_snapshot_of_another_model_raises_and_changes_nothing() -> None:
    target = {"w": torch.ones(4)}
    with pytest.raises(TransferError, match="same checkpoint"):
        Snapshot.take(1, {"w": torch.zeros(5)}).restore(target)
    assert target["w"].tolist() == [1, 1, 1, 1]


def test_cpu_weights_are_copied_without_pinned_memory() -> None:
    """No pinned memory and no stream: the machine may have no accelerator."""
    tensors = {"w": torch.randn(1000, 33), "b": torch.randn(7).bfloat16()}
    snapshot = Snapshot.take(1, tensors)
    assert not any(bucket.is_pinned() for bucket in snapshot.buckets)
    assert for_device(snapshot.buckets[0], device_of(tensors.values())) is snapshot.buckets[0]
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    snapshot.restore(target)
    assert all(torch.equal(target[name], tensors[name]) for name in tensors)
