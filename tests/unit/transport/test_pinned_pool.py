"""Pinned memory: of the size of a version, registered once, and used again when nothing views it any more."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flowrt.transport.buffers import PinnedPool
from flowrt.transport.weights import snapshot as snapshots
from flowrt.transport.weights.snapshot import CPU, host_buffer

CUDA = torch.device("cuda")
LAYERS, HIDDEN, KEYS, INNER, VOCABULARY = 28, 3584, 512, 18_944, 152_064
"""Of Qwen2.5-7B."""


class Driver:
    """Registers memory as CUDA does, which refuses what is registered already."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def register(self, address: int, size: int) -> None:
        assert all(address >= at + length or address + size <= at for at, length in [*self.registered.items()])
        self.registered[address] = size


def version_of_7b() -> dict[str, torch.Tensor]:
    layer = {
        "q": (HIDDEN, HIDDEN),
        "k": (KEYS, HIDDEN),
        "v": (KEYS, HIDDEN),
        "o": (HIDDEN, HIDDEN),
        "gate": (INNER, HIDDEN),
        "up": (INNER, HIDDEN),
        "down": (HIDDEN, INNER),
        "norm": (HIDDEN,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"{at}.{name}": shape for at in range(LAYERS) for name, shape in layer.items()
    }
    shapes |= {"embed": (VOCABULARY, HIDDEN), "head": (VOCABULARY, HIDDEN)}
    return {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}


def test_a_version_of_7b_takes_its_own_size_and_later_ones_nothing() -> None:
    driver = Driver()
    pool = PinnedPool(driver.register)
    sizes = [sum(tensor.nbytes for tensor in group) for group in snapshots._grouped(version_of_7b())]
    first = [pool.take(size) for size in sizes]
    assert [buffer.numel() for buffer in first] == sizes
    assert sum(driver.registered.values()) == pool.registered_bytes <= 1.02 * sum(sizes)
    addresses = {buffer.data_ptr() for buffer in first}
    del first
    gc.collect()
    second = [pool.take_idle(size) for size in sizes]
    assert {buffer.data_ptr() for buffer in second if buffer is not None} == addresses
    assert pool.take_idle(sizes[0]) is None
    assert pool.registered_bytes == sum(driver.registered.values())


def test_memory_that_something_views_is_not_handed_out_again() -> None:
    pool = PinnedPool(Driver().register)
    buffer = pool.take(10_000)
    view = buffer[100:200].fill_(7)
    del buffer
    others = [pool.take(10_000).fill_(1) for _ in range(3)]
    assert view.eq(7).all()
    assert len({other.data_ptr() for other in others}) == 3


def test_threads_get_different_memory() -> None:
    driver = Driver()
    pool = PinnedPool(driver.register)
    with ThreadPoolExecutor(8) as threads:
        buffers = list(threads.map(lambda _: pool.take(5000), range(200)))
    assert len({buffer.data_ptr() for buffer in buffers}) == len(driver.registered) == 200


def test_what_cannot_be_registered_is_pinned_by_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(address: int, size: int) -> None:
        raise OSError(f"no {size} bytes at {address}")

    empty = torch.empty
    monkeypatch.setattr(snapshots, "PINNED", PinnedPool(refuse))
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory, **more: empty(*sizes, **more))
    assert host_buffer(100, CUDA).numel() == 100
    assert "no 4096 bytes" in caplog.text
    assert host_buffer(100, CPU).numel() == 100
