"""Estimate of the memory and disk space of a run, from its configuration.

- Sums of the known tensors and the largest activations, in bytes, without the overhead of allocators.
- `tests/integration/test_memory_peaks.py` compares it with measured peaks.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from flowrt.engines.descriptor import (
    ADAM_BYTES,
    DTYPE_BYTES,
    FLOAT_BYTES,
    ModelShape,
    PassSize,
    TrainerMemory,
    largest_pass,
    support_tokens,
)
from flowrt.engines.model_config import parse_overrides
from flowrt.engines.registry import ROLLOUT_ENGINES, TRAIN_ENGINES
from flowrt.launcher.doctor.model_shape import read_shape
from flowrt.recipes.algorithms import needs_reference
from flowrt.recipes.config import RunConfig
from flowrt.recipes.devices import reference_device, reference_dtype, rollout_device, training_device, with_devices
from flowrt.recipes.model_files import base_model_dir
from flowrt.recipes.open_work import open_samples

PROCESS_BYTES = 340 * 10**6
"""Memory of a process that has imported torch and transformers."""
SMALL_PROCESS_BYTES = 480 * 10**6
"""Memory of controller, launcher and fork server together."""
TOKEN_BYTES = 12
"""Memory of one token of a sample in a tensor store."""
PROMPT_TOKENS = 512
"""Assumed length of prompts, unless data.max_prompt_tokens limits it."""
PULLED_SAMPLES = 64
"""Samples that a reference worker scores at a time (`flowrt.roles.reference.MAX_PULL_SLOTS`)."""
FILE_BYTES = 250 * 10**6
"""Largest file of a checkpoint, of which two copies are in memory while it is written."""


@dataclass(frozen=True)
class ResourceEstimate:
    """Memory of each process of a role, and disk space of the run, in bytes."""

    trainer_rank: int
    trainer_first: int  # rank 0, in addition
    trainer_device: int  # each rank, on its accelerator; without one, in host memory
    rollout: int
    server: int  # of a rollout engine that may use an accelerator, there; without one, in host memory
    reference: int
    reference_device: int  # of each reference worker, on its accelerator; without one, in host memory
    small: int  # controller, source and reward together, with the live samples
    disk: int


def accelerated(config: RunConfig, there: bool) -> tuple[bool, bool]:
    """Whether trainer ranks, and rollout engines, use an accelerator.

    Args:
        config: of the run.
        there: whether the nodes have accelerators.
    """
    return _is_accelerated(training_device(config), there), _is_accelerated(rollout_device(config), there)


def has_accelerated_reference(config: RunConfig, there: bool) -> bool:
    """Whether the run has reference workers that use an accelerator. ``there``: whether the nodes have accelerators."""
    return needs_reference(config.algorithm) and _is_accelerated(reference_device(config), there)


def _is_accelerated(device: str, there: bool) -> bool:
    return there if device == "auto" else device != "cpu"


def training_memory(config: RunConfig, shape: ModelShape) -> TrainerMemory:
    """Memory of each training rank, in bytes; ``model`` is in the tables of docs/guides/engines.md."""
    size = pass_size(config, shape, config.prompts_per_step * config.group_size)
    return TRAIN_ENGINES[config.trainer.engine].memory(config.trainer, shape, size)


def prompt_tokens(config: RunConfig, shape: ModelShape) -> int:
    """Length of the longest prompt that is assumed, in tokens."""
    left = max(shape.max_length - config.longest_response, 1) if shape.max_length else PROMPT_TOKENS
    return min(left, config.data.max_prompt_tokens or PROMPT_TOKENS)


def pass_size(config: RunConfig, shape: ModelShape, samples: int) -> PassSize:
    """The largest pass over at most this number of samples, with prompts and responses of the largest length."""
    return largest_pass(
        prompt=prompt_tokens(config, shape),
        response=config.rollout.max_new_tokens,
        group=config.group_size,
        samples=samples,
        budget=config.trainer.forward_tokens,
        is_shared=shape.shares_prompts and config.trainer.share_prompts,
    )


def estimate(config: RunConfig, shape: ModelShape) -> ResourceEstimate:
    """The peak memory of each process of this run, and the disk space of the run."""
    trainer, rollout = config.trainer, with_devices(config).rollout
    training = TRAIN_ENGINES[trainer.engine]
    memory = training_memory(config, shape)
    length = prompt_tokens(config, shape) + rollout.max_new_tokens
    generated = prompt_tokens(config, shape) + config.longest_response
    cache_elements = rollout.max_running_requests * generated * shape.cache_token_elements
    published = training.published(trainer)
    longest = replace(rollout, max_new_tokens=config.longest_response)
    generating = ROLLOUT_ENGINES[rollout.engine].memory(longest, shape, published, cache_elements)
    live, _, _ = open_samples(config)
    samples = live * length * (TOKEN_BYTES + TOKEN_BYTES // 3 * support_tokens(rollout.truncation))
    saved = config.checkpoint.keep + 1 if config.checkpoint.every else 0
    trained_bytes = training.trained_parameters(trainer, shape) * (FLOAT_BYTES + ADAM_BYTES)
    overrides = parse_overrides(config.model_overrides)
    scored = read_shape(base_model_dir(Path(config.reference.model)), overrides) if config.reference.model else shape
    averaging = 2 * FLOAT_BYTES * shape.parameters if config.reference.average != 1.0 else 0
    scoring = pass_size(config, scored, min(PULLED_SAMPLES, config.prompts_per_step * config.group_size))
    dtype = reference_dtype(config)
    saving = max(2 * min(FILE_BYTES, trained_bytes) - memory.passes, 0) if saved else 0  # without activations
    return ResourceEstimate(
        trainer_rank=PROCESS_BYTES + saving + samples,
        trainer_first=max(memory.first_rank, averaging) + evaluated_bytes(config, shape),
        trainer_device=memory.model + memory.passes,
        rollout=PROCESS_BYTES + generating.host + samples // rollout.workers,
        server=generating.device,
        reference=PROCESS_BYTES,
        reference_device=scored.parameters * DTYPE_BYTES[dtype] + scored.scoring_bytes(scoring, dtype),
        small=SMALL_PROCESS_BYTES + 2 * PROCESS_BYTES + samples,
        disk=saved * trained_bytes + 2 * shape.weight_bytes + refresh_bytes(config, shape),
    )


def evaluated_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Bytes of the versions that the trainer keeps while they are evaluated, see ``eval.overlap``."""
    if not config.eval.interval:
        return 0
    versions = 2 if config.eval.overlap == "wait" else 1
    return versions * TRAIN_ENGINES[config.trainer.engine].published(config.trainer).size_bytes(shape)


