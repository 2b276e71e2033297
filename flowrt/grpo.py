"""The public API for GRPO with engines of your own: a training or rollout engine in place of flowrt's.

- `examples/custom_trainer.py` and `examples/custom_rollout.py` are complete.
- Every name in ``__all__`` is stable.
- This module is not part of `flowrt.api`, because importing transformers takes seconds.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrt.api import Observability, Role, Session, Snapshot, check_roles, controller, play_all
from flowrt.engines.base import Interrupt, Prompt, Response, RolloutEngine, TrainEngine, TrainingBatch
from flowrt.engines.hf import load_model, load_tokenizer
from flowrt.engines.stopping import stop_token_ids
from flowrt.engines.training.forward import response_logprobs
from flowrt.ids import REFERENCE, REWARD, ROLLOUT, SOURCE, TRAINER
from flowrt.launcher import build_model, start_models
from flowrt.launcher.controller_main import sample_store
from flowrt.launcher.model_check import check_weights, write_models
from flowrt.recipes import grpo as recipe
from flowrt.recipes.algorithms import needs_reference
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import parse, to_toml
from flowrt.recipes.run_dir import has_adapters_to_merge, model_dir
from flowrt.roles import main, reference, reward, rollout, source, trainer
from flowrt.roles.engine_setup import rollout_engine, train_engine
from flowrt.roles.filter import with_filter
from flowrt.runtime.files import private_directory

__all__ = [
    "Interrupt",
    "Prompt",
    "Response",
    "RolloutEngine",
    "RunConfig",
    "Snapshot",
    "TrainEngine",
    "TrainingBatch",
    "load_model",
    "load_tokenizer",
    "model_dir",
    "parse",
    "response_logprobs",
    "rollout_engine",
    "rollout_worker",
    "run_recipe",
    "stop_token_ids",
    "train_engine",
    "trainer_worker",
]


async def run_recipe(
    config: RunConfig,
    *,
    rollout_engine: Callable[[RunConfig], RolloutEngine] = rollout_engine,
    train_engine: Callable[[RunConfig], TrainEngine] = train_engine,
) -> dict[str, Any]:
    """Run GRPO on a recipe's problems in this process, with one rollout worker and one trainer.

    The embedded model is built first if the configuration names no model.

    Args:
        config: the run's configuration, as returned by `parse`; ``run_dir`` must be set.
        rollout_engine: creates the rollout engine; called in a thread.
        train_engine: creates the training engine; called in a thread.

    Returns:
        The summary of the run, as in ``summary.json``.

    Raises as `flowrt.api.run_roles`; also ConfigError, before anything starts, if sampling is truncated and
    ``train_engine`` is a class whose engines do not apply supports.
    """
    if isinstance(train_engine, type):  # a function's engine is checked by trainer.train, once it exists
        trainer.check_supports(config, train_engine)

    async def generate(session: Session) -> None:
        await rollout.generate(session, config, await asyncio.to_thread(rollout_engine, config))

    async def train(session: Session) -> None:
        await trainer.train(session, config, await asyncio.to_thread(train_engine, config))

    roles: dict[str, Role] = {
        SOURCE: lambda session: source.run(session, config),
        ROLLOUT: generate,
        REWARD: lambda session: with_filter(reward.run)(session, config),
        TRAINER: train,
    }
    if needs_reference(config.algorithm):
        roles[REFERENCE] = lambda session: reference.run(session, config)
    settings = recipe.settings(config)
    check_roles(settings, roles)
    await asyncio.to_thread(_prepare, config)
    async with controller(
        recipe.dataflow(config),
        settings,
        recipe.policies(config),
        Path(config.run_dir),
        config=to_toml(config),
        observability=Observability(samples=sample_store(config)),
    ) as (server, address):
        await play_all(server, address, roles)
        return server.summary(config.max_staleness)


def _prepare(config: RunConfig) -> None:
    private_directory(Path(config.run_dir))
    if not config.model:
        build_model.build(config)
    elif has_adapters_to_merge(config):
        start_models.merge_starts(config)
    if config.model_overrides:
        write_models(config)
    if config.model:
        check_weights(model_dir(config))


def trainer_worker(make: Callable[[RunConfig], TrainEngine]) -> None:
    """Run a trainer's command line (``--controller RUN``), also under torchrun, with your engine; exits the process.

    ``make`` creates the engine of this rank from the run's configuration; called in a thread.
    """

    async def role(session: Session, config: RunConfig) -> None:
        await trainer.train(session, config, await asyncio.to_thread(make, config))

    main.main(TRAINER, role)


def rollout_worker(make: Callable[[RunConfig], RolloutEngine]) -> None:
    """Run a rollout worker's command line (``--controller RUN``) with your engine; exits the process.

    ``make`` creates the engine from the run's configuration; called in a thread.
    """

    async def role(session: Session, config: RunConfig) -> None:
        await rollout.generate(session, config, await asyncio.to_thread(make, config))

    main.main(ROLLOUT, role)
