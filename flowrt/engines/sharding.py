"""A causal LM in shards over the ranks of a job: made, filled from a checkpoint, gathered, written again."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from flowrt.engines.checkpoint import load_model
from flowrt.engines.faster import decoder_layers
from flowrt.engines.lora import add_adapters, merged
from flowrt.engines.options import FsdpOptions, LoraOptions
from flowrt.engines.roll_call import RollCall
from flowrt.transport.devices import Device

GENERATION = "generation_config.json"


def load_sharded(path: Path, device: Device, options: FsdpOptions, lora: LoraOptions, seed: int) -> Any:
    """The checkpoint's model on all ranks, each with its shard; only rank 0 reads it, and sends the others theirs.

    On rank 0 the whole model is in host memory until that is done, on the others at most one parameter of it.
    """
    first = dist.get_rank() == 0
    roll = RollCall("model")
    with roll.excused():
        source = load_model(path, dtype=wide(options)) if first else None
    roll.here(f"{path} to be read")
    model = skeleton(path, wide(options))
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
        # The name that transformers 5 began with is deprecated in its later versions.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def wide(options: FsdpOptions) -> torch.dtype:
    """The type of the optimiser's own parameters."""
    return torch.float64 if options.dtype == "float64" else torch.float32


def skeleton(path: Path, dtype: torch.dtype) -> Any:
    """The checkpoint's model without memory behind its weights."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def shard(model: Any, device: Device, options: FsdpOptions) -> None:
    """Split every parameter over all ranks; a decoder layer is gathered as one, and what is around the layers too.

    Gradients are summed over the ranks, not averaged, in the type of the optimiser's own parameters.
    """
    mesh = init_device_mesh(device.kind, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, options.dtype), reduce_dtype=wide(options))
    by_pass = options.gather == "pass"
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=by_pass)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=by_pass)
    for part in parts(model):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def parts(model: Any) -> list[FSDPModule]:
    """Every module whose parameters are gathered together."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def gather(model: Any) -> None:
    """Make every parameter whole on every rank."""
    for part in parts(model):
        part.unshard()


def scatter(model: Any) -> None:
    """Leave each rank its shards."""
    for part in parts(model):
        part.reshard()


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor this rank has; operations on it are not taken apart by DTensor, one after the other."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensors(model: Any, *, trained_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters whole, one after the other; all ranks must go through all of them together."""
    for name, parameter in model.named_parameters():
        if trained_only and not parameter.requires_grad:
            continue
        tensor = parameter.detach()
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_on_first(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers whole in the host memory of rank 0; the other ranks help it to them."""
    first = dist.get_rank() == 0
    tensors = {name: buffer.to("cpu") for name, buffer in model.named_buffers()}
    for name, tensor in whole_tensors(model):
        if first:
            tensors[name] = tensor.to("cpu")
    return tensors


def export(
    tensors: dict[str, torch.Tensor],
    source: Path,
    directory: Path,
    options: FsdpOptions,
    lora: LoraOptions,
    dtype: torch.dtype,
) -> None:
    """Write a model, adapters added, where `from_pretrained` finds it, on rank 0 alone.

    What is said of generating is that of ``source``.
    """
    whole = merged(tensors, lora) if lora.rank else tensors
    plain = skeleton(source, dtype)
    for name, _ in plain.named_parameters():
        if name in whole:
            whole[name] = whole[name].to(dtype)
    plain.load_state_dict(whole, assign=True, strict=False)
    plain.tie_weights()
    plain.save_pretrained(directory, max_shard_size=int(options.file_gb * 1e9))
    if (source / GENERATION).is_file():
        shutil.copyfile(source / GENERATION, directory / GENERATION)


def _fill(model: Any, source: Any, device: Device) -> None:
    """Give each rank its part of rank 0's ``source``."""
    tensors = {} if source is None else {**dict(source.named_parameters()), **dict(source.named_buffers())}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = torch.empty(parameter.shape, dtype=parameter.dtype) if source is None else tensors[name]
            parameter.copy_(distribute_tensor(whole.to(device.torch), parameter.device_mesh, parameter.placements))
        for name, buffer in model.named_buffers():
            if source is not None:
                buffer.copy_(tensors[name])
            dist.broadcast(buffer, 0)