def refresh_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Bytes of disk space of the refreshed reference weights that are kept at a time."""
    if not config.reference.refresh:
        return 0
    steps = config.max_staleness + config.checkpoint.every * (config.checkpoint.keep + 1)
    return FLOAT_BYTES * shape.parameters * (math.ceil(steps / config.reference.refresh) + 2)


def reference_bytes(config: RunConfig, needs: ResourceEstimate, devices: int) -> int:
    """Bytes that reference workers, and a trainer rank that shares the device, need on the fullest accelerator.

    Args:
        config: of the run.
        needs: memory of each process.
        devices: number of accelerators on the reference workers' host; 0 if it has none.

    They are placed as by `flowrt.launcher.accelerators.assign`: on devices without a trainer rank, if there are any.
    """
    if not has_accelerated_reference(config, bool(devices)):
        return 0
    training = accelerated(config, bool(devices))[0] and not (config.launch.trainer or config.launch.auxiliary)
    left = devices - config.trainer.ranks if training else devices
    workers = math.ceil(config.reference.workers / max(left if left > 0 else devices, 1))
    return workers * needs.reference_device + (needs.trainer_device if left <= 0 and training else 0)


def host_bytes(config: RunConfig, needs: ResourceEstimate, nodes: int, devices: bool = False) -> int:
    """Bytes of host memory that the run needs on the node with most of its processes.

    Args:
        config: of the run.
        needs: memory of each process.
        nodes: number of nodes.
        devices: whether the nodes have accelerators; models then use the memory of those instead.
    """
    trainer = config.trainer
    scoring = needs.reference + (0 if has_accelerated_reference(config, devices) else needs.reference_device)
    reference = config.reference.workers * scoring if needs_reference(config.algorithm) else 0
    training, serving = accelerated(config, devices)
    rank = needs.trainer_rank + (0 if training else needs.trainer_device)
    part = trainer.ranks // trainer.nodes * rank + needs.trainer_first
    rollout = needs.rollout + (0 if serving else needs.server)
    head = needs.small + reference
    generating = math.ceil(config.rollout.workers / max(nodes - trainer.nodes, 1)) * rollout
    # With trainers on several hosts, the controller's host is usually one of them: ``part`` counts in both cases.
    here = head + part + (0 if config.launch.rollout else config.rollout.workers * rollout)
    return max(here, generating if config.launch.rollout else 0)


def device_bytes(config: RunConfig, needs: ResourceEstimate, devices: bool) -> int:
    """Bytes of accelerator memory of the largest process that uses one; 0 without. ``devices``: as for `host_bytes`."""
    training, serving = accelerated(config, devices)
    scoring = has_accelerated_reference(config, devices)
    return max(
        needs.trainer_device if training else 0,
        needs.server if serving else 0,
        needs.reference_device if scoring else 0,
    )
