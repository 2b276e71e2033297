"""A real vLLM server, if scripts/install_vllm has installed one, and the model of the tests of SGLang."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowrt.engines.hf import save_model
from flowrt.engines.options import Truncation, VllmOptions
from flowrt.engines.server.engine import ServerRollout
from flowrt.engines.stopping import StopConditions
from flowrt.engines.tiny_model import wrap_tokenizer
from flowrt.engines.vllm.dialect import vllm_rollout
from flowrt.recipes.tasks.arithmetic import Arithmetic
from tests.integration.sglang.conftest import LONG, ROWS, START_S, TEMPERATURE, build

PYTHON = Path.home() / ".cache/flowrt/vllm-0.32.0/bin/python"
NOT_HERE = f"no vLLM server in {PYTHON.parents[1]}; scripts/install_vllm puts one there"
REAL_SERVER = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(2 * START_S),
    pytest.mark.skipif(not PYTHON.exists(), reason=NOT_HERE),
]
"""Marks of tests that start vLLM."""
WIDE = Truncation(top_k=64)
"""With it the server is started for responses with a support of 64 tokens."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of seed 0, version 0 of every engine here."""
    path = tmp_path_factory.mktemp("vllm") / "model"
    save_model(build(0), wrap_tokenizer(Arithmetic(0, 0).tokenizer()), path)
    return path


@pytest.fixture(scope="module")
def owned(checkpoint: Path) -> Iterator[ServerRollout]:
    """An engine with its own server, which the other engines of the module share."""
    with owner(checkpoint, truncation=WIDE) as engine:
        yield engine


@contextmanager
def owner(checkpoint: Path, *, truncation: Truncation | None = None, **server_options: Any) -> Iterator[ServerRollout]:
    """An engine with its own server."""
    options = VllmOptions(
        **{"python": str(PYTHON), "device": "cpu", "dtype": "float32", "start_s": START_S, **server_options}
    )
    engine = engine_of(options, checkpoint, LONG, truncation=truncation)
    try:
        engine.start()
        yield engine
    finally:
        engine.close()


@pytest.fixture
def make_sharing_engine(owned: ServerRollout, checkpoint: Path) -> Iterator[Callable[..., ServerRollout]]:
    """Creates engines that share the server of ``owned``; each starts by sending version 0 again."""
    engines: list[ServerRollout] = []

    def create(
        tokens: int = LONG,
        *,
        truncation: Truncation | None = None,
        stop: tuple[str, ...] = (),
        temperature: float = TEMPERATURE,
        **options: Any,
    ) -> ServerRollout:
        engine = engine_of(
            VllmOptions(url=(owned.url,), **options),
            checkpoint,
            tokens,
            StopConditions.of(checkpoint, stop),
            truncation=truncation,
            temperature=temperature,
        )
        engines.append(engine)
        engine.start()
        return engine

    yield create
    for engine in engines:
        engine.close()


def engine_of(
    options: VllmOptions,
    checkpoint: Path,
    tokens: int,
    stop: StopConditions | None = None,
    *,
    truncation: Truncation | None = None,
    temperature: float = TEMPERATURE,
) -> ServerRollout:
    """An engine that has not started; ``stop``: by default the stop tokens of the checkpoint."""
    return vllm_rollout(
        options,
        checkpoint,
        stop=stop or StopConditions.of(checkpoint),
        rows=ROWS,
        max_new_tokens=tokens,
        temperature=temperature,
        truncation=truncation,
        threads=1,
        log_path=checkpoint.parent / "server.log",
    )
