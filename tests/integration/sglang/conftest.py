"""A real SGLang server, if scripts/install_sglang has installed one, and a model with long responses."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrt.engines.base import Prompt, Response
from flowrt.engines.hf import save_model
from flowrt.engines.options import SglangOptions, Truncation
from flowrt.engines.server.engine import ServerRollout
from flowrt.engines.sglang.dialect import sglang_rollout
from flowrt.engines.stopping import StopConditions
from flowrt.engines.tiny_model import build_model, wrap_tokenizer
from flowrt.recipes.tasks.arithmetic import Arithmetic

PYTHON = Path.home() / ".cache/flowrt/sglang-0.5.21/bin/python"
NOT_HERE = f"no SGLang server in {PYTHON.parents[1]}; scripts/install_sglang puts one there"
VOCABULARY = 320
POSITIONS = 512
TEMPERATURE = 0.7
ROWS, LONG, SHORT = 8, 200, 6
START_S = 900.0
"""SGLang starts in half a minute on two idle cores, and takes far longer on a loaded machine."""
REAL_SERVER = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(2 * START_S),
    pytest.mark.skipif(not PYTHON.exists(), reason=NOT_HERE),
]
"""Marks of tests that start SGLang."""


def build(seed: int) -> Any:
    """A model of random weights: one token in VOCABULARY is the end of the response."""
    return build_model(
        vocab_size=VOCABULARY, hidden_size=64, layers=2, heads=2, intermediate_size=128, max_length=POSITIONS, seed=seed
    ).eval()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of seed 0, version 0 of every engine here."""
    path = tmp_path_factory.mktemp("sglang") / "model"
    save_model(build(0), wrap_tokenizer(Arithmetic(0, 0).tokenizer()), path)
    return path


@pytest.fixture(scope="module")
def server_arguments() -> str:
    """Further arguments of the server of `owned`."""
    return "--max-total-tokens 8192"


@pytest.fixture(scope="module")
def owned(checkpoint: Path, server_arguments: str) -> Iterator[ServerRollout]:
    """An engine with its own server, which the other engines of the module share; it has a tokenizer."""
    with owner(checkpoint, stop=("no such text",), arguments=server_arguments) as engine:
        yield engine


@pytest.fixture
def owned_by_parts(checkpoint: Path) -> Iterator[ServerRollout]:
    """Another engine with its own server, which receives new weights in parts."""
    with owner(checkpoint, weights="tensor") as engine:
        yield engine


@contextmanager
def owner(checkpoint: Path, stop: tuple[str, ...] = (), **server_options: Any) -> Iterator[ServerRollout]:
    """An engine with its own server."""
    defaults: dict[str, Any] = {
        "python": str(PYTHON),
        "device": "cpu",
        "dtype": "float32",
        "arguments": "--max-total-tokens 8192",
        "max_server_restarts": 3,
        "start_s": START_S,
    }
    options = SglangOptions(**{**defaults, **server_options})
    engine = engine_of(options, checkpoint, LONG, StopConditions.of(checkpoint, stop))
    try:
        engine.start()
        yield engine
    finally:
        engine.close()


@pytest.fixture
def make_sharing_engine(
    owned: ServerRollout, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ServerRollout]]:
    """Creates engines that share the server of ``owned``, with its key; each starts by sending version 0 again."""
    monkeypatch.setenv("SGLANG_API_KEY", owned.server_key)
    engines: list[ServerRollout] = []

    def create(
        tokens: int = LONG,
        *,
        truncation: Truncation | None = None,
        stop: tuple[str, ...] = (),
        stop_tokens: tuple[int, ...] | None = None,
        model: Path = checkpoint,
        **options: Any,
    ) -> ServerRollout:
        conditions = StopConditions.of(checkpoint, stop)
        if stop_tokens is not None:
            conditions = replace(conditions, token_ids=stop_tokens)
        settings = SglangOptions(url=(owned.url,), **options)
        engine = engine_of(settings, model, tokens, conditions, truncation=truncation)
        engines.append(engine)
        engine.start()
        return engine

    yield create
    for engine in engines:
        engine.close()


def engine_of(
    options: SglangOptions,
    checkpoint: Path,
    tokens: int,
    stop: StopConditions | None = None,
    *,
    truncation: Truncation | None = None,
) -> ServerRollout:
    """An engine that has not started; ``stop``: by default the stop tokens of the checkpoint."""
    return sglang_rollout(
        options,
        checkpoint,
        stop=stop or StopConditions.of(checkpoint),
        rows=ROWS,
        max_new_tokens=tokens,
        temperature=TEMPERATURE,
        truncation=truncation,
        threads=1,
        log_path=checkpoint.parent / "server.log",
    )


def prompts(count: int = ROWS, *, greedy: bool = False) -> list[Prompt]:
    generator = torch.Generator().manual_seed(count)
    return [
        Prompt(key, torch.randint(2, VOCABULARY, (3 + key,), generator=generator, dtype=torch.int32), 7 * key, greedy)
        for key in range(count)
    ]


def drain(engine: ServerRollout) -> list[Response]:
    """All responses, in the order of the prompts."""
    done: list[Response] = []
    while engine.running:
        done += engine.run(threading.Event())
    return sorted(done, key=lambda response: response.key)
