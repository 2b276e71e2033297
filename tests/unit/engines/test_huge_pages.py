"""Keys and values in huge pages: ordinary zeros, in memory that is released."""

import gc
import re
from pathlib import Path

import pytest
import torch

from flowrt.engines.torch import cached_model
from flowrt.engines.torch.cached_model import PAGE_BYTES, RowCache, zeros

THP_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Exists on Linux systems with transparent huge pages."""


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_zeros_have_the_dtype_and_are_page_aligned(dtype: torch.dtype) -> None:
    like = torch.ones(1, dtype=dtype)
    large = zeros((3, 5, PAGE_BYTES // 8), like)
    assert large.shape == (3, 5, PAGE_BYTES // 8)
    assert large.dtype is dtype
    assert large.is_contiguous()
    assert not large.any()
    assert large.data_ptr() % PAGE_BYTES == 0 or not THP_SETTING.exists()
    large.fill_(1)
    assert int(large.sum(dtype=torch.float64)) == large.numel()
    assert zeros((2, 3), like).tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.skipif(not THP_SETTING.exists(), reason="this system has no huge pages")
def test_huge_pages_are_requested_from_the_system() -> None:
    large = zeros((8, PAGE_BYTES // 4), torch.zeros(1))
    large.fill_(1)
    assert "hg" in flags_of(large.data_ptr())


def flags_of(address: int) -> list[str]:
    """The VmFlags of the mapping that contains this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.skipif(not THP_SETTING.exists(), reason="this system has no huge pages")
def test_memory_without_references_is_released() -> None:
    views = [zeros((32, PAGE_BYTES // 4), torch.zeros(1))[3]]
    before = mapped_bytes()
    assert views[0].sum() == 0  # a view keeps the memory
    views.clear()
    gc.collect()
    assert before - mapped_bytes() >= 32 * PAGE_BYTES


@pytest.mark.parametrize("system", ["has none", "refuses"])
def test_ordinary_memory_is_used_where_huge_pages_are_unavailable(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_model, "ADVICE", None if system == "has none" else -1)
    large = zeros((4, PAGE_BYTES), torch.zeros(1))
    assert large.shape == (4, PAGE_BYTES)
    assert not large.any()


def test_a_growing_cache_keeps_its_contents() -> None:
    with torch.inference_mode():
        cache = RowCache(1, 70)
        layer = cache.layers[0]
        keys, values = torch.randn(2, 70, 2, 60, 64)
        cache.begin_prefill(range(70), 60)
        layer.update(keys, values)
        cache.reserve(200)
        assert layer.keys.shape == layer.values.shape == (70, 2, 256, 64)
        assert torch.equal(layer.keys[:, :, :60], keys)
        assert torch.equal(layer.values[:, :, :60], values)
        assert not layer.keys[:, :, 60:].any()
        assert layer.keys.data_ptr() % PAGE_BYTES == 0 or not THP_SETTING.exists()
