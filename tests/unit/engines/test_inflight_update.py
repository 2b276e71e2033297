"""Weights swapped between two tokens: running sequences continue with the new ones, as their spans record."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrt.engines.base import Prompt, Response
from flowrt.engines.hf import named_parameters, save_model
from flowrt.engines.stopping import StopConditions
from flowrt.engines.tiny_model import build_model, wrap_tokenizer
from flowrt.engines.torch.cached_model import FEW_TOKENS, MAX_ROUNDS
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.engines.training.forward import score
from flowrt.recipes.config_io import parse
from flowrt.recipes.tasks.arithmetic import Arithmetic
from flowrt.roles.engine_setup import rollout_engine
from flowrt.transport.weights.snapshot import Snapshot

TOKENS = 24
LENGTHS = (5, 9, 3, 7)


def make_model(seed: int) -> Any:
    return build_model(
        vocab_size=24, hidden_size=64, layers=2, heads=4, intermediate_size=96, max_length=128, seed=seed
    ).eval()


def prompts(greedy: bool) -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    return [
        Prompt(key, torch.randint(2, 24, (length,), generator=generator, dtype=torch.int32), 100 + key, greedy)
        for key, length in enumerate(LENGTHS)
    ]


class After:
    """An interrupt that is set at the N-th poll: the engine returns after N steps."""

    def __init__(self, steps: int) -> None:
        self._steps_left = steps

    def is_set(self) -> bool:
        self._steps_left -= 1
        return self._steps_left <= 0

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def generate(
    first: int, second: int | None, steps: int, greedy: bool = False, recompute: bool = True
) -> dict[int, Response]:
    """Responses by prompt: begin with model ``first``, swap to ``second`` after ``steps`` tokens."""
    engine = TorchRollout(
        make_model(first), stop=StopConditions(), rows=8, max_new_tokens=TOKENS, temperature=1.0, recompute=recompute
    )
    engine.add(prompts(greedy))
    done: dict[int, Response] = {response.key: response for response in engine.run(After(steps))}
    assert not done
    if second is not None:
        engine.swap(Snapshot.take(1, named_parameters(make_model(second))))
    while engine.running:
        done |= {response.key: response for response in engine.run(threading.Event())}
    return done


@pytest.mark.parametrize("steps", [1, 2, 11])
def test_spans_record_the_version_of_each_token(steps: int) -> None:
    for response in generate(1, 2, steps).values():
        assert response.spans == (0, steps, 1, TOKENS - steps)


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("greedy", [True, False])
def test_with_recomputed_keys_later_tokens_follow_only_the_new_weights(steps: int, greedy: bool) -> None:
    old, new = make_model(1), make_model(2)
    todo = prompts(greedy)
    done = generate(1, 2, steps, greedy)
    before = generate(1, None, steps, greedy)
    for prompt in todo:
        response = done[prompt.key]
        assert torch.equal(response.tokens[:steps], before[prompt.key].tokens[:steps])
        (by_old,) = score(old, [prompt.tokens], [response.tokens], 1.0, 10_000)
        (by_new,) = score(new, [prompt.tokens], [response.tokens], 1.0, 10_000)
        torch.testing.assert_close(response.logprobs[:steps], by_old[:steps], atol=1e-5, rtol=0)
        torch.testing.assert_close(response.logprobs[steps:], by_new[steps:], atol=1e-5, rtol=0)
        assert (by_old[steps:] - by_new[steps:]).abs().max() > 0.1


def test_without_recomputation_the_old_keys_are_kept() -> None:
    kept, fresh = generate(1, 2, 7, recompute=False), generate(1, 2, 7, recompute=True)
    assert any(not torch.equal(kept[key].tokens, fresh[key].tokens) for key in kept)
    assert [response.spans for response in kept.values()] == [response.spans for response in fresh.values()]


@pytest.mark.parametrize("recompute", [True, False])
def test_the_configuration_selects_recomputed_or_kept_keys(tmp_path: Path, recompute: bool) -> None:
    """Only with recomputed keys are later log-probabilities those of a forward pass over the whole prefix."""
    old, new, todo = make_model(1), make_model(2), prompts(greedy=False)
    save_model(old, wrap_tokenizer(Arithmetic(0, 0).tokenizer()), tmp_path / "model")
    flags = [
        "arithmetic",
        "--model",
        str(tmp_path / "model"),
        "--rollout.recompute-kv-on-update",
        str(recompute),
        "--rollout.weight-update",
        "in_flight",
    ]
    engine = rollout_engine(
        parse([*flags, "--rollout.max-new-tokens", str(TOKENS), "--rollout.max-running-requests", "8"])
    )
    engine.add(todo)
    engine.run(After(3))
    engine.swap(Snapshot.take(1, named_parameters(new)))
    mixed = []
    while engine.running:
        mixed += [response for response in engine.run(threading.Event()) if len(response.spans) == 4]
    distances = []
    for response in mixed:
        before = response.spans[1]
        (fresh,) = score(new, [todo[response.key].tokens], [response.tokens], 1.0, 10_000)
        distances.append(float((response.logprobs[before:] - fresh[before:]).abs().max()))
    assert len(mixed) >= 2
    assert all(distance < 1e-5 if recompute else distance > 1e-2 for distance in distances), distances


def test_a_swap_prepared_during_generation_leaves_little_to_compute() -> None:
    """Sequences end and begin while a second copy of the model catches up; then it replaces the first."""
    engine = TorchRollout(make_model(1), stop=StopConditions(), rows=9, max_new_tokens=TOKENS, temperature=1.0)
    todo, done = prompts(greedy=False), dict[int, Response]()
    for version, model in enumerate((make_model(2), make_model(3)), 1):
        engine.add(
            [Prompt(prompt.key + 10 * version, prompt.tokens, prompt.seed + version) for prompt in todo][: engine.room]
        )
        engine.run(After(8 if version == 1 else 5))
        snapshot = Snapshot.take(version, named_parameters(model))
        lags: list[int] = []
        while (work := engine.prepare(snapshot)) is not None:
            preparation = threading.Thread(target=work)
            preparation.start()
            done |= {response.key: response for response in engine.run(After(5 - 2 * len(lags)))}
            preparation.join(20.0)
            if not lags:
                engine.add([Prompt(99 + version, todo[0].tokens, 7)])
            lags.append(engine._shadow.lag(engine._sequences()))
        assert 2 <= len(lags) <= MAX_ROUNDS
        assert lags[-1] <= FEW_TOKENS
        assert version == 1 or set(done) == {10, 11, 12, 13}  # they ended during the preparation
        engine.swap(snapshot)
        assert engine.version == version
    while engine.running:
        done |= {response.key: response for response in engine.run(threading.Event())}
    assert len(done) == 10
    assert {response.spans[::2] for response in done.values()} == {(0, 1), (0, 1, 2), (1, 2)}
    for key, response in done.items():
        tokens = todo[0 if key > 90 else key % 10].tokens
        by_version = [score(make_model(1 + number), [tokens], [response.tokens], 1.0, 10_000)[0] for number in range(3)]
        start = 0
        for version, count in zip(response.spans[::2], response.spans[1::2], strict=True):
            recorded, expected = response.logprobs[start : start + count], by_version[version][start : start + count]
            torch.testing.assert_close(recorded, expected, atol=1e-5, rtol=0)
            start += count


@pytest.mark.parametrize("recompute", [True, False])
def test_a_swap_to_the_same_weights_changes_no_token(recompute: bool) -> None:
    swapped, plain = generate(1, 1, 9, recompute=recompute), generate(1, None, 9)
    for key, response in swapped.items():
        assert torch.equal(response.tokens, plain[key].tokens)
        torch.testing.assert_close(response.logprobs, plain[key].logprobs, atol=1e-5, rtol=0)
        assert response.spans == (0, 9, 1, TOKENS - 9)


def test_a_swap_before_the_first_token_leaves_one_span() -> None:
    engine = TorchRollout(make_model(1), stop=StopConditions(), rows=8, max_new_tokens=4, temperature=1.0)
    engine.add(prompts(greedy=True))
    engine.swap(Snapshot.take(5, named_parameters(make_model(2))))
    while engine.running:
        assert all(response.spans == (5, 4) for response in engine.run(threading.Event()))
