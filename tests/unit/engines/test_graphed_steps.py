"""Decode steps from captured graphs: sizes, static inputs and caches, with a capture that repeats the step itself."""

import threading
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

NEW = 70  # more than a cache has places at first
LENGTHS = (5, 9, 3, 9, 60, 5, 4, 90, 6)


def repeated(call: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
    """As a graph does: repeats the call on its static inputs, and rewrites its output."""
    out = call()
    return lambda: out.copy_(call()), out


class Watched(GraphedStep):
    """Fails if a graph is repeated after its cache was replaced; counts the captures."""

    def __init__(self) -> None:
        super().__init__(repeated)
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
    return [slab.data_ptr() for layer in cached.cache.layers for slab in (layer.keys, layer.values)]


def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    return [
        Prompt(key, torch.randint(2, 24, (length,), generator=generator, dtype=torch.int32), 100 + key, key % 2 == 0)
        for key, length in enumerate(LENGTHS)
    ]


def answers(step: GraphedStep | None, *, update: bool, rows: int = 5) -> dict[int, Response]:
    """Prompts join two at a time while others run; with ``update``, the weights change while they do."""
    engine = TorchRollout(make_model(0), stop=StopConditions((1,)), rows=rows, max_new_tokens=NEW, temperature=1.0)
    engine._cached.step = step
    todo, done = prompts(), dict[int, Response]()
    snapshots = [Snapshot.take(one, named_parameters(make_model(one))) for one in (1, 2)] if update else []
    looks: list[Any] = [After(4), After(9)]
    while todo or engine.running:
        count = min(engine.room, len(todo), 2)
        engine.add(todo[:count])
        todo = todo[count:]
        done |= {one.key: one for one in engine.run(looks.pop() if looks else threading.Event())}
        if snapshots and engine.running:
            while (work := engine.prepare(snapshots[0])) is not None:
                work()
                done |= {one.key: one for one in engine.run(After(2))}
            engine.swap(snapshots.pop(0))
    return done


@pytest.mark.parametrize("update", [False, True])
def test_graphs_give_the_tokens_of_plain_steps(update: bool) -> None:
    step = Watched()
    plain, graphed = answers(None, update=update), answers(step, update=update)
    assert plain.keys() == graphed.keys()
    for key, one in plain.items():
        assert torch.equal(one.tokens, graphed[key].tokens)
        assert float((one.logprobs - graphed[key].logprobs).abs().max()) < 1e-4
        assert one.spans == graphed[key].spans
    # Sizes of 1, 2, 4 and all 5 rows, 64, 128 and 256 places, and two models: few captures for hundreds of steps.
    assert 3 < step.captures <= 4 * 3 * (2 if update else 1)


@pytest.mark.slow
def test_a_single_row_is_graphed_too() -> None:
    plain, graphed = answers(None, update=False, rows=1), answers(Watched(), update=False, rows=1)
    assert all(torch.equal(one.tokens, graphed[key].tokens) for key, one in plain.items())


@given(st.integers(1, 10_000), st.sampled_from([1, 64]))
def test_sizes_are_few_and_at_most_twice_as_large(number: int, least: int) -> None:
    size = size_at_least(number, least)
    assert size >= number
    assert size == least or size < 2 * number
    assert size % least == 0
    assert (size // least).bit_count() == 1
