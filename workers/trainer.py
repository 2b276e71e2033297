"""The trainer: one process, or several data-parallel ranks under torchrun, each pulling micro-batches on demand."""

import asyncio
import logging
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch
from flowrt.workers.engines import train_engine
from flowrt.workers.entry import TRAINER, main
from flowrt.workers.saving import Checkpoints, make_certain, naming, sync
from flowrt.workers.together import Together

from flowrt.algorithms import group_advantages
from flowrt.algorithms.weighting import SampleWeight, Uniform
from flowrt.client.batches import Batch
from flowrt.client.session import Session
from flowrt.engines.checkpoint import load_tokenizer, put_in_place
from flowrt.engines.passes import DIVERGENCE
from flowrt.engines.protocols import TrainEngine, TrainingBatch
from flowrt.errors import Drained
from flowrt.recipes.config import RunConfig
from flowrt.recipes.grpo import POLICY
from flowrt.recipes.paths import final_dir, model_dir
from flowrt.transport.weights import Snapshot
from flowrt.wire.records import KEPT_TOKENS

log = logging.getLogger("flowrt")
UNIFORM = Uniform()
Result = TypeVar("Result")


async def run(session: Session, config: RunConfig) -> None:
    """Train with the engine that the configuration names."""
    with session.timeline.busy("load"):
        engine = await asyncio.to_thread(train_engine, config)
    await train(session, config, engine)


async def train(session: Session, config: RunConfig, engine: TrainEngine) -> None:
    """Train the run's steps, from its checkpoint on; rank 0 speaks for all. The engines of all ranks meet."""
    first = int(os.environ.get("RANK", "0")) == 0
    ranks = Together()
    checkpoints = Checkpoints(session, config, engine, ranks)
    done = await checkpoints.load()
    if done:
        await publish(session, engine, ranks, done, first)
    suspended = False
    for step in range(done, config.steps):
        if suspended := not await train_step(session, config, engine, ranks, step):
            break
        with session.timeline.busy("step"):
            metrics = await at_the_end(ranks, config, engine.step, f"step {step}")
        if not metrics:
            break
        done = step + 1
        if first:
            session.step_done(step, metrics)
        await publish(session, engine, ranks, done, first, divergence(metrics, step))
        await checkpoints.save_if_due(done)
    await checkpoints.save(done)
    if config.trainer.save and not suspended:
        with session.timeline.busy("save"), ranks.excused():
            await ranks.call(lambda: save(engine, config, first), "the final model")
    await session.params.settled()
    session.finished()


def divergence(metrics: Mapping[str, float], step: int) -> dict[int, float]:
    """How far each version is from the weights that this step began with, by the step's own samples.

    The weights that it made are one update further: nobody has compared those with anything yet.
    """
    ages = {int(name.removeprefix(DIVERGENCE)): value for name, value in metrics.items() if name.startswith(DIVERGENCE)}
    return {step - age: value for age, value in ages.items()}


async def publish(
    session: Session,
    engine: TrainEngine,
    ranks: Together,
    version: int,
    first: bool,
    moved: Mapping[int, float] | None = None,
) -> None:
    """Offer the weights after so many steps, as they are now; the first rank has them, the others help it to them."""
    with session.timeline.busy("snapshot"):
        tensors = await ranks.call(engine.parameters, f"version {version}")
        snapshot = await asyncio.to_thread(Snapshot.take, version, tensors) if first else None
    if snapshot is not None:
        with ranks.excused():  # the version before it may still be summed up
            await session.params.publish_beside(POLICY, snapshot, moved)


async def train_step(session: Session, config: RunConfig, engine: TrainEngine, ranks: Together, step: int) -> bool:
    """Add up the gradient of this rank's share of the step, fetching the next micro-batch beside the present one.

    Returns False when the run is being suspended: then all ranks leave the step, and have never begun it.
    """
    chance = torch.get_rng_state()
    try:
        await accumulate(session, config, engine, ranks, step)
    except Drained as told:
        log.info("%s", told)
        await at_the_end(ranks, config, engine.discard, f"the gradient of step {step} to be dropped")
        torch.set_rng_state(chance)
        return False
    return True


async def at_the_end(ranks: Together, config: RunConfig, call: Callable[[], Result], what: str) -> Result:
    """Make a call of the engine after this rank's last pass of a step.

    In lock step it comes before the last passes of the others, who need this rank for them: they meet in the engine.
    """
    lock_step = config.trainer.engine == "fsdp" and config.trainer.fsdp.gather == "pass"
    result: Result = await (ranks.apart(call, what) if lock_step else ranks.call(call, what))
    return result


async def accumulate(session: Session, config: RunConfig, engine: TrainEngine, ranks: Together, step: int) -> None:
    """This rank's share of the step, as far as it is told. Raises Drained when there is to be no such step."""

    def pull() -> asyncio.Task[Batch]:
        return asyncio.create_task(session.pull("train", slots=0, tokens=config.trainer.micro_batch_tokens, step=step))

    with ranks.excused():
        batch = await pull()
    while not batch.closed:
        following = pull()
        with session.timeline.busy("train"):
            ready = to_training_batch(batch, config, step)
            await ranks.apart(partial(engine.accumulate, ready), f"a pass of step {step}")
        with ranks.excused():
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
        ages=[step - batch.versions(row)[: kept_N[row]] for row in rows],
    )


def save(engine: TrainEngine, config: RunConfig, first: bool = True) -> None:
    """Write the trained model where `AutoModelForCausalLM.from_pretrained` finds it: whole, or not at all.

    Raises EngineError where the disk refuses it; the last step has its checkpoint by then, if there are any.
    """
    path = Path(final_dir(config))
    aside = path.with_name(f".{path.name}.part")
    then = f"make room, then flowrt resume {config.run_dir}" if config.checkpoint.every else "there is no checkpoint"
    with naming(f"the trained model {path}", then):
        if first:
            shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
        engine.export(aside)
        if first:
            load_tokenizer(model_dir(config)).save_pretrained(aside)
            make_certain(aside)
            put_in_place(aside, path)
            sync(path.parent)
    if first:
        log.info("the trained model is %s on host %s", path, socket.gethostname())


if __name__ == "__main__":
    main(TRAINER, run, drains=True)
