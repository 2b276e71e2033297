"""Compiled layers that FSDP2 has sharded: a constant head width, and a single compilation."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from flowrt.algorithms.objective import Objective
from flowrt.engines.base import TrainingBatch
from flowrt.engines.fsdp.trainer import FsdpTrainer
from flowrt.engines.hf import save_model
from flowrt.engines.options import FsdpOptions, TrainOptions
from flowrt.engines.tiny_model import wrap_tokenizer
from flowrt.engines.training.optimizer import use_fused_adamw
from flowrt.recipes.tasks.arithmetic import Arithmetic
from flowrt.transport.devices import choose
from tests.decoders import DECODERS

SYMBOLS = "torch.fx.experimental.symbolic_shapes"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Path]:
    """A model's directory, for a job of one rank: this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model_class, config = DECODERS["qwen2"]
    torch.manual_seed(0)
    save_model(model_class(config).float(), wrap_tokenizer(Arithmetic(0, 0).tokenizer()), tmp_path / "model")
    yield tmp_path / "model"
    dist.destroy_process_group()


def trainer(checkpoint: Path, dtype: Any, gather: Any) -> FsdpTrainer:
    options = TrainOptions(lr=1e-3, warmup_steps=1, forward_tokens=120, compile=True)
    fsdp = FsdpOptions(dtype=dtype, gather=gather)
    return FsdpTrainer(checkpoint, choose("cpu", 0), options, Objective(), fsdp=fsdp, temperature=1.0)


def batch(seed: int) -> TrainingBatch:
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(2, 40, (length,), generator=generator) for length in (9, 4 + seed, 17)] * 3
    responses = [torch.randint(2, 40, (3 + seed * row,), generator=generator) for row in range(len(prompts))]
    logprobs = [torch.full((len(response),), -3.0) for response in responses]
    advantages_N = torch.randn(len(prompts), generator=generator)
    return TrainingBatch(
        prompts=prompts,
        responses=responses,
        rollout_logprobs=logprobs,
        reference_logprobs=None,
        advantages_N=advantages_N,
        weights_N=torch.ones(len(prompts)),
        groups_N=torch.zeros(len(prompts), dtype=torch.int64),
    )


@pytest.mark.filterwarnings("ignore")  # torch.compile triggers warnings that it ignores itself
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize(("dtype", "gather"), [("bfloat16", "step"), ("float32", "pass")])
@pytest.mark.long
def test_the_head_width_is_compiled_as_a_constant(
    checkpoint: Path,
    caplog: pytest.LogCaptureFixture,
    dtype: Literal["bfloat16", "float32"],
    gather: Literal["step", "pass"],
) -> None:
    """A loop over a symbolic width is several times slower than one over a constant 8."""
    torch._dynamo.reset()  # code that other tests have compiled must not be reused
    engine = trainer(checkpoint, dtype, gather)
    with caplog.at_level(logging.INFO, SYMBOLS):
        for seed in range(2):
            engine.accumulate(batch(seed))
            engine.step()
    symbols = [record.getMessage() for record in caplog.records if "create_symbol" in record.getMessage()]
    assert any("size()" in symbol for symbol in symbols)
    assert not [symbol for symbol in symbols if "head_dim" in symbol]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(2, 6):
            engine.accumulate(batch(seed))
            assert engine.step()["grad_norm"] > 0


def test_the_optimiser_is_fused_on_cpus_and_cuda_and_pytorchs_default_elsewhere(checkpoint: Path) -> None:
    """On accelerators False would mean one operation per parameter."""
    engine = trainer(checkpoint, "float32", "step")
    assert engine._optimizer.defaults["fused"] is True
    assert [use_fused_adamw(kind) for kind in ("cuda", "npu")] == [True, None]
