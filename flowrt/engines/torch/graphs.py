"""Decode steps as CUDA graphs: a step of a small model is a thousand kernels, which a graph launches at once.

A graph repeats its kernels on the same addresses. So the step works on static inputs, on numbers of rows and of cache
positions from a few sizes, and on a cache at a fixed address: graphs from before it grew are dropped. Rows that are not
in use decode a token at position 0, which a prefill overwrites.

NOT RUN ON A GPU YET: the sizes and inputs are tested with a `Capture` that repeats the step itself.

Shapes: R running sequences, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flowrt.engines.torch.cached_model import GROWTH, CachedModel

Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], object], torch.Tensor]]
"""Captures the kernels of a call. Returns a function that repeats them, and the tensor that the call returned, which
each repetition overwrites."""
WARM_UP_CALLS = 2
"""Calls before a capture, on a separate stream: libraries allocate their workspaces, which a capture forbids."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step and its static tensors: inputs, and logits [R, V]."""

    tokens_R: torch.Tensor
    positions_R: torch.Tensor
    logits_RV: torch.Tensor
    repeat: Callable[[], object]


class GraphedStep:
    """A decode step (`flowrt.engines.torch.cached_model.Step`) that uses a captured graph for each size and cache.

    Args:
        new_pool: returns a `Capture` whose graphs share memory. CUDA frees that memory with the last of them, and
            captures nothing into it after that, so the next graph then gets a new one.
    """

    def __init__(self, new_pool: Callable[[], Capture]) -> None:
        self._new_pool = new_pool
        self._capture: Capture | None = None
        self._graphs: dict[tuple[int, int, int, int], _Graph] = {}

    def __call__(self, cached: CachedModel, tokens_R: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] after these tokens of the cache's first rows, at the positions given to `begin_decode`.

        The next step of the same size overwrites the logits.
        """
        cache, count = cached.cache, len(tokens_R)
        positions_R = cache.positions_R
        assert positions_R is not None
        places = size_at_least(cache.longest, GROWTH)
        cache.reserve(places)
        rows = min(size_at_least(count, 1), cache.rows)
        key = (id(cache), cache.capacity, rows, places)
        graph = self._graphs.get(key)
        if graph is None:
            self._drop_replaced(id(cache), cache.capacity)
            padding = torch.zeros(rows - count, dtype=torch.long, device=cached.device)
            inputs = torch.cat([tokens_R, padding]), torch.cat([positions_R, padding])
            graph = self._graphs[key] = self._make(cached, *inputs, places)
        graph.tokens_R[:count] = tokens_R
        graph.positions_R[:count] = positions_R
        graph.tokens_R[count:] = 0
        graph.positions_R[count:] = 0
        graph.repeat()
        return graph.logits_RV[:count]

    def _make(self, cached: CachedModel, tokens_R: torch.Tensor, positions_R: torch.Tensor, places: int) -> _Graph:
        """Capture the step with these inputs, which become the graph's static inputs.

        The warm-up calls use their initial values.
        """

        def step() -> torch.Tensor:
            cached.cache.begin_decode(positions_R, places)
            return cached.decode_eagerly(tokens_R)

        if self._capture is None or not self._graphs:
            self._capture = self._new_pool()
        repeat, logits_RV = self._capture(step)
        return _Graph(tokens_R, positions_R, logits_RV, repeat)

    def _drop_replaced(self, cache: int, capacity: int) -> None:
        """Drop the graphs of a cache (by its id) from before it grew to this capacity, which replaced its tensors."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] != cache or key[1] == capacity}


def size_at_least(number: int, least: int) -> int:
    """The smallest of the sizes ``least``, 2 ``least``, 4 ``least``, ... that is not below ``number``."""
    size = least
    while size < number:
        size *= 2
    return size


def cuda_capture(device: torch.device) -> Capture:
    """A function that captures CUDA graphs. The graphs share memory, so only one of them may run at a time.

    It captures nothing any more once all its graphs are dropped: the allocators refuse a pool without users (torch's
    `create_or_incref_pool`, also vLLM #28426).
    """
    pool: Any = torch.cuda.graph_pool_handle()

    def capture(call: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_CALLS):
                    call()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads use the device too: an update copies weights while sequences are decoded.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                out = call()
        return graph.replay, out

    return capture
