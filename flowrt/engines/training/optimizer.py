"""AdamW, its learning rate schedule, and the check of gradients, for both training engines."""

import math
from collections.abc import Mapping, Sequence

import torch

from flowrt.engines.options import TrainOptions
from flowrt.errors import EngineError


def adamw(parameters: Sequence[torch.Tensor], options: TrainOptions, device: str) -> torch.optim.AdamW:
    """AdamW over these parameters, which are on a device of kind ``device`` (cpu, cuda, npu)."""
    return torch.optim.AdamW(
        list(parameters),
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        weight_decay=options.weight_decay,
        fused=use_fused_adamw(device),
    )


def use_fused_adamw(device: str) -> bool | None:
    """AdamW's ``fused`` argument: True on CPUs and CUDA devices, else None (PyTorch's default, multi-tensor kernels).

    The default makes ten operations per parameter on a CPU, each with DTensor's overhead in the fsdp engine, and takes
    a temporary of the size of all parameters on a device.
    """
    return True if device in ("cpu", "cuda") else None


def optimizer_state(parameter: torch.Tensor, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state of a parameter as AdamW keeps it: moments on its device; the step count there too if it is fused."""
    device = parameter.device
    on_host = use_fused_adamw(device.type) is None
    return {
        name: value if on_host and value.shape != parameter.shape else value.to(device) for name, value in state.items()
    }


def optimizer_step(optimizer: torch.optim.Optimizer, options: TrainOptions, step: int) -> float:
    """Make optimiser step ``step`` (from 0) with the gradients of the parameters. Returns its learning rate."""
    lr = learning_rate(options, step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return lr


def learning_rate(options: TrainOptions, step: int) -> float:
    """Learning rate of optimiser step ``step`` (from 0): linear warm-up, then constant or a decay to ``min_lr``.

    The step after the ``decay_steps`` of the decay is the first one at ``min_lr``: no step of the decay trains on its
    samples with a learning rate of 0.
    """
    warmup = max(options.warmup_steps, 1)
    if step + 1 < warmup:
        return options.lr * (step + 1) / warmup
    if options.schedule == "constant" or not options.decay_steps:
        return options.lr
    progress = min(1.0, (step + 1 - warmup) / (options.decay_steps + 1))
    remaining = 1.0 - progress if options.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return options.min_lr + (options.lr - options.min_lr) * remaining


def check_finite(grad_norm: float, steps: int, update: int = 0) -> float:
    """Return ``grad_norm``, the norm of the gradient of an update (from 0) of step ``steps`` (from 0).

    Called before the update. Raises EngineError if the norm is not finite.
    """
    if math.isfinite(grad_norm):
        return grad_norm
    which = f"update {update} of step {steps}" if update else f"step {steps}"
    weights = "those of the updates before it" if update else "unchanged"
    raise EngineError(
        f"the gradient of {which} has norm {grad_norm}: the weights are {weights}. Check the rewards and "
        "log-probabilities of its samples; resume from the last checkpoint, with a lower trainer.lr"
    )
