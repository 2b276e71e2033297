"""The trainer: one process, or several data-parallel ranks under torchrun, each pulling micro-batches on demand."""

import asyncio
import os
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from flowrt.workers.entry import main
from flowrt.workers.saving import Checkpoints

from flowrt.algorithms import GrpoLoss, group_advantages
from flowrt.algorithms.weighting import SampleWeight, Uniform
from flowrt.client.batches import Batch
from flowrt.client.session import Session
from flowrt.engines.checkpoint import load_model, load_tokenizer, save_model
from flowrt.engines.protocols import TrainEngine, TrainingBatch
from flowrt.engines.torch_train import TorchTrainer
from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig
from flowrt.recipes.grpo import POLICY
from flowrt.recipes.paths import final_dir, model_dir
from flowrt.transport.weights import Snapshot
from flowrt.wire.records import KEPT_TOKENS

UNIFORM = Uniform()


async def run(session: Session, config: RunConfig) -> None:
    """Train the run's steps, from its checkpoint on; rank 0 speaks for all: it ends steps, publishes and saves."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != config.trainer.ranks:
        raise ConfigError(f"{ranks} trainer processes were started, but trainer.ranks is {config.trainer.ranks}")
    with session.timeline.busy("load"):
        if ranks > 1:
            deadline = timedelta(seconds=config.controller.stall_s)
            await asyncio.to_thread(dist.init_process_group, "gloo", timeout=deadline)
        model = await asyncio.to_thread(load_model, model_dir(config))
        loss = GrpoLoss(config.loss.clip_low, config.loss.clip_high, config.loss.kl_coef)
        engine = TorchTrainer(
            model,
            config.trainer,
            loss,
            correction_cap=config.loss.correction_cap,
            temperature=config.rollout.temperature,
        )
    checkpoints = Checkpoints(session, config, engine)
    done = await checkpoints.load()
    if done and rank == 0:
        await publish(session, engine, done)
    for step in range(done, config.steps):
        await train_step(session, config, engine, step)
        with session.timeline.busy("step"):
            metrics = await asyncio.to_thread(engine.step)
        if not metrics:
            break
        done = step + 1
        if rank == 0:
            session.step_done(step, metrics)
            await publish(session, engine, done)
        await checkpoints.save_if_due(done)
    await checkpoints.save(done)
    if rank == 0 and config.trainer.save:
        with session.timeline.busy("save"):
            await asyncio.to_thread(save, model, config)
    session.finished()


async def publish(session: Session, engine: TrainEngine, version: int) -> None:
    """Offer the weights after so many steps, as they are now, to whoever generates."""
    with session.timeline.busy("snapshot"):
        snapshot = await asyncio.to_thread(Snapshot.take, version, engine.parameters())
    await session.params.publish(POLICY, snapshot)


async def train_step(session: Session, config: RunConfig, engine: TrainEngine, step: int) -> None:
    """Add up the gradient of this rank's share of the step, fetching the next micro-batch beside the present one."""

    def pull() -> asyncio.Task[Batch]:
        return asyncio.create_task(session.pull("train", slots=0, tokens=config.trainer.micro_batch_tokens, step=step))

    batch = await pull()
    while not batch.closed:
        following = pull()
        with session.timeline.busy("train"):
            await asyncio.to_thread(engine.accumulate, to_training_batch(batch, config, step))
        batch = await following


def to_training_batch(batch: Batch, config: RunConfig, step: int, weight: SampleWeight = UNIFORM) -> TrainingBatch:
    """Whole groups with their advantages; ``weight`` says how much each sample's staleness lets it count.

    Where steps are cut to a budget, advantages are those of all responses, and only the kept tokens are trained.
    """
    rewards_N = torch.tensor(batch.inline["reward"])
    scale: Literal["group_std", "none"] = "group_std" if config.loss.normalize else "none"
    advantages_N = group_advantages(rewards_N, torch.tensor(batch.groups), scale=scale)
    weights_N = weight(torch.tensor([step - batch.oldest_version(row) for row in range(len(batch))]))
    kept_N: list[int | None] = [int(count) for count in batch.inline.get(KEPT_TOKENS, [])] or [None] * len(batch)
    rows = [row for row, kept in enumerate(kept_N) if kept != 0]

    def begin(column: str) -> list[torch.Tensor]:
        return [batch.tensors[column][row][: kept_N[row]] for row in rows]

    return TrainingBatch(
        prompts=[batch.tensors["prompt"][row] for row in rows],
        responses=begin("response"),
        rollout_logprobs=begin("logprobs"),
        reference_logprobs=begin("ref_logprobs") if "ref_logprobs" in batch.tensors else None,
        advantages_N=advantages_N[rows],
        weights_N=weights_N[rows],
    )


def save(model: torch.nn.Module, config: RunConfig) -> None:
    """Write the trained model where `AutoModelForCausalLM.from_pretrained` finds it."""
    save_model(model, load_tokenizer(model_dir(config)), Path(final_dir(config)))


if __name__ == "__main__":
    main("trainer", run)
