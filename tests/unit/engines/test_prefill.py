"""Prefill in chunks: its results, and its memory at real vocabularies and lengths, by counting elements."""

import threading
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowrt.engines.base import Prompt, Response
from flowrt.engines.hf import named_parameters
from flowrt.engines.stopping import StopConditions
from flowrt.engines.tiny_model import build_model
from flowrt.engines.torch import cached_model
from flowrt.engines.torch.cached_model import CachedModel
from flowrt.engines.torch.descriptor import PREFILL_TOKENS, SCORE_ELEMENTS
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.engines.training.forward import score
from flowrt.transport.weights.snapshot import Snapshot
from tests.decoders import DECODERS
from tests.unit.engines.test_architectures import WINDOWED
from tests.unit.engines.test_inflight_update import After

MODELS = DECODERS | {f"{name}, with windows": output for name, output in WINDOWED.items()}
LENGTHS = (3, 40, 12, 40, 25, 5, 60, 1)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of at most 16 tokens, later pieces of at most 8."""
    monkeypatch.setattr(cached_model, "PREFILL_TOKENS", 16)
    monkeypatch.setattr(cached_model, "SCORE_ELEMENTS", 8 * 60)
    monkeypatch.setattr(cached_model, "MIN_TOKENS", 6)


def tiny(vocab_size: int, max_length: int, seed: int = 0) -> Any:
    return build_model(
        vocab_size=vocab_size,
        hidden_size=16,
        layers=1,
        heads=2,
        intermediate_size=32,
        max_length=max_length,
        seed=seed,
    ).eval()


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[Prompt]:
    """Random prompts; two with the same length are equal."""
    drawn = []
    for key, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(length)
        drawn.append(Prompt(key, torch.randint(2, 24, (length,), generator=generator, dtype=torch.int32), key))
    return drawn


def drain(engine: TorchRollout) -> dict[int, Response]:
    done: dict[int, Response] = {}
    while engine.running:
        done |= {response.key: response for response in engine.run(threading.Event())}
    return done


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation makes; views of its inputs do not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_of((args, kwargs))}
        new = [tensor.numel() for tensor in tensors_of(output) if tensor.untyped_storage().data_ptr() not in given]
        self.elements = max([self.elements, *new])
        return output


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", MODELS)
def test_chunks_and_pieces_give_the_log_probabilities_of_a_full_pass(name: str) -> None:
    model_class, config = MODELS[name]
    torch.manual_seed(0)
    config._attn_implementation = "eager" if "gemma2" in name else "sdpa"
    model = model_class(config).float().eval()
    todo = prompts()
    engine = TorchRollout(model, stop=StopConditions(), rows=8, max_new_tokens=6, temperature=1.0)
    engine.add(todo[:5])
    engine.add(todo[5:])
    done = drain(engine)
    expected = score(model, [prompt.tokens for prompt in todo], [done[prompt.key].tokens for prompt in todo], 1.0, 100)
    for key, logprobs in enumerate(expected):
        torch.testing.assert_close(done[key].logprobs, logprobs, atol=2e-5, rtol=0)


def test_logits_of_a_prefill_are_computed_at_one_position_a_prompt() -> None:
    vocabulary = 262_144
    model = tiny(vocabulary, 300)
    head_rows = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: head_rows.append(logits.shape[:-1].numel()))
    engine = TorchRollout(model, stop=StopConditions(), rows=64, max_new_tokens=1, temperature=1.0)
    engine.add(prompts(tuple(range(1, 257, 4))))
    with LargestTensor() as largest:
        assert len(drain(engine)) == 64
    assert sum(head_rows) == 64
    assert largest.elements <= max(head_rows) * vocabulary <= 1 << 24


@pytest.mark.parametrize(("lengths", "rows"), [((8192,), 1), ((3000, 3000, 2900), 3)])
def test_long_prompts_are_computed_in_pieces(lengths: tuple[int, ...], rows: int) -> None:
    model = tiny(64, 8200)
    engine = TorchRollout(model, stop=StopConditions(), rows=rows, max_new_tokens=1, temperature=1.0)
    engine.add(prompts(lengths))
    with LargestTensor() as largest:
        done = drain(engine)
    assert largest.elements <= SCORE_ELEMENTS
    (expected,) = score(model, [prompts(lengths)[0].tokens], [done[0].tokens], 1.0, 10_000)
    torch.testing.assert_close(done[0].logprobs, expected, atol=2e-5, rtol=0)


def test_a_chunk_has_little_padding() -> None:
    cached = CachedModel(tiny(24, 64), 1)
    for lengths in (range(1, 257), range(100, 1124, 16), [7] * 300, [2000, 2001, 2002], [5000, 5000]):
        left = sorted(lengths)
        padded = 0
        while left:
            count = cached.chunk(left)
            assert count * left[count - 1] <= PREFILL_TOKENS or count == 1
            padded += count * left[count - 1]
            left = left[count:]
        assert padded <= 1.13 * sum(lengths)


@pytest.mark.usefixtures("small_chunks")
def test_a_prefill_is_interrupted_between_pieces_and_begins_again_after_a_swap() -> None:
    """An update between two pieces: all keys and values of the prompt are of the new weights."""
    old, new = tiny(24, 100, seed=1), tiny(24, 100, seed=2)
    engine = TorchRollout(old, stop=StopConditions(), rows=2, max_new_tokens=5, temperature=1.0)
    (prompt,) = prompts((60,))
    engine.add([prompt])
    assert engine.run(After(2)) == []
    assert engine.running == 1
    engine.add(prompts((60, 3))[1:])  # shorter, but after the one that has begun
    engine.swap(Snapshot.take(1, named_parameters(new)))
    response = drain(engine)[0]
    assert response.spans == (1, 5)
    (expected,) = score(tiny(24, 100, seed=2), [prompt.tokens], [response.tokens], 1.0, 100)
    torch.testing.assert_close(response.logprobs, expected, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("small_chunks")
def test_a_catch_up_in_chunks_gives_the_keys_of_the_new_weights() -> None:
    """Sequences begin and end between the chunks of a catch-up; long ones take several."""
    engine = TorchRollout(tiny(24, 200, seed=1), stop=StopConditions(), rows=9, max_new_tokens=60, temperature=1.0)
    todo = prompts()
    engine.add(todo[:4])
    engine.run(After(20))
    engine.add(todo[4:])
    engine.run(After(30))
    snapshot = Snapshot.take(1, named_parameters(tiny(24, 200, seed=2)))
    done: dict[int, Response] = {}
    chunks = 0
    while (work := engine.prepare(snapshot)) is not None:
        work()
        chunks += 1
        if chunks % 5 == 0:
            done |= {response.key: response for response in engine.run(After(1))}
        if chunks == 10:
            engine.add([Prompt(99, todo[1].tokens, 7)])
    assert chunks > 8
    engine.swap(snapshot)
    done |= drain(engine)
    assert len(done) == len(todo) + 1
    assert sum(response.spans[::2] == (0, 1) for response in done.values()) >= 3
    by_version = [tiny(24, 200, seed=1), tiny(24, 200, seed=2)]
    for key, response in done.items():
        tokens = todo[1 if key == 99 else key].tokens
        expected = [score(model, [tokens], [response.tokens], 1.0, 1000)[0] for model in by_version]
        start = 0
        for version, count in zip(response.spans[::2], response.spans[1::2], strict=True):
            part = slice(start, start + count)
            torch.testing.assert_close(response.logprobs[part], expected[version][part], atol=1e-5, rtol=0)
            start += count


def test_a_catch_up_takes_the_memory_of_a_chunk() -> None:
    model = tiny(64, 1100)
    engine = TorchRollout(model, stop=StopConditions(), rows=16, max_new_tokens=20, temperature=1.0)
    engine.add(prompts(tuple(range(1000, 1016))))
    engine.run(After(12))
    snapshot = Snapshot.take(1, named_parameters(tiny(64, 1100, seed=2)))
    chunks = 0
    with LargestTensor() as largest:
        while (work := engine.prepare(snapshot)) is not None:
            work()
            chunks += 1
            engine.run(After(4 if chunks % 8 == 0 else 1))
    engine.swap(snapshot)
    assert chunks >= 8
    assert isinstance(engine._cached, CachedModel)
    cache_elements = engine._cached.cache.layers[0].keys.numel()
    assert largest.elements <= max(cache_elements, PREFILL_TOKENS * 1100)
