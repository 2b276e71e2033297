"""Weights in the memory layout that is fastest on a CPU: the same values, before and after a swap."""

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrt.engines.base import Prompt
from flowrt.engines.hf import named_parameters, save_model
from flowrt.engines.stopping import StopConditions
from flowrt.engines.tiny_model import build_model, wrap_tokenizer
from flowrt.engines.torch.rollout import TorchRollout, optimize_layout
from flowrt.recipes.config_io import parse
from flowrt.recipes.tasks.arithmetic import Arithmetic
from flowrt.roles.engine_setup import rollout_engine
from flowrt.transport.weights.snapshot import Snapshot
from tests.decoders import DECODERS


def make_model(seed: int) -> Any:
    sizes = {"hidden_size": 64, "layers": 2, "heads": 4, "intermediate_size": 96, "max_length": 256}
    return build_model(vocab_size=24, seed=seed, **sizes).eval()


def column_major(model: Any) -> dict[str, bool]:
    """For each matrix: whether it is stored column by column."""
    matrices = {name: parameter for name, parameter in model.named_parameters() if parameter.dim() == 2}
    return {name: matrix.stride(0) == 1 and matrix.stride(1) == matrix.shape[0] for name, matrix in matrices.items()}


@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
def test_the_layout_changes_no_output_and_no_weight(name: str) -> None:
    kind, config = copy.deepcopy(DECODERS[name])
    torch.manual_seed(0)
    model = kind(config).eval()
    tokens = torch.randint(40, (3, 9))
    before = model(tokens).logits
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimize_layout(model)
    torch.testing.assert_close(model(tokens).logits, before, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert {name for name, is_column_major in column_major(model).items() if is_column_major} == linear - (
        {"lm_head.weight"} if tied else set()
    )


def test_bfloat16_weights_and_tied_embeddings_keep_their_layout() -> None:
    assert not any(column_major(optimize_layout(make_model(0).bfloat16())).values())
    model = make_model(0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not column_major(optimize_layout(model))["model.embed_tokens.weight"]


@pytest.mark.parametrize("steps", [0, 5])
def test_swapped_weights_have_the_layout_of_the_old_ones(steps: int) -> None:
    """Between sequences, and in flight into the second copy of the model."""
    engine = TorchRollout(
        optimize_layout(make_model(1)), stop=StopConditions((99,)), rows=2, max_new_tokens=9, temperature=1.0
    )
    expected = column_major(engine._cached.model)
    assert sum(expected.values()) == 14
    new = Snapshot.take(1, named_parameters(make_model(2)))
    if steps:
        interrupt = threading.Event()
        interrupt.set()
        engine.add([Prompt(0, torch.tensor([3, 4], dtype=torch.int32), 7)])
        for _ in range(steps):
            engine.run(interrupt)
        while work := engine.prepare(new):
            work()
    engine.swap(new)
    held = engine._cached.model
    assert column_major(held) == expected
    for name, parameter in make_model(2).named_parameters():
        assert torch.equal(dict(held.named_parameters())[name], parameter)
    while engine.running:
        engine.run(threading.Event())


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5), st.sampled_from(["int8", "float32"])), max_size=6))
def test_weights_are_restored_into_transposed_tensors(shapes: list[tuple[int, int, str]]) -> None:
    """After tensors of a narrower dtype, at arbitrary byte offsets."""
    tensors = {str(at): torch.randn(m, n).mul(50).to(getattr(torch, kind)) for at, (m, n, kind) in enumerate(shapes)}
    target = {name: torch.zeros(tensor.shape[::-1], dtype=tensor.dtype).t() for name, tensor in tensors.items()}
    Snapshot.take(1, tensors).restore(target)
    assert all(torch.equal(target[name], tensor) for name, tensor in tensors.items())


def test_a_rollout_worker_optimizes_the_layout_unless_deterministic(tmp_path: Path) -> None:
    save_model(make_model(0), wrap_tokenizer(Arithmetic(0, 0).tokenizer()), tmp_path / "model")
    flags = ["arithmetic", "--model", str(tmp_path / "model"), "--rollout.max-running-requests", "4"]
    fast, exact = (rollout_engine(parse([*flags, "--deterministic", value])) for value in ("False", "True"))
    assert isinstance(fast, TorchRollout)
    assert isinstance(exact, TorchRollout)
    assert any(column_major(fast._cached.model).values())
    assert not any(column_major(exact._cached.model).values())
