"""Decode steps from captured graphs: sizes, static inputs and caches, with a capture that repeats the step itself."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrt.engines.base import Prompt, Response
from flowrt.engines.hf import named_parameters
from flowrt.engines.stopping import StopConditions
from flowrt.engines.torch.cached_model import CachedModel
from flowrt.engines.torch.graphs import GraphedStep, _Graph, size_at_least
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.transport.weights.snapshot import Snapshot
from tests.unit.engines.test_inflight_update import After, make_model

NEW_TOKENS = 70  # more than the initial length of a cache
LENGTHS = (5, 9, 3, 9, 60, 5, 4, 90, 6)


class Graph:
    """A stand-in for a graph: repeats a call on its static inputs and overwrites its output."""

    def __init__(self, call: Callable[[], torch.Tensor]) -> None:
        self.out, self._call = call(), call

    def __call__(self) -> None:
        self.out.copy_(self._call())


class Pool:
    """A stand-in for a pool of graphs, which CUDA gives up with the last of them."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self._is_new = True

    def __call__(self, call: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        assert self._is_new or self._graphs, "no graph of the pool is left"
        self._is_new = False
        graph = Graph(call)
        self._graphs.add(graph)
        return graph, graph.out


class CheckedStep(GraphedStep):
    """Fails if a graph is replayed after its cache was replaced; counts the captures."""

    def __init__(self) -> None:
        super().__init__(Pool)
        self.captures = 0

    def _make(self, cached: CachedModel, tokens_R: torch.Tensor, positions_R: torch.Tensor, places: int) -> _Graph:
        graph = super()._make(cached, tokens_R, positions_R, places)
        self.captures += 1
        addresses = addresses_of(cached)

        def repeat() -> None:
            assert addresses_of(cached) == addresses
            graph.repeat()

        return _Graph(graph.tokens_R, graph.positions_R, graph.logits_RV, repeat)


def addresses_of(cached: CachedModel) -> list[int]:
    return [tensor.data_ptr() for layer in cached.cache.layers for tensor in (layer.keys, layer.values)]


def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    return [
        Prompt(key, torch.randint(2, 24, (length,), generator=generator, dtype=torch.int32), 100 + key, key % 2 == 0)
        for key, length in enumerate(LENGTHS)
    ]


def answers(step: GraphedStep | None, *, update: bool, rows: int = 5) -> dict[int, Response]:
    """Answers to prompts that are added two at a time while others run; ``update`` swaps weights in flight."""
    engine = TorchRollout(
        make_model(0), stop=StopConditions((1,)), rows=rows, max_new_tokens=NEW_TOKENS, temperature=1.0
    )
    assert isinstance(engine._cached, CachedModel)
    engine._cached.step = step
    todo, done = prompts(), dict[int, Response]()
    snapshots = [Snapshot.take(version, named_parameters(make_model(version))) for version in (1, 2)] if update else []
    interrupts: list[Any] = [After(4), After(9)]
    while todo or engine.running:
        count = min(engine.room, len(todo), 2)
        engine.add(todo[:count])
        todo = todo[count:]
        done |= {
            response.key: response for response in engine.run(interrupts.pop() if interrupts else threading.Event())
        }
        if snapshots and engine.running:
            while (work := engine.prepare(snapshots[0])) is not None:
                work()
                done |= {response.key: response for response in engine.run(After(2))}
            engine.swap(snapshots.pop(0))
    return done


@pytest.mark.parametrize("update", [False, True])
def test_graphed_steps_give_the_tokens_of_plain_steps(update: bool) -> None:
    step = CheckedStep()
    plain, graphed = answers(None, update=update), answers(step, update=update)
    assert plain.keys() == graphed.keys()
    for key, response in plain.items():
        assert torch.equal(response.tokens, graphed[key].tokens)
        assert float((response.logprobs - graphed[key].logprobs).abs().max()) < 1e-4
        assert response.spans == graphed[key].spans
    # Sizes of 1, 2, 4 and all 5 rows, 64, 128 and 256 positions, and two models: few captures for hundreds of steps.
    assert 3 < step.captures <= 4 * 3 * (2 if update else 1)


@pytest.mark.slow
def test_a_single_graphed_row_gives_the_tokens_of_plain_steps() -> None:
    plain, graphed = answers(None, update=False, rows=1), answers(CheckedStep(), update=False, rows=1)
    assert all(torch.equal(response.tokens, graphed[key].tokens) for key, response in plain.items())


@given(st.integers(1, 10_000), st.sampled_from([1, 64]))
def test_graph_sizes_are_powers_of_two_times_the_minimum(number: int, minimum: int) -> None:
    size = size_at_least(number, minimum)
    assert size >= number
    assert size == minimum or size < 2 * number
    assert size % minimum == 0
    assert (size // minimum).bit_count() == 1
