"""Buckets of a snapshot: their sizes, and tensors larger than a bucket."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrt.transport.weights import snapshot as snapshots
from flowrt.transport.weights.snapshot import Snapshot

SMALL = 100


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "BUCKET_BYTES", SMALL)


def tensors_of(*sizes: int) -> dict[str, torch.Tensor]:
    """Tensors of these sizes in bytes, each with different contents."""
    return {str(index): torch.full((size,), index + 1, dtype=torch.uint8) for index, size in enumerate(sizes)}


def test_bucket_size_suits_lanes_and_relays() -> None:
    assert 64e6 <= snapshots.BUCKET_BYTES <= 256e6


@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [
        ((40, 40, 40, 40), [80, 80]),
        ((50, 50, 1), [100, 1]),
        ((99, 2, 98, 2), [99, 100, 2]),
        ((100, 100), [100, 100]),
    ],
)
@pytest.mark.usefixtures("small")
def test_tensors_fill_buckets_in_order(sizes: tuple[int, ...], buckets: list[int]) -> None:
    assert Snapshot.take(1, tensors_of(*sizes)).bucket_bytes() == buckets


@pytest.mark.usefixtures("small")
def test_large_tensor_has_its_own_bucket() -> None:
    """Tensors are never split: a bucket over the limit holds one tensor and nothing else."""
    assert Snapshot.take(1, tensors_of(10, 250, 10, 10)).bucket_bytes() == [10, 250, 20]


@given(sizes=st.lists(st.integers(1, 2 * SMALL), min_size=1, max_size=12))
def test_buckets_respect_the_limit_and_restore_all_bytes(sizes: list[int]) -> None:
    """Except buckets of a single larger tensor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "BUCKET_BYTES", SMALL)
        tensors = tensors_of(*sizes)
        snapshot = Snapshot.take(1, tensors)
        buckets = snapshot.bucket_bytes()
        assert sum(buckets) == sum(sizes)
        assert [bucket for bucket in buckets if bucket > SMALL] == [size for size in sizes if size > SMALL]
        back = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        snapshot.restore(back)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
