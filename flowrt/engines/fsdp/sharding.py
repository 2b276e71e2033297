"""A causal LM sharded over the ranks of a job: construction, loading, gathering."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from flowrt.engines.hf import load_model, meta_model
from flowrt.engines.options import FsdpOptions, LoraOptions
from flowrt.engines.training.forward import decoder_layers
from flowrt.engines.training.lora import add_adapters
from flowrt.ranks.barrier import RankBarrier
from flowrt.transport.devices import Device


def load_sharded(path: Path, device: Device, options: FsdpOptions, lora: LoraOptions, seed: int) -> Any:
    """Load the checkpoint's model sharded over all ranks. Collective; only rank 0 reads the files.

    During the call rank 0 holds the full model in host memory, each other rank at most one full parameter. ``seed`` is
    that of the initial adapters.

    Raises EngineError if the model cannot be loaded, ConfigError if adapters cannot be added, and WaitExpired if a rank
    is lost.
    """
    first = dist.get_rank() == 0
    barrier = RankBarrier("model")
    with barrier.exempt():
        source = load_model(path, dtype=master_dtype(options)) if first else None
    barrier.arrive(f"{path} to be read")
    model = meta_model(path, master_dtype(options))
    if lora.rank:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            source = add_adapters(source, lora) if first else None
        model = add_adapters(model, lora)
    shard(model, device, options)
    model.to_empty(device=device.torch)
    model.tie_weights()
    _fill(model, source, device)
    if options.recompute:
        # transformers 5 renamed the method.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def master_dtype(options: FsdpOptions) -> torch.dtype:
    """Dtype of the parameters that the optimiser updates."""
    return torch.float64 if options.dtype == "float64" else torch.float32


def shard(model: Any, device: Device, options: FsdpOptions) -> None:
    """Shard every parameter over all ranks. Each decoder layer is gathered as a unit, and so is the rest of the model.

    Gradients are summed over the ranks, not averaged, in the dtype of the optimiser's parameters.
    """
    mesh = init_device_mesh(device.kind, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, options.dtype), reduce_dtype=master_dtype(options))
    reshard = options.gather == "pass"
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for part in parts(model):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def parts(model: Any) -> list[FSDPModule]:
    """The modules whose parameters are gathered as a unit."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def gather(model: Any) -> None:
    """Gather all parameters on every rank. Collective."""
    for part in parts(model):
        part.unshard()


def scatter(model: Any) -> None:
    """Free gathered parameters; each rank keeps its shards."""
    for part in parts(model):
        part.reshard()


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard as a plain tensor, which avoids DTensor's overhead per operation."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensors(model: Any, *, trained_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Full parameters by name, one at a time. Collective: all ranks must iterate to the end."""
    for name, parameter in model.named_parameters():
        if trained_only and not parameter.requires_grad:
            continue
        tensor = parameter.detach()
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_state_on_rank0(model: Any) -> dict[str, torch.Tensor]:
    """Full parameters and buffers by name, in host memory, on rank 0; only buffers on the other ranks. Collective."""
    first = dist.get_rank() == 0
    tensors = {name: buffer.to("cpu") for name, buffer in model.named_buffers()}
    for name, tensor in full_tensors(model):
        if first:
            tensors[name] = tensor.to("cpu")
    return tensors


def _fill(model: Any, source: Any, device: Device) -> None:
    """Distribute the weights of rank 0's ``source`` (None on the other ranks)."""
    tensors = {} if source is None else {**dict(source.named_parameters()), **dict(source.named_buffers())}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = torch.empty(parameter.shape, dtype=parameter.dtype) if source is None else tensors[name]
            parameter.copy_(distribute_tensor(full.to(device.torch), parameter.device_mesh, parameter.placements))
        for name, buffer in model.named_buffers():
            if source is not None:
                buffer.copy_(tensors[name])
            dist.broadcast(buffer, 0)
