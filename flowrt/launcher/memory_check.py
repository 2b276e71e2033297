"""Check of a run's memory before anything starts, by the estimate of `flowrt doctor`."""

from flowrt.errors import ConfigError
from flowrt.launcher.doctor.estimate import (
    ResourceEstimate,
    accelerated,
    estimate,
    has_accelerated_reference,
    host_bytes,
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
        needs = estimate(config, shape_of(config))
    except ConfigError:
        return  # a model whose sizes have names that are not known here; whether it loads is checked by loading it
    needed = host_bytes(config, needs, 1, has_devices)
    if not total_bytes or needed <= TOLERANCE * total_bytes:
        return
    raise ConfigError(
        f"the run needs about {needed / GIB:.1f} GiB of memory on this machine, which has {total_bytes / GIB:.1f}: "
        f"{', '.join(_parts(config, needs, has_devices))}; lower rollout.max_running_requests, rollout.max_new_tokens, "
        "rollout.workers or trainer.forward_tokens, or start workers on other hosts (launch.rollout, launch.trainer)"
    )


def _parts(config: RunConfig, needs: ResourceEstimate, has_devices: bool) -> list[str]:
    """The processes that need most, with their memory."""
    training, serving = accelerated(config, has_devices)
    trainer = needs.trainer_rank + (0 if training else needs.trainer_device)
    parts = []
    if not config.launch.trainer:
        ranks = config.trainer.ranks
        parts.append(f"trainer {(ranks * trainer + needs.trainer_first) / GIB:.1f}")
    if not config.launch.rollout:
        rollout = needs.rollout + (0 if serving else needs.server)
        parts.append(f"{config.rollout.workers} rollout workers {config.rollout.workers * rollout / GIB:.1f}")
    if needs_reference(config.algorithm):
        scoring = needs.reference + (0 if has_accelerated_reference(config, has_devices) else needs.reference_device)
        parts.append(f"{config.reference.workers} reference workers {config.reference.workers * scoring / GIB:.1f}")
    return parts
