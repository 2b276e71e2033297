"""The engines that a configuration names."""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from flowrt.workers.group import meet

from flowrt.algorithms import GrpoLoss
from flowrt.engines.checkpoint import load_model, load_tokenizer
from flowrt.engines.lora import add_adapters
from flowrt.engines.options import TrainOptions
from flowrt.engines.protocols import RolloutEngine, TrainEngine
from flowrt.engines.torch_rollout import TorchRollout
from flowrt.engines.weight_layout import laid_out_for_decoding
from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig
from flowrt.recipes.limits import check_published
from flowrt.recipes.paths import model_dir
from flowrt.transport.devices import choose

if TYPE_CHECKING:
    from flowrt.engines.sglang import SglangRollout


def train_engine(config: RunConfig) -> TrainEngine:
    """The training engine of this rank; where there are several, they meet here."""
    trainer = config.trainer
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != trainer.ranks:
        raise ConfigError(f"{ranks} trainer processes were started, but trainer.ranks is {trainer.ranks}")
    sharded = trainer.engine == "fsdp"
    device = choose(trainer.fsdp.device if sharded else "cpu", int(os.environ.get("LOCAL_RANK", "0")))
    device.use()
    if ranks > 1 or sharded:
        meet(device, min(trainer.ranks_s, config.controller.stall_s))
    options = _options(config)
    loss = GrpoLoss(config.loss.clip_low, config.loss.clip_high, config.loss.kl_coef)
    cap, temperature = config.loss.correction_cap, config.rollout.temperature
    if not sharded:
        from flowrt.engines.torch_train import TorchTrainer  # rollout workers start sooner without it

        model = load_model(model_dir(config))
        return TorchTrainer(model, options, loss, correction_cap=cap, temperature=temperature)
    from flowrt.engines.fsdp import FsdpTrainer

    return FsdpTrainer(
        Path(model_dir(config)),
        device,
        options,
        loss,
        fsdp=trainer.fsdp,
        lora=trainer.lora,
        correction_cap=cap,
        temperature=temperature,
        seed=config.seed,
    )


def rollout_engine(config: RunConfig) -> RolloutEngine:
    """A rollout engine that takes what the training engine publishes."""
    path = model_dir(config)
    model = _published_model(config)
    # Bits depend on how weights lie: a run that has to have those of a plain loop leaves them as they are.
    return TorchRollout(
        model if config.deterministic else laid_out_for_decoding(model),
        eos_id=load_tokenizer(path).eos_token_id,
        rows=1 if config.deterministic else config.rollout.rows,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        recompute=config.rollout.recompute,
        compiled=config.rollout.compile,
    )


def sglang_engine(config: RunConfig, worker: str) -> "SglangRollout":
    """A rollout engine on a server of its own, which is not started yet, or on one that is running."""
    from flowrt.engines.sglang import SglangRollout  # its HTTP client takes a while to import

    check_published(config)  # here too, for a controller that was started by hand on any configuration
    path = model_dir(config)
    return SglangRollout(
        config.rollout.sglang,
        path,
        eos_id=load_tokenizer(path).eos_token_id,
        rows=config.rollout.rows,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        threads=config.threads,
        log_path=Path(config.run_dir) / "logs" / f"{worker}-sglang.log",
    )


def _published_model(config: RunConfig) -> Any:
    """The model in the type in which its weights come, with adapters if these are what comes."""
    trainer = config.trainer
    if trainer.engine == "torch":
        return load_model(model_dir(config))
    model = load_model(model_dir(config), dtype=getattr(torch, trainer.fsdp.dtype))
    adapted = trainer.lora.rank and trainer.lora.publish == "adapters"
    return add_adapters(model, trainer.lora).to(model.dtype) if adapted else model


def _options(config: RunConfig) -> TrainOptions:
    options: TrainOptions = config.trainer
    if options.decay_steps:
        return options
    return dataclasses.replace(options, decay_steps=max(config.steps - options.warmup_steps, 1))
