"""One process of a run with a planted cause: a worker of bench/end_to_end/simulated, with the cause in it.

python bench/planted/process.py WORKER ...       as `end_to_end/simulated/process.py`
"""

import asyncio
import dataclasses
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from end_to_end.simulated import roles
from end_to_end.simulated.modes import RunSpec
from end_to_end.simulated.process import main

from flowrt.client.session import Session
from flowrt.engines.simulated.engine import SimulatedTrainer
from flowrt.engines.simulated.time import RealTimeSimClock
from flowrt.ranks.barrier import RankCollectives
from flowrt.ranks.process_group import STORE_VARIABLE
from flowrt.recipes.grpo import POLICY
from flowrt.recipes.tasks.base import Example, TrainingSet
from flowrt.roles.source import offer_all
from flowrt.roles.trainer import Trainer
from planted.plants import READ_S, SAVE_S, SLOW_RANK, SLOW_TRAIN

RANKS_TIMEOUT = timedelta(seconds=60)


async def rollout(session: Session, spec: RunSpec) -> None:
    """As `roles.rollout`; in the run "planted straggler" rollout-1 decodes four times slower."""
    if spec.workload_name == "planted straggler" and session.worker == "rollout-1":
        spec = dataclasses.replace(spec, workload_name="planted slow")
    await roles.rollout(session, spec)


async def source(session: Session, spec: RunSpec) -> None:
    """As `roles.source`; in the run "planted source" it reads slowly."""
    workload = spec.workload

    def columns(problem: Example) -> dict[str, torch.Tensor]:
        if spec.workload_name == "planted source":
            with session.timeline.busy("read"):
                time.sleep(READ_S)
        prompt = torch.zeros(workload.prompt_tokens, dtype=torch.int32)
        prompt[0] = int(problem.prompt)
        return {"prompt": prompt, "answer": torch.zeros(8, dtype=torch.uint8)}

    problems = [Example(str(number), "", "") for number in range(workload.prompts)]
    await offer_all(session, spec.config(), columns, [TrainingSet("", 1.0, problems)])
    session.finished()


async def trainer(session: Session, spec: RunSpec) -> None:
    """Train and publish; save after every step in "planted save"; two ranks, one slow, in "planted rank"."""
    config, pace, cost = spec.config(), RealTimeSimClock(spec.real_s), spec.workload.train
    if spec.workload_name == "planted rank":
        join_ranks(number := int(session.worker == SLOW_RANK))
        cost = SLOW_TRAIN if number else cost
    is_leader = session.worker != SLOW_RANK
    ranks = RankCollectives(session.timeline, session.worker)
    engine = SimulatedTrainer(cost, pace, spec.workload.parameter_bytes)
    rank = Trainer(session, config, engine, ranks)
    for step in range(config.steps):
        await rank.train_step(step)
        with session.timeline.busy("step"):
            metrics = await ranks.call(engine.step, f"step {step}")
        if is_leader:
            session.step_done(step, metrics)
        if spec.workload_name == "planted save":
            with session.timeline.busy("save"):
                await asyncio.to_thread(pace.wait_until, pace.now() + SAVE_S)
        if is_leader and step + 1 < config.steps:
            with session.timeline.busy("snapshot"):
                snapshot = await asyncio.to_thread(engine.snapshot, step + 1)
            await session.params.publish(POLICY, snapshot)
    session.finished()


def join_ranks(rank: int) -> None:
    """The process group of two trainers on this host."""
    store = dist.FileStore(os.environ[STORE_VARIABLE], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=RANKS_TIMEOUT)


if __name__ == "__main__":
    roles.ROLES.update({"rollout": rollout, "source": source, "trainer": trainer})
    main()
