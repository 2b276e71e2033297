"""The engines that a configuration selects, each built by its descriptor."""

import dataclasses
import os
from pathlib import Path

import torch

from flowrt.engines.base import RolloutEngine, TrainEngine
from flowrt.engines.descriptor import RolloutSetup, TrainerSetup
from flowrt.engines.registry import ROLLOUT_ENGINES, TRAIN_ENGINES
from flowrt.errors import ConfigError, refuse
from flowrt.ids import ROLLOUT
from flowrt.ranks.process_group import init_ranks
from flowrt.recipes.config import RunConfig, TrainerConfig
from flowrt.recipes.constraints import rollout_mistakes
from flowrt.recipes.devices import rollout_device, with_devices
from flowrt.recipes.eval_names import chat_templates
from flowrt.recipes.run_dir import model_dir
from flowrt.roles.algorithm import algorithm
from flowrt.transport.devices import own_device


def train_engine(config: RunConfig) -> TrainEngine:
    """The training engine of this rank. With several ranks, initialises their process group (a collective call).

    Raises ConfigError if the number of started processes is not ``trainer.ranks``.
    """
    trainer = with_devices(config).trainer
    descriptor = TRAIN_ENGINES[trainer.engine]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != trainer.ranks:
        raise ConfigError(f"{ranks} trainer processes were started, but trainer.ranks is {trainer.ranks}")
    device = own_device(descriptor.device(trainer))
    device.use()
    if config.deterministic:
        device.compute_deterministically()
    if ranks > 1 or descriptor.needs_process_group:
        init_ranks(device, min(trainer.rank_timeout_s, config.controller.no_progress_timeout_s))
    return descriptor.build(
        TrainerSetup(
            model=model_dir(config),
            device=device,
            settings=train_options(with_devices(config)),
            algorithm=algorithm(config),
            temperature=config.rollout.temperature,
            seed=config.seed,
        )
    )


def rollout_engine(config: RunConfig, worker: str = f"{ROLLOUT}-0") -> RolloutEngine:
    """The rollout engine of a worker; an `ExternalEngine` must be started before use.

    Raises ConfigError if the engine does not support the configuration: the controller may have been started without
    this check.
    """
    refuse(rollout_mistakes(config))
    return ROLLOUT_ENGINES[config.rollout.engine].build(
        RolloutSetup(
            model=model_dir(config),
            settings=dataclasses.replace(with_devices(config).rollout, max_new_tokens=config.longest_response),
            published=TRAIN_ENGINES[config.trainer.engine].published(config.trainer),
            deterministic=config.deterministic,
            threads=config.threads,
            log_path=Path(config.run_dir) / "logs" / f"{worker}-{config.rollout.engine}.log",
            chat_template=chat_templates(config),
            worker=worker,
        )
    )


def weights_device(config: RunConfig) -> torch.device:
    """The device that a rollout worker copies weights to; the CPU for an engine in a process of its own."""
    is_in_worker = ROLLOUT_ENGINES[config.rollout.engine].is_in_worker
    return own_device(rollout_device(config)).torch if is_in_worker else torch.device("cpu")


EXACT = ("float32", "float64")
EXACT_SHARE = 0.01
"""Share of ``trainer.max_initial_mismatch`` that is allowed where rollout and trainer compute in `EXACT` dtypes."""


def train_options(config: RunConfig) -> TrainerConfig:
    """The trainer's configuration, with what it leaves to the run.

    If ``decay_steps`` is 0, the learning rate decays over all steps after the warm-up.
    """
    options = dataclasses.replace(config.trainer, max_initial_mismatch=initial_mismatch_limit(config))
    if options.decay_steps:
        return options
    # Without a warm-up the first step has the full rate too, so that one step fewer is left for the decay.
    return dataclasses.replace(options, decay_steps=max(config.steps - max(options.warmup_steps, 1), 1))


def initial_mismatch_limit(config: RunConfig) -> float:
    """Largest divergence (k3, nats per token) of rollout and trainer at equal weights; 0: not checked."""
    descriptor = TRAIN_ENGINES[config.trainer.engine]
    computed_in = descriptor.forward_dtype(config.trainer)
    generated_in = (
        descriptor.published(config.trainer).dtype if config.rollout.dtype == "auto" else config.rollout.dtype
    )
    is_exact = ROLLOUT_ENGINES[config.rollout.engine].is_in_worker and {computed_in, generated_in} <= set(EXACT)
    return config.trainer.max_initial_mismatch * (EXACT_SHARE if is_exact else 1.0)
