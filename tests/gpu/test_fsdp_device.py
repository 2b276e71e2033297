"""The FSDP2 engine on an accelerator, against the engine on plain PyTorch on the CPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from flowrt.algorithms.objective import Kl, Objective
from flowrt.engines.fsdp.trainer import FsdpTrainer
from flowrt.engines.hf import load_model
from flowrt.engines.options import Dtype, FsdpOptions
from flowrt.engines.tiny_model import build_model
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.ranks.process_group import init_ranks
from flowrt.transport.devices import Device
from tests.integration.helpers import fsdp_rank

STEPS = 3
DTYPES: dict[str, tuple[Dtype, float]] = {"cuda": ("float64", 1e-6), "npu": ("float32", 1e-4)}
"""Dtype of each kind of device and its tolerance against float64; NPUs do not multiply float64 matrices."""


@pytest.fixture
def device(accelerator: Device) -> Iterator[Device]:
    """The accelerator, with a process group of one process."""
    init_ranks(accelerator, 120.0)
    yield accelerator
    dist.destroy_process_group()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    build_model(
        vocab_size=32, hidden_size=64, layers=2, heads=2, intermediate_size=128, max_length=64, seed=3
    ).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("gather", ["step", "pass"])
def test_training_on_a_device_gives_the_weights_of_the_cpu(
    gather: Literal["step", "pass"], device: Device, model: Path
) -> None:
    options, loss = fsdp_rank.OPTIONS, Objective(kl=Kl(1e-3))
    dtype, tolerance = DTYPES[device.kind]
    engine = FsdpTrainer(
        model,
        device,
        options,
        loss,
        fsdp=FsdpOptions(gather=gather, dtype=dtype),
        temperature=1.0,
    )
    plain = TorchTrainer(load_model(model, dtype=torch.float64), options, loss, temperature=1.0)
    metrics = [fsdp_rank.train(trainer, 0, STEPS) for trainer in (engine, plain)]
    actual, expected = engine.parameters(), plain.parameters()
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert float((actual[name].cpu() - tensor).abs().max()) < tolerance, name
    for mine, theirs in zip(*metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=tolerance, abs=1e-3 * tolerance)
    assert device.memory().used_bytes > 0
