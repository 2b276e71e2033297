"""A KV cache with one row per running sequence, for continuous batching with any transformers decoder.

Running sequences occupy the first rows without gaps, so a decode step works on views, never on copies. Each row has its
own length; a mask limits attention to the row's own positions.

Memory uses huge pages (2 MiB) where available. Each token reads all keys and values of its row, a few kilobytes at
addresses too far apart for the TLB with small pages. Linux provides huge pages to aligned memory that asks for them
(madvise); neither malloc nor torch does.
"""

import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

CPU = torch.device("cpu")
PAGE_BYTES = 2 << 20
ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


def zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Zeros with the dtype and device of ``like``; in huge pages if on the CPU and at least one page large."""
    size = math.prod(shape) * like.element_size()
    if ADVICE is None or not like.is_cpu or size < PAGE_BYTES:
        return like.new_zeros(tuple(shape))
    try:
        memory = mmap.mmap(-1, size + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(ADVICE)
    except OSError:  # no huge pages, or out of memory, for which torch has the better error
        return like.new_zeros(tuple(shape))
    buffer = torch.frombuffer(memory, dtype=torch.uint8)  # zero-filled; keeps the mapping alive
    start = -buffer.data_ptr() % PAGE_BYTES
    return buffer[start : start + size].view(like.dtype).view(tuple(shape))


GROWTH = 64
"""Positions by which the capacity grows."""


class _RowLayer(CacheLayerMixin):  # type: ignore[misc]
    """One decoder layer's keys and values: [rows, heads, capacity, head_dim]."""

    def __init__(self, cache: "RowCache") -> None:
        super().__init__()
        self._cache = cache
        self.fresh: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, capacity = self._cache.rows, self._cache.capacity
        self.keys = zeros((rows, key_states.shape[1], capacity, key_states.shape[3]), key_states)
        self.values = zeros((rows, value_states.shape[1], capacity, value_states.shape[3]), value_states)
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        positions = self._cache.positions_R
        if positions is None:  # prefill: rows are assigned by store_prefill
            self.fresh = (key_states, value_states)
            return key_states, value_states
        count, longest = len(positions), self._cache.longest
        places = self._cache.places(self.keys.shape[1])
        for slab, states in ((self.keys, key_states), (self.values, value_states)):
            width = slab.shape[3]
            slab.view(-1, width).index_copy_(0, places, states.reshape(-1, width))
        return self.keys[:count, :, :longest], self.values[:count, :, :longest]

    def store_prefill(self, rows: torch.Tensor, sources: torch.Tensor) -> None:
        """Copy the prefill of prompt ``sources[i]`` into row ``rows[i]``."""
        assert self.fresh is not None
        keys, values = self.fresh
        self.keys[rows, :, : keys.shape[2]] = keys[sources]
        self.values[rows, :, : values.shape[2]] = values[sources]
        self.fresh = None

    def grow(self, capacity: int) -> None:
        if self.is_initialized:
            self.keys, self.values = _grown(self.keys, capacity), _grown(self.values, capacity)

    def move(self, source: int, target: int) -> None:
        self.keys[target].copy_(self.keys[source])
        self.values[target].copy_(self.values[source])

    def pick(self, sources: torch.Tensor) -> None:
        if self.is_initialized:
            self.keys[: len(sources)] = self.keys[sources]
            self.values[: len(sources)] = self.values[sources]

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


def _grown(slab: torch.Tensor, capacity: int) -> torch.Tensor:
    rows, heads, places, width = slab.shape
    larger = zeros((rows, heads, capacity, width), slab)
    larger[:, :, :places] = slab
    return larger


class RowCache(Cache):  # type: ignore[misc]
    """The cache of all layers, and the positions that the next update writes to."""

    def __init__(self, layers: int, rows: int, device: torch.device = CPU) -> None:
        self.rows = rows
        self.device = device
        self.capacity = GROWTH
        self.positions_R: torch.Tensor | None = None
        self.longest = 0
        self.row_index_R = torch.arange(rows, device=device)
        self._places: dict[int, torch.Tensor] = {}
        super().__init__(layers=[_RowLayer(self) for _ in range(layers)])

    def begin_prefill(self, longest: int) -> None:
        """The next update is a prefill of at most ``longest`` tokens a row; `store_prefill` completes it."""
        self.reserve(longest)
        self.positions_R = None

    def begin_decode(self, positions_R: torch.Tensor, longest: int) -> None:
        """The next update writes one token a row at positions [R], or T tokens at positions [R, T].

        ``longest`` is the largest position plus 1.
        """
        self.reserve(longest)
        self.positions_R = positions_R
        self.longest = longest
        self._places.clear()

    def places(self, heads: int) -> torch.Tensor:
        """Flat indices of this step's tokens in a layer with ``heads`` heads, in order of row, head, token."""
        assert self.positions_R is not None
        if heads not in self._places:
            rows = self.row_index_R[: len(self.positions_R), None] * heads + torch.arange(heads, device=self.device)
            places = rows.unsqueeze(2) * self.capacity + self.positions_R.view(len(rows), 1, -1)
            self._places[heads] = places.flatten()
        return self._places[heads]

    def slabs(self, rows: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values of the first rows: lists over layers, [rows, heads, capacity, head_dim] each."""
        return [layer.keys[:rows] for layer in self.layers], [layer.values[:rows] for layer in self.layers]

    def store_prefill(self, rows: torch.Tensor, sources: torch.Tensor) -> None:
        """Copy the prefill of prompt ``sources[i]`` into row ``rows[i]``."""
        for layer in self.layers:
            layer.store_prefill(rows, sources)

    def move(self, source: int, target: int) -> None:
        for layer in self.layers:
            layer.move(source, target)

    def pick(self, sources: list[int]) -> None:
        """Copy row ``sources[i]`` to row i, for all i at once."""
        if sources != list(range(len(sources))):
            for layer in self.layers:
                layer.pick(torch.tensor(sources, device=self.device))

    def reserve(self, length: int) -> None:
        """Grow the capacity to at least ``length`` positions a row."""
        if length > self.capacity:
            self.capacity = -(-length // GROWTH) * GROWTH
            for layer in self.layers:
                layer.grow(self.capacity)
