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
"""What a kind of device computes in, and how far it may be from float64 then: NPUs multiply no float64 matrices."""


@pytest.fixture
def device(accelerator: Device) -> Iterator[Device]:
    """With a process group of this process alone."""
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
def test_a_rank_on_a_device_finds_the_weights_of_the_cpu(
    gather: Literal["step", "pass"], device: Device, model: Path
) -> None:
    options, loss = fsdp_rank.OPTIONS, Objective(kl=Kl(1e-3))
    dtype, near = DTYPES[device.kind]
    engine = FsdpTrainer(
        model,
        device,
        options,
        loss,
        fsdp=FsdpOptions(gather=gather, dtype=dtype),
        temperature=1.0,
    )
    plain = TorchTrainer(load_model(model, dtype=torch.float64), options, loss, temperature=1.0)
    metrics = [fsdp_rank.train(one, 0, STEPS) for one in (engine, plain)]
    found, expected = engine.parameters(), plain.parameters()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert float((found[name].cpu() - tensor).abs().max()) < near, name
    for mine, theirs in zip(*metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=near, abs=1e-3 * near)
    assert device.memory().used_bytes > 0
