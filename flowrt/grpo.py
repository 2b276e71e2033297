"""GRPO with engines of your own: bring a trainer or a rollout engine, keep the rest.

`examples/custom_trainer.py` and `examples/custom_rollout.py` are complete. Apart from `flowrt.api`, because
transformers takes long to load.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrt.api import Role, Session, Snapshot, controller, play_all
from flowrt.engines.checkpoint import load_model, load_tokenizer
from flowrt.engines.protocols import Interrupt, Prompt, Response, RolloutEngine, TrainEngine, TrainingBatch
from flowrt.engines.scoring import response_logprobs
from flowrt.recipes import grpo as recipe
from flowrt.recipes.config import RunConfig
from flowrt.recipes.load import parse, to_toml
from flowrt.recipes.paths import model_dir, private
from flowrt.workers import entry, prepare, reference, reward, rollout, source, trainer
from flowrt.workers.engines import rollout_engine, train_engine

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
    "train_engine",
    "trainer_worker",
]


async def run_recipe(
    config: RunConfig,
    *,
    rollout_engine: Callable[[RunConfig], RolloutEngine] = rollout_engine,
    train_engine: Callable[[RunConfig], TrainEngine] = train_engine,
) -> dict[str, Any]:
    """GRPO on a recipe's problems in this process, with the engines that these functions make; returns the summary.

    ``config`` is what `parse` makes of command-line flags and must name a ``run_dir``; one rollout worker and one
    trainer are started. The embedded model is built first where no other is named.
    """

    async def generate(session: Session) -> None:
        await rollout.generate(session, config, await asyncio.to_thread(rollout_engine, config))

    async def train(session: Session) -> None:
        await trainer.train(session, config, await asyncio.to_thread(train_engine, config))

    roles: dict[str, Role] = {
        "source": lambda session: source.run(session, config),
        "rollout": generate,
        "reward": lambda session: reward.run(session, config),
        "trainer": train,
    }
    if config.loss.kl_coef > 0:
        roles["reference"] = lambda session: reference.run(session, config)
    await asyncio.to_thread(_begin, config)
    made = recipe.dataflow(config), recipe.settings(config), recipe.policies(config)
    async with controller(*made, Path(config.run_dir), config=to_toml(config)) as (server, address):
        await play_all(server, address, roles)
        return server.summary(config.staleness)


def _begin(config: RunConfig) -> None:
    private(Path(config.run_dir))
    if not config.model:
        prepare.prepare(config)


def trainer_worker(make: Callable[[RunConfig], TrainEngine]) -> None:
    """The trainer's command (``--controller tcp://HOST:PORT``) with your engine, also for torchrun; never returns."""

    async def role(session: Session, config: RunConfig) -> None:
        await trainer.train(session, config, await asyncio.to_thread(make, config))

    entry.main("trainer", role)


def rollout_worker(make: Callable[[RunConfig], RolloutEngine]) -> None:
    """A rollout worker's command (``--controller tcp://HOST:PORT``) with your engine; never returns."""

    async def role(session: Session, config: RunConfig) -> None:
        await rollout.generate(session, config, await asyncio.to_thread(make, config))

    entry.main("rollout", role)
