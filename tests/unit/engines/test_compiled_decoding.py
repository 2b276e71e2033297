"""Compiled decode steps: the same answers as plain ones, compiled once whatever runs, or refused."""

import copy
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from flowrt.engines.base import Prompt, Response
from flowrt.engines.hf import named_parameters, save_model
from flowrt.engines.stopping import StopConditions
from flowrt.engines.tiny_model import wrap_tokenizer
from flowrt.engines.torch import compile as compiled_steps
from flowrt.engines.torch.cached_model import CachedModel
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.errors import EngineError
from flowrt.recipes.config_io import parse
from flowrt.recipes.tasks.arithmetic import Arithmetic
from flowrt.roles.engines import rollout_engine
from flowrt.transport.weights.snapshot import Snapshot
from tests.decoders import COMMON, DECODERS

EOS, TOKENS = 1, 40
LENGTHS = (5, 9, 3, 9, 30, 5, 4, 70, 6)
COMPILED_NO_MORE = torch._dynamo.config.patch(error_on_recompile=True)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # torch.compile looks at what warns, and ignores the warnings itself
    pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU"),
]


WIDE = "qwen3 of width 64"
"""As wide as a cache has places at first: PyTorch must not take the two for the same."""


def make(name: str, seed: int = 0) -> Any:
    if name == WIDE:
        kind, config = Qwen3ForCausalLM, Qwen3Config(**COMMON, head_dim=64)
    else:
        kind, config = copy.deepcopy(DECODERS[name])
    torch.manual_seed(seed)
    config._attn_implementation = "sdpa"
    return kind(config).float().eval()


def engine_of(model: Any, rows: int, *, compiled: bool) -> TorchRollout:
    return TorchRollout(
        model, stop=StopConditions((EOS,)), rows=rows, max_new_tokens=TOKENS, temperature=1.0, compiled=compiled
    )


def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    return [
        Prompt(key, torch.randint(2, 40, (length,), generator=generator, dtype=torch.int32), 100 + key, key % 2 == 0)
        for key, length in enumerate(LENGTHS)
    ]


def answers(engine: TorchRollout, arrivals: int) -> dict[int, Response]:
    """New prompts join ``arrivals`` at a time while others run; the last of them runs alone."""
    todo, done = prompts(), dict[int, Response]()
    while todo or engine.running:
        count = min(engine.room, len(todo), arrivals)
        engine.add(todo[:count])
        todo = todo[count:]
        done |= {response.key: response for response in engine.run(threading.Event())}
    return done


def assert_same(found: dict[int, Response], wanted: dict[int, Response]) -> None:
    assert found.keys() == wanted.keys()
    for key, response in wanted.items():
        assert torch.equal(found[key].tokens, response.tokens)
        assert found[key].spans == response.spans
        torch.testing.assert_close(found[key].logprobs, response.logprobs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen2", *(pytest.param(name, marks=pytest.mark.long) for name in ("gpt2", WIDE))])
def test_answers_are_those_of_plain_steps_and_nothing_is_compiled_again(name: str) -> None:
    """Two kinds of heads: two that share keys, and one with keys of its own. 64 places are not enough: caches grow."""
    engine = engine_of(make(name), 8, compiled=True)
    for arrivals in (8, 1, 3):
        with COMPILED_NO_MORE:
            found = answers(engine, arrivals)
        assert_same(found, answers(engine_of(make(name), 8, compiled=False), arrivals))


def test_a_row_alone_repeats_bit_for_bit() -> None:
    engine = engine_of(make("qwen2"), 1, compiled=True)
    with COMPILED_NO_MORE:
        first, second = answers(engine, 1), answers(engine, 1)
    assert all(torch.equal(first[key].logprobs, second[key].logprobs) for key in first)
    assert_same(first, answers(engine_of(make("qwen2"), 1, compiled=False), 1))


class Steps:
    """Set after so many looks: the engine comes back after that many steps."""

    def __init__(self, count: int) -> None:
        self._left = count

    def is_set(self) -> bool:
        self._left -= 1
        return self._left <= 0

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def across_swaps(engine: TorchRollout) -> dict[int, Response]:
    """Two swaps in flight, each by a second copy of the model that went ahead."""
    engine.add(prompts())
    done = {one.key: one for one in engine.run(Steps(3))}
    for version in (1, 2):
        snapshot = Snapshot.take(version, named_parameters(make("qwen2", seed=version)))
        while (work := engine.prepare(snapshot)) is not None:
            work()
            done |= {one.key: one for one in engine.run(Steps(2))}
        engine.swap(snapshot)
        done |= {one.key: one for one in engine.run(Steps(3))}
    while engine.running:
        done |= {one.key: one for one in engine.run(threading.Event())}
    return done


def test_a_second_copy_takes_over_in_flight_and_is_not_compiled_again() -> None:
    engine = engine_of(make("qwen2"), 9, compiled=True)
    with COMPILED_NO_MORE:
        found = across_swaps(engine)
    assert_same(found, across_swaps(engine_of(make("qwen2"), 9, compiled=False)))
    assert 3 in {len(one.spans) // 2 for one in found.values()}


def test_what_is_computed_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model would be whose layers do more with what came before than attend to it."""
    right = compiled_steps.step_compiled

    def off(cached: CachedModel, tokens_R: torch.Tensor) -> torch.Tensor:
        return right(cached, tokens_R) * 1.01

    monkeypatch.setattr("flowrt.engines.torch.compile.step_compiled", off)
    with pytest.raises(EngineError, match=r"Qwen2ForCausalLM cannot be compiled: log-probabilities differ by .* nats"):
        engine_of(make("qwen2"), 4, compiled=True)


def test_the_configuration_decides(tmp_path: Path) -> None:
    save_model(make(WIDE), wrap_tokenizer(Arithmetic(0, 0).tokenizer()), tmp_path / "model")
    flags = ["arithmetic", "--model", str(tmp_path / "model"), "--rollout.max-running-requests", "4"]
    compiled, plain = (rollout_engine(parse([*flags, "--rollout.compile", one])) for one in ("True", "False"))
    assert isinstance(compiled, TorchRollout)
    assert isinstance(plain, TorchRollout)
    assert compiled._cached.step is compiled_steps.step_compiled
    assert plain._cached.step is None


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError("no C++ compiler\nand a long list of what was tried"), "no C++ compiler"),
        (AssertionError(), "AssertionError"),
        (FailOnRecompileLimitHit("too many models"), "too many models"),
    ],
)
def test_what_cannot_be_traced_is_refused(error: Exception, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr("flowrt.engines.torch.compile.step_compiled", broken)
    with pytest.raises(EngineError, match=re.escape(f"compiled: {why}; leave out --rollout.compile")):
        engine_of(make("qwen2"), 4, compiled=True)


def test_other_attention_is_refused_before_anything_is_compiled() -> None:
    kind, config = copy.deepcopy(DECODERS["gemma2"])
    config._attn_implementation = "eager"
    with pytest.raises(EngineError, match="its attention is not SDPA"):
        engine_of(kind(config), 4, compiled=True)
    windowed = MistralForCausalLM(MistralConfig(**COMMON, sliding_window=16, attn_implementation="sdpa"))
    with pytest.raises(EngineError, match="layers without full attention"):
        engine_of(windowed, 4, compiled=True)
    assert windowed.config._attn_implementation == "sdpa"
