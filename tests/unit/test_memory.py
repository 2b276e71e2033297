"""Copies of bytes in host memory: exact, and the memory stays torch's own."""

from collections.abc import Iterator

import pytest
import torch

from flowrt.transport.memory import copy_bytes

SIZE = 10_000


@pytest.fixture(params=[1, 2], autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def some_bytes() -> torch.Tensor:
    return torch.randint(0, 256, (SIZE,), dtype=torch.uint8)


@pytest.mark.parametrize("part", [slice(0, SIZE), slice(3, SIZE - 5), slice(0, 0), slice(0, SIZE, 2)])
def test_what_is_copied_is_the_same_and_nothing_else_changes(part: slice) -> None:
    target, source = some_bytes(), some_bytes()
    expected = target.clone()
    expected[part] = source[part]
    copy_bytes(target[part], source[part])
    assert torch.equal(target, expected)


def test_memory_that_was_copied_can_still_be_resized() -> None:
    """FSDP frees the whole weights of a module by making their memory empty, also after they were published."""
    weights, bucket = torch.randn(SIZE), torch.empty(4 * SIZE, dtype=torch.uint8)
    copy_bytes(bucket, weights.view(torch.uint8))
    copy_bytes(weights.view(torch.uint8), bucket)
    weights.untyped_storage().resize_(0)
    bucket.untyped_storage().resize_(0)


def test_sizes_that_differ_are_refused() -> None:
    target = some_bytes()
    with pytest.raises((ValueError, RuntimeError)):
        copy_bytes(target, some_bytes()[1:])
