"""Copies of bytes in host memory: exact, and torch can still resize the memory."""

from collections.abc import Iterator

import pytest
import torch

from flowrt.transport.buffers import copy_bytes

SIZE = 10_000


@pytest.fixture(params=[1, 2], autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def some_bytes() -> torch.Tensor:
    return torch.randint(0, 256, (SIZE,), dtype=torch.uint8)


@pytest.mark.parametrize("part", [slice(0, SIZE), slice(3, SIZE - 5), slice(0, 0), slice(0, SIZE, 2)])
def test_copy_is_exact_and_changes_nothing_else(part: slice) -> None:
    target, source = some_bytes(), some_bytes()
    expected = target.clone()
    expected[part] = source[part]
    copy_bytes(target[part], source[part])
    assert torch.equal(target, expected)


def test_copied_memory_can_still_be_resized() -> None:
    """FSDP frees the gathered weights of a module by resizing their storage, also after they were published."""
    weights, bucket = torch.randn(SIZE), torch.empty(4 * SIZE, dtype=torch.uint8)
    copy_bytes(bucket, weights.view(torch.uint8))
    copy_bytes(weights.view(torch.uint8), bucket)
    weights.untyped_storage().resize_(0)
    bucket.untyped_storage().resize_(0)


def test_copy_of_different_sizes_raises() -> None:
    target = some_bytes()
    with pytest.raises((ValueError, RuntimeError)):
        copy_bytes(target, some_bytes()[1:])
