"""Ranks of an FSDP2 trainer, forked from one process: they execute a plan, on samples that depend on the step only."""

import dataclasses
import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from flowrt.algorithms.losses import AdaptiveKl
from flowrt.algorithms.objective import Kl, Objective
from flowrt.engines.base import TrainingBatch
from flowrt.engines.fsdp import checkpoint, sharding
from flowrt.engines.fsdp.trainer import FsdpTrainer
from flowrt.engines.options import FsdpOptions, LoraOptions, TrainOptions
from flowrt.engines.training.forward import decoder_layers, is_packing_enabled
from flowrt.errors import ConfigError, EngineError
from flowrt.transport.devices import Device
from tests.integration.helpers.forked_ranks import DEADLINE_S, run_ranks

SAMPLES = 24
SAVED_BYTES = 50_000
"""Of one checkpoint file: so small that there are many files, as for a large model."""
MAX_GRAD_NORM = 1.5
"""The norms of some steps are above it, of others below."""
OPTIONS = TrainOptions(
    max_initial_mismatch=0,
    warmup_steps=2,
    schedule="cosine",
    decay_steps=12,
    max_grad_norm=MAX_GRAD_NORM,
    weight_decay=0.1,
)


def samples(step: int) -> TrainingBatch:
    """All samples of a step, the same for every engine and number of ranks."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(1, 20, (SAMPLES, 2), generator=generator).tolist()
    return TrainingBatch(
        prompts=[torch.randint(2, 32, (p,), generator=generator) for p, _ in lengths],
        responses=[torch.randint(2, 32, (r,), generator=generator) for _, r in lengths],
        rollout_logprobs=[-3.5 + 0.3 * torch.randn(r, generator=generator).double() for _, r in lengths],
        reference_logprobs=[-3.5 + 0.3 * torch.randn(r, generator=generator).double() for _, r in lengths],
        advantages_N=torch.randn(SAMPLES, generator=generator).double(),
        weights_N=torch.ones(SAMPLES).double(),
        groups_N=torch.zeros(SAMPLES, dtype=torch.int64),
        ages=[torch.zeros(r, dtype=torch.int64) for _, r in lengths],
    )


def share(step: int, rank: int, ranks: int) -> list[list[int]]:
    """Micro-batches of a rank, uneven as if each pulled at its own speed: in each step another rank gets none."""
    working = [other for other in range(ranks) if ranks == 1 or other != step % ranks]
    if rank not in working:
        return []
    place = working.index(rank)
    mine = [row for row in range(SAMPLES) if (row * row + step) % len(working) == place]
    size = 2 + (step + rank) % 5
    return [mine[start : start + size] for start in range(0, len(mine), size)]


def train(engine: Any, first: int, last: int) -> list[dict[str, float]]:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    metrics = []
    for step in range(first, last):
        batch = samples(step)
        for rows in share(step, rank, ranks):
            engine.accumulate(batch.only(rows))
        metrics.append(engine.step())
    return metrics


def failing(load: Callable[..., Any]) -> Callable[..., Any]:
    """`load_sharded` of a model that fails half-way through a pass over packed samples."""

    def fail(_: Any, __: Any, named: dict[str, Any]) -> None:
        if named.get("packed") is not None:
            raise ValueError("this layer takes no such samples")

    def load_failing(*arguments: Any) -> Any:
        model = load(*arguments)
        decoder_layers(model)[-1].register_forward_pre_hook(fail, with_kwargs=True)
        return model

    return load_failing


def build_engine(order: dict[str, Any], model: Path) -> FsdpTrainer:
    return FsdpTrainer(
        Path(order.get("model", model)),
        Device("cpu"),
        dataclasses.replace(OPTIONS, **order.get("options", {})),
        Objective(kl=Kl(1e-3, adaptive=AdaptiveKl(**order["adaptive"]) if "adaptive" in order else None)),
        fsdp=FsdpOptions(**order.get("fsdp", {})),
        lora=LoraOptions(**order.get("lora", {})),
        temperature=1.0,
    )


def execute(order: dict[str, Any], model: Path) -> None:
    """Build an engine, then load, train, save and export as ordered, and write its weights."""
    load = failing(sharding.load_sharded) if order.get("stops") else sharding.load_sharded
    monkeypatch = pytest.MonkeyPatch()
    if order.get("fused"):
        monkeypatch.setattr("flowrt.engines.training.fused_head.WHOLE_LOGITS", 0)
    with patch.object(sharding, "load_sharded", load):
        engine = build_engine(order, model)
    packed = is_packing_enabled(engine.model)
    unsharded = sum(not isinstance(parameter, DTensor) for parameter in engine.model.parameters())
    compiled = sum(layer._compiled_call_impl is not None for layer in decoder_layers(engine.model))
    calls: list[int] = []  # one for each run of the first layer, in forward and backward passes
    first = next(module for name, module in engine.model.named_modules() if name.endswith(".0.mlp"))
    first.register_forward_pre_hook(lambda *_: calls.append(1))
    if "damaged" in order:
        error = load_error(engine, Path(order["damaged"]))
        Path(order["out"] + f".{dist.get_rank()}.error").write_text(error)
    if "load" in order:
        engine.load(Path(order["load"]))
    if order.get("discard"):
        engine.accumulate(samples(99).only([0, 1, 2]))
        engine.discard()
    if order.get("refused"):
        with pytest.raises(ConfigError) as refused:
            train(engine, *order["steps"])
        Path(order["out"] + f".{dist.get_rank()}.error").write_text(str(refused.value))
        engine._start_step()
    metrics = [] if order.get("refused") else train(engine, *order["steps"])
    monkeypatch.undo()
    if "save" in order:
        with patch.object(checkpoint, "FILE_BYTES", SAVED_BYTES):
            engine.save(Path(order["save"]))
    if "export" in order:
        engine.export(Path(order["export"]))
    Path(order["out"] + f".{dist.get_rank()}.numbers").write_text(json.dumps(engine._passes.numbers))
    weights = engine.parameters()
    if dist.get_rank() == 0:
        copies = {name: tensor.contiguous().clone() for name, tensor in weights.items()}
        save_file(copies, order["out"] + ".safetensors")
        report = {
            "metrics": metrics,
            "calls": len(calls),
            "compiled": compiled,
            "packed": packed,
            "unsharded": unsharded,
        }
        Path(order["out"] + ".json").write_text(json.dumps(report))


def load_error(engine: FsdpTrainer, directory: Path) -> str:
    try:
        engine.load(directory)
    except EngineError as error:
        return str(error)
    return ""


def run_rank(store: dist.Store, rank: int, model: Path, plan: Path) -> None:
    """Run the phases of the plan: each uses only its first ``ranks`` ranks, and the others wait."""
    deadline = timedelta(seconds=DEADLINE_S)
    for number, line in enumerate(plan.read_text().splitlines()):
        phase = json.loads(line)
        if rank < phase["ranks"]:
            own = dist.PrefixStore(f"phase {number}", store)
            dist.init_process_group("gloo", store=own, rank=rank, world_size=phase["ranks"], timeout=deadline)
            for order in phase["orders"]:
                execute(order, model)
            dist.barrier()
            dist.destroy_process_group()
        if rank == 0:
            store.set(f"done {number}", "1")
        store.wait([f"done {number}"], deadline)


def main(ranks: int, model: Path, plan: Path) -> NoReturn:
    torch.set_num_threads(1)
    run_ranks(ranks, lambda store, rank: run_rank(store, rank, model, plan))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
