"""Mixed precision of the torch engine: low-precision passes, float32 masters, and what rollout workers load."""

import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from flowrt.algorithms.objective import Objective
from flowrt.engines.base import Prompt
from flowrt.engines.hf import save_model
from flowrt.engines.options import Dtype, TrainOptions
from flowrt.engines.tiny_model import wrap_tokenizer
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.engines.torch.trainer import MasterParameters, TorchTrainer
from flowrt.recipes.config_io import parse
from flowrt.recipes.tasks.arithmetic import Arithmetic
from flowrt.roles.engine_setup import rollout_engine, train_engine
from flowrt.transport.weights.snapshot import Snapshot
from tests.unit.engines.device_programs import OPTIONS, model, samples
from tests.unit.engines.test_inflight_update import make_model

BF16 = torch.bfloat16


def weight_of(layer: torch.nn.Linear) -> torch.nn.Parameter:
    (weight,) = layer.parameters()
    return weight


def test_small_updates_are_not_lost() -> None:
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    masters = MasterParameters(layer, BF16)
    master = masters.of(weight_of(layer))
    assert (layer.weight.dtype, master.dtype) == (BF16, torch.float32)
    optimizer = torch.optim.SGD([master], lr=1e-4)
    for _ in range(100):
        layer(torch.ones(1, 1, dtype=BF16)).sum().backward()
        assert layer.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
        masters.write()
    assert float(master.detach()) == pytest.approx(0.99, abs=1e-5)
    assert float(layer.weight.detach()) == float(torch.tensor(0.99).to(BF16))
    without_master = torch.ones(1, dtype=BF16)
    for _ in range(100):
        without_master -= 1e-4
    assert float(without_master) == 1.0  # each update is below the rounding of 1


def test_gradients_of_many_passes_are_summed_in_float32() -> None:
    layer = torch.nn.Linear(1, 1, bias=False)
    masters = MasterParameters(layer, BF16)
    for _ in range(1000):
        layer(torch.ones(1, 1, dtype=BF16)).sum().backward()
    grad = masters.of(weight_of(layer)).grad
    assert grad is not None
    assert float(grad) == 1000.0  # in bfloat16 the sum stays at 256


def test_tied_and_frozen_weights_stay_tied_and_frozen() -> None:
    tied = model("gpt2")
    tied.transformer.wpe.weight.requires_grad_(False)
    masters = MasterParameters(tied, BF16)
    assert tied.lm_head.weight is tied.transformer.wte.weight
    assert {parameter.dtype for parameter in tied.parameters()} == {BF16}
    assert not tied.transformer.wpe.weight.requires_grad
    with pytest.raises(KeyError):
        masters.of(tied.transformer.wpe.weight)


def test_bfloat16_training_approximates_float32_training() -> None:
    def trained(narrow: torch.dtype | None, cut: int) -> tuple[dict[str, float], list[torch.Tensor]]:
        trainer = TorchTrainer(model("llama"), OPTIONS, Objective(), temperature=1.0, narrow=narrow)
        batch = samples(0)
        for start in range(0, 12, cut):
            trainer.accumulate(batch.only(range(start, start + cut)))
        gradients: list[torch.Tensor] = []
        trainer.on_gradient = lambda gradient: gradients.append(gradient.clone())
        return trainer.step(), gradients

    (wide, exact), (narrow, near), (_, cut) = trained(None, 12), trained(BF16, 12), trained(BF16, 4)
    assert near[0].dtype == torch.float32
    assert float((near[0] - exact[0]).norm() / exact[0].norm()) < 0.05
    assert float((near[0] - cut[0]).norm() / exact[0].norm()) < 0.02
    assert narrow["nll"] == pytest.approx(wide["nll"], rel=0.01)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_model(make_model(0), wrap_tokenizer(Arithmetic(0, 0).tokenizer()), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("dtype", "rollout", "expected"),
    [
        ("float32", "auto", torch.float32),
        ("float64", "auto", torch.float64),
        ("bfloat16", "auto", BF16),
        ("float32", "bfloat16", BF16),
        ("bfloat16", "float32", torch.float32),
    ],
)
def test_a_version_reaches_a_rollout_worker_of_any_dtype(
    dtype: Dtype, rollout: str, expected: torch.dtype, checkpoint: Path
) -> None:
    config = parse(["--model", str(checkpoint), "--trainer.dtype", dtype, "--rollout.dtype", rollout])
    engine = cast(TorchTrainer, train_engine(config))
    worker = cast(TorchRollout, rollout_engine(config))
    published = engine.parameters()
    assert {tensor.dtype for tensor in published.values()} == {getattr(torch, dtype)}
    with torch.no_grad():
        for tensor in published.values():
            tensor.mul_(1.5)
    worker.swap(Snapshot.take(3, published))
    held: dict[str, Any] = dict(worker._cached.model.named_parameters())
    for name, tensor in published.items():
        assert held[name].dtype == expected
        assert torch.equal(held[name], tensor.to(expected)), name
    worker.add([Prompt(0, torch.tensor([3, 4, 5], dtype=torch.int32), 1)])
    (response,) = worker.run(threading.Event())
    assert response.spans[0] == 3
    assert bool((response.logprobs <= 0).all())


def test_an_exported_model_has_the_master_weights(checkpoint: Path, tmp_path: Path) -> None:
    config = parse(["--model", str(checkpoint), "--trainer.dtype", "bfloat16"])
    engine = cast(TorchTrainer, train_engine(config))
    with torch.no_grad():
        for parameter in engine._parameters:
            parameter.add_(1e-6)
    engine.export(tmp_path / "final")
    exported = type(engine.model).from_pretrained(tmp_path / "final", dtype=torch.float32)
    for mine, theirs in zip(engine._parameters, exported.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_float32_training_has_no_master_copies() -> None:
    trainer = TorchTrainer(model("llama"), TrainOptions(), Objective(), temperature=1.0, narrow=torch.float32)
    assert trainer._masters is None
    assert all(own is other for own, other in zip(trainer._parameters, trainer.model.parameters(), strict=True))
