"""Compiled decode steps: the same answers as uncompiled ones, and a single compilation; or a refusal."""

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
from flowrt.roles.engine_setup import rollout_engine
from flowrt.transport.weights.snapshot import Snapshot
from tests.decoders import COMMON, DECODERS

EOS, TOKENS = 1, 40
LENGTHS = (5, 9, 3, 9, 30, 5, 4, 70, 6)
NO_RECOMPILATION = torch._dynamo.config.patch(error_on_recompile=True)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # torch.compile triggers warnings that it ignores itself
    pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU"),
]


WIDE = "qwen3 of width 64"
"""The head width equals the initial length of a cache: PyTorch must not unify the two sizes."""


def build(name: str, seed: int = 0) -> Any:
    if name == WIDE:
        model_class, config = Qwen3ForCausalLM, Qwen3Config(**COMMON, head_dim=64)
    else:
        model_class, config = copy.deepcopy(DECODERS[name])
    torch.manual_seed(seed)
    config._attn_implementation = "sdpa"
    return model_class(config).float().eval()


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
    """Answers to prompts that are added ``arrivals`` at a time while others run; the last one runs by itself."""
    todo, done = prompts(), dict[int, Response]()
    while todo or engine.running:
        count = min(engine.room, len(todo), arrivals)
        engine.add(todo[:count])
        todo = todo[count:]
        done |= {response.key: response for response in engine.run(threading.Event())}
    return done


def assert_same(actual: dict[int, Response], expected: dict[int, Response]) -> None:
    assert actual.keys() == expected.keys()
    for key, response in expected.items():
        assert torch.equal(actual[key].tokens, response.tokens)
        assert actual[key].spans == response.spans
        torch.testing.assert_close(actual[key].logprobs, response.logprobs, atol=2e-5, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen2", "gpt2", WIDE])
def test_compiled_answers_equal_uncompiled_ones_without_recompilation(name: str) -> None:
    """With heads that share keys, and with heads of separate keys. 64 positions are not enough: caches grow."""
    engine = engine_of(build(name), 8, compiled=True)
    for arrivals in (8, 1, 3):
        with NO_RECOMPILATION:
            responses = answers(engine, arrivals)
        assert_same(responses, answers(engine_of(build(name), 8, compiled=False), arrivals))


@pytest.mark.long
def test_a_single_compiled_row_repeats_bit_for_bit() -> None:
    engine = engine_of(build("qwen2"), 1, compiled=True)
    with NO_RECOMPILATION:
        first, second = answers(engine, 1), answers(engine, 1)
    assert all(torch.equal(first[key].logprobs, second[key].logprobs) for key in first)
    assert_same(first, answers(engine_of(build("qwen2"), 1, compiled=False), 1))


class After:
    """An interrupt that is set at the N-th poll: the engine returns after N steps."""

    def __init__(self, count: int) -> None:
        self._left = count

    def is_set(self) -> bool:
        self._left -= 1
        return self._left <= 0

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def answers_across_swaps(engine: TorchRollout) -> dict[int, Response]:
    """Two in-flight swaps, each to a second copy of the model that was prepared before."""
    engine.add(prompts())
    done = {response.key: response for response in engine.run(After(3))}
    for version in (1, 2):
        snapshot = Snapshot.take(version, named_parameters(build("qwen2", seed=version)))
        while (work := engine.prepare(snapshot)) is not None:
            work()
            done |= {response.key: response for response in engine.run(After(2))}
        engine.swap(snapshot)
        done |= {response.key: response for response in engine.run(After(3))}
    while engine.running:
        done |= {response.key: response for response in engine.run(threading.Event())}
    return done


def test_an_in_flight_swap_to_a_second_copy_causes_no_recompilation() -> None:
    engine = engine_of(build("qwen2"), 9, compiled=True)
    with NO_RECOMPILATION:
        responses = answers_across_swaps(engine)
    assert_same(responses, answers_across_swaps(engine_of(build("qwen2"), 9, compiled=False)))
    assert 3 in {len(response.spans) // 2 for response in responses.values()}


def test_a_model_with_other_results_when_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a model whose layers use earlier tokens outside of attention."""
    original = compiled_steps.step_compiled

    def inaccurate(cached: CachedModel, tokens_R: torch.Tensor) -> torch.Tensor:
        return original(cached, tokens_R) * 1.01

    monkeypatch.setattr("flowrt.engines.torch.compile.step_compiled", inaccurate)
    with pytest.raises(EngineError, match=r"Qwen2ForCausalLM cannot be compiled: log-probabilities differ by .* nats"):
        engine_of(build("qwen2"), 4, compiled=True)


@pytest.mark.long
def test_the_configuration_enables_compilation(tmp_path: Path) -> None:
    save_model(build(WIDE), wrap_tokenizer(Arithmetic(0, 0).tokenizer()), tmp_path / "model")
    flags = ["arithmetic", "--model", str(tmp_path / "model"), "--rollout.max-running-requests", "4"]
    compiled, plain = (rollout_engine(parse([*flags, "--rollout.compile", value])) for value in ("True", "False"))
    assert isinstance(compiled, TorchRollout)
    assert isinstance(plain, TorchRollout)
    assert isinstance(compiled._cached, CachedModel)
    assert isinstance(plain._cached, CachedModel)
    assert compiled._cached.step is compiled_steps.step_compiled
    assert plain._cached.step is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("no C++ compiler\nand a long list of attempts"), "no C++ compiler"),
        (AssertionError(), "AssertionError"),
        (FailOnRecompileLimitHit("too many models"), "too many models"),
    ],
)
def test_a_model_that_cannot_be_compiled_is_refused_with_the_reason(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr("flowrt.engines.torch.compile.step_compiled", failing)
    with pytest.raises(EngineError, match=re.escape(f"compiled: {reason}; leave out --rollout.compile")):
        engine_of(build("qwen2"), 4, compiled=True)


def test_unsupported_attention_is_refused_before_compilation() -> None:
    model_class, config = copy.deepcopy(DECODERS["gemma2"])
    config._attn_implementation = "eager"
    with pytest.raises(EngineError, match="its attention is not SDPA"):
        engine_of(model_class(config), 4, compiled=True)
    windowed = MistralForCausalLM(MistralConfig(**COMMON, sliding_window=16, attn_implementation="sdpa"))
    with pytest.raises(EngineError, match="layers without full attention"):
        engine_of(windowed, 4, compiled=True)
    assert windowed.config._attn_implementation == "sdpa"
