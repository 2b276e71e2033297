"""Check of a run's memory before anything starts, by the estimate of `flowrt doctor`."""

from typing import NamedTuple

from flowrt.errors import ConfigError
from flowrt.launcher.doctor.estimate import (
    ResourceEstimate,
    accelerated,
    estimate,
    has_accelerated_reference,
    host_bytes,
    training_memory,
)
from flowrt.launcher.doctor.model_shape import shape_of
from flowrt.recipes.algorithms import needs_reference
from flowrt.recipes.config import RunConfig

TOLERANCE = 1.25
"""The estimate may be too high by a fifth (bench/estimate.py)."""
GIB = 2**30


def check_memory(config: RunConfig, total_bytes: int, has_devices: bool) -> None:
    """Raises ConfigError if the run's processes on this host need more memory than it has, by more than `TOLERANCE`.

    Args:
        config: of the run.
        total_bytes: memory of this host; 0: unknown.
        has_devices: whether it has accelerators, whose memory is used instead.
    """
    try:
        shape = shape_of(config)
        needs = estimate(config, shape)
    except ConfigError:
        return  # a model whose sizes have names that are not known here; whether it loads is checked by loading it
    needed = host_bytes(config, needs, 1, has_devices)
    if not total_bytes or needed <= TOLERANCE * total_bytes:
        return
    memory = training_memory(config, shape)
    parts = _parts(config, needs, has_devices, is_model=memory.model >= memory.passes)
    raise ConfigError(
        f"the run needs about {needed / GIB:.1f} GiB of memory on this machine, which has {total_bytes / GIB:.1f}: "
        f"{', '.join(f'{part.name} {part.size / GIB:.1f}' for part in parts)}; {parts[0].fix}, or start workers on "
        "other hosts (launch.rollout, launch.trainer)"
    )


class _Part(NamedTuple):
    """Processes with the same role: their memory in bytes, and what lowers it."""

    size: int
    name: str
    fix: str


def _parts(config: RunConfig, needs: ResourceEstimate, has_devices: bool, is_model: bool) -> list[_Part]:
    """The processes of this host, those that need most first.

    ``is_model``: whether parameters and optimiser state take most of a trainer's memory, and not its passes.
    """
    training, serving = accelerated(config, has_devices)
    trainer = needs.trainer_rank + (0 if training else needs.trainer_device)
    fix = "lower prompts_per_step, group_size, max_staleness or rollout.max_new_tokens"
    parts = [_Part(needs.small, "controller, source and rewards", fix)]
    if not config.launch.trainer:
        fix = "lower trainer.forward_tokens or rollout.max_new_tokens"
        if is_model or training:
            fix = "use a smaller model, or train adapters (trainer.lora.rank, trainer.engine fsdp)"
        parts.append(_Part(config.trainer.ranks * trainer + needs.trainer_first, "trainer", fix))
    if not config.launch.rollout:
        rollout = needs.rollout + (0 if serving else needs.server)
        fix = "lower rollout.max_running_requests, rollout.max_new_tokens or rollout.workers"
        parts.append(_Part(config.rollout.workers * rollout, f"{config.rollout.workers} rollout workers", fix))
    if needs_reference(config.algorithm):
        scoring = needs.reference + (0 if has_accelerated_reference(config, has_devices) else needs.reference_device)
        fix = "lower reference.workers or trainer.forward_tokens, or set reference.dtype to bfloat16"
        parts.append(_Part(config.reference.workers * scoring, f"{config.reference.workers} reference workers", fix))
    return sorted(parts, reverse=True)
