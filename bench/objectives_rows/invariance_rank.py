"""One rank under torchrun: the gradients of a step of methods, by the engines on two ranks, then on one.

invariance_rank.py MODEL OUT NAME ...       writes OUT.safetensors and OUT.json: gradients and losses by method
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from flowrt.algorithms.algorithm import Algorithm
from flowrt.engines.fsdp.trainer import FsdpTrainer
from flowrt.engines.options import FsdpOptions
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.transport.devices import Device
from objectives_rows.presets import presets
from objectives_rows.steps import GROUPS, LIMIT, TEMPERATURE, make_model, make_step, options, run_step

DEADLINE_S = 240.0
Gather = Literal["step", "pass"]


def cuts(rank: int, ranks: int) -> list[list[int]]:
    """Groups of each micro-batch of a rank: uneven shares, one rank cut finer than the other."""
    if ranks == 1:
        return [[0, 1], list(range(2, GROUPS))]
    return [[0, 1]] if rank == 0 else [[group] for group in range(2, GROUPS)]


def torch_engine(algorithm: Algorithm) -> tuple[list[Tensor], float]:
    model = make_model()
    batch = make_step(model).batch(algorithm)
    engine = TorchTrainer(model, options(forward_tokens=40), algorithm, temperature=TEMPERATURE)
    seen: list[Tensor] = []
    engine.on_gradient = lambda gradient: seen.append(gradient.clone())
    metrics = run_step(engine, batch, cuts(dist.get_rank(), dist.get_world_size()))
    return seen, metrics["loss"]


def fsdp_engine(algorithm: Algorithm, model: Path, gather: Gather) -> tuple[list[Tensor], float]:
    batch = make_step(make_model()).batch(algorithm)
    engine = FsdpTrainer(
        model,
        Device("cpu"),
        options(forward_tokens=40),
        algorithm,
        fsdp=FsdpOptions(dtype="float64", gather=gather),
        temperature=TEMPERATURE,
    )
    seen: list[Tensor] = []

    def keep(optimizer: Any, *_: Any) -> None:
        """The reduced gradients, as the optimiser is about to use them."""
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        seen.append(torch.cat([whole(parameter).flatten() for parameter in parameters]))

    engine._optimizer.register_step_pre_hook(keep)
    metrics = run_step(engine, batch, cuts(dist.get_rank(), dist.get_world_size()))
    return seen, metrics["loss"]


def whole(parameter: Tensor) -> Tensor:
    """The gradient of a parameter, of all ranks' shards."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    full: Tensor = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return full.clone()


def main(model: Path, out: Path, names: list[str]) -> None:
    store, rank, ranks = next(dist.rendezvous("env://"))
    algorithms = presets(LIMIT)
    gradients: dict[str, Tensor] = {}
    losses: dict[str, dict[str, float]] = {name: {} for name in names}

    def keep(name: str, way: str, found: tuple[list[Tensor], float]) -> None:
        losses[name][way] = found[1]
        gradients.update({f"{name}/{way}/{at:03}": gradient for at, gradient in enumerate(found[0])})

    for phase, size in enumerate((ranks, 1)):
        if rank < size:
            own = dist.PrefixStore(f"phase {phase}", store)
            deadline = timedelta(seconds=DEADLINE_S)
            dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=deadline)
            for name in names:
                if size > 1:
                    keep(name, "torch, 2 ranks", torch_engine(algorithms[name]))
                    keep(name, "fsdp pass, 2 ranks", fsdp_engine(algorithms[name], model, "pass"))
                keep(name, f"fsdp step, {size} ranks", fsdp_engine(algorithms[name], model, "step"))
            dist.barrier()
            dist.destroy_process_group()
    if rank == 0:
        save_file(gradients, out.with_suffix(".safetensors"))
        out.with_suffix(".json").write_text(json.dumps(losses))
        store.set("done", b"1")
    store.wait(["done"], timedelta(seconds=DEADLINE_S))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
    sys.stdout.flush()
    os._exit(0)
