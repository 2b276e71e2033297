"""How a version is cut into buckets: the size that is meant, several below it, and what is larger than a bucket."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrt.transport import weights
from flowrt.transport.weights import Snapshot

SMALL = 100


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "BUCKET_BYTES", SMALL)


def tensors_of(*sizes: int) -> dict[str, torch.Tensor]:
    """A tensor of so many bytes each, none like another."""
    return {str(index): torch.full((size,), index + 1, dtype=torch.uint8) for index, size in enumerate(sizes)}


def test_a_bucket_is_large_enough_for_a_lane_and_small_enough_to_be_passed_on_early() -> None:
    assert 64e6 <= weights.BUCKET_BYTES <= 256e6


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
def test_tensors_are_cut_into_buckets_that_are_filled_in_order(sizes: tuple[int, ...], buckets: list[int]) -> None:
    assert Snapshot.take(1, tensors_of(*sizes)).bucket_bytes() == buckets


@pytest.mark.usefixtures("small")
def test_a_tensor_larger_than_a_bucket_has_one_to_itself() -> None:
    """Tensors are never cut: the only bucket over the limit holds one tensor, and nothing is put in beside it."""
    assert Snapshot.take(1, tensors_of(10, 250, 10, 10)).bucket_bytes() == [10, 250, 20]


@given(sizes=st.lists(st.integers(1, 2 * SMALL), min_size=1, max_size=12))
def test_no_bucket_is_over_the_limit_and_all_bytes_come_back(sizes: list[int]) -> None:
    """But for those that are a single larger tensor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "BUCKET_BYTES", SMALL)
        tensors = tensors_of(*sizes)
        snapshot = Snapshot.take(1, tensors)
        buckets = snapshot.bucket_bytes()
        assert sum(buckets) == sum(sizes)
        assert [bucket for bucket in buckets if bucket > SMALL] == [size for size in sizes if size > SMALL]
        back = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        snapshot.restore(back)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
