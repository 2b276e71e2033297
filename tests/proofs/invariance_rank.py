"""One rank under torchrun: the gradients of a step of several objectives, by the engines on two ranks, then on one.

invariance_rank.py MODEL OUT NAME ...       writes OUT.safetensors and OUT.json: gradients and losses by objective
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
from tests.proofs.presets import presets
from tests.proofs.steps import GROUPS, LIMIT, TEMPERATURE, make_model, make_step, options, run_step

DEADLINE_S = 240.0
Gather = Literal["step", "pass"]


def cuts(rank: int, ranks: int) -> list[list[int]]:
    """Groups of each micro-batch of a rank: uneven shares, one rank with smaller micro-batches than the other."""
    if ranks == 1:
        return [[0, 1], list(range(2, GROUPS))]
    return [[0, 1]] if rank == 0 else [[group] for group in range(2, GROUPS)]


def torch_engine(algorithm: Algorithm) -> tuple[list[Tensor], float]:
    """The flat gradient of each update and the reported loss of the step, by the torch engine."""
    model = make_model()
    batch = make_step(model).batch(algorithm)
    engine = TorchTrainer(model, options(forward_tokens=40), algorithm, temperature=TEMPERATURE)
    recorded: list[Tensor] = []
    engine.on_gradient = lambda gradient: recorded.append(gradient.clone())
    metrics = run_step(engine, batch, cuts(dist.get_rank(), dist.get_world_size()))
    return recorded, metrics["loss"]


def fsdp_engine(algorithm: Algorithm, model: Path, gather: Gather) -> tuple[list[Tensor], float]:
    """The flat gradient of each update and the reported loss of the step, by the FSDP2 engine in float64."""
    batch = make_step(make_model()).batch(algorithm)
    engine = FsdpTrainer(
        model,
        Device("cpu"),
        options(forward_tokens=40),
        algorithm,
        fsdp=FsdpOptions(dtype="float64", gather=gather),
        temperature=TEMPERATURE,
    )
    recorded: list[Tensor] = []

    def record_gradients(optimizer: Any, *_: Any) -> None:
        """Record the reduced gradients before the optimiser uses them."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        recorded.append(torch.cat([whole(parameter).flatten() for parameter in parameters]))

    engine._optimizer.register_step_pre_hook(record_gradients)
    metrics = run_step(engine, batch, cuts(dist.get_rank(), dist.get_world_size()))
    return recorded, metrics["loss"]


def whole(parameter: Tensor) -> Tensor:
    """The whole gradient of a parameter, gathered from the shards of all ranks; zeros if it has none."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    full: Tensor = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return full.clone()


def main(model: Path, out: Path, names: list[str]) -> None:
    """Compute on all ranks, then on rank 0 alone; rank 0 writes the results, and the others wait for it."""
    store, rank, ranks = next(dist.rendezvous("env://"))
    algorithms = presets(LIMIT)
    gradients: dict[str, Tensor] = {}
    losses: dict[str, dict[str, float]] = {name: {} for name in names}

    def record(name: str, way: str, computed: tuple[list[Tensor], float]) -> None:
        losses[name][way] = computed[1]
        gradients.update({f"{name}/{way}/{at:03}": gradient for at, gradient in enumerate(computed[0])})

    for phase, size in enumerate((ranks, 1)):
        if rank < size:
            phase_store = dist.PrefixStore(f"phase {phase}", store)
            deadline = timedelta(seconds=DEADLINE_S)
            dist.init_process_group("gloo", store=phase_store, rank=rank, world_size=size, timeout=deadline)
            for name in names:
                if size > 1:
                    record(name, "torch, 2 ranks", torch_engine(algorithms[name]))
                    record(name, "fsdp pass, 2 ranks", fsdp_engine(algorithms[name], model, "pass"))
                record(name, f"fsdp step, {size} ranks", fsdp_engine(algorithms[name], model, "step"))
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
