"""One process of a run with a planted cause: the workers of bench/end_to_end/simulated, with what is planted in them.

python -m planted.process WORKER ...       as `end_to_end.simulated.process`
"""

import asyncio
import dataclasses
import time

import torch
from end_to_end.simulated import roles
from end_to_end.simulated.modes import Play
from end_to_end.simulated.process import main

from flowrt.client.session import Session
from flowrt.engines.simulated.engine import SimulatedTrainer
from flowrt.engines.simulated.time import RealTimeSimClock
from flowrt.ranks.barrier import RankCollectives
from flowrt.recipes.grpo import POLICY
from flowrt.recipes.tasks.base import Example, TrainingSet
from flowrt.roles.algorithm import algorithm
from flowrt.roles.source import offer_all
from flowrt.roles.trainer import train_step
from planted.plants import READ_S, SAVE_S


async def rollout(session: Session, play: Play) -> None:
    """As `roles.rollout`; one worker of the straggler's run decodes four times slower."""
    if play.workload_name == "planted straggler" and session.worker == "rollout-1":
        play = dataclasses.replace(play, workload_name="planted slow")
    await roles.rollout(session, play)


async def source(session: Session, play: Play) -> None:
    """As `roles.source`; that of its run reads slowly."""
    workload = play.workload

    def columns(problem: Example) -> dict[str, torch.Tensor]:
        if play.workload_name == "planted source":
            with session.timeline.busy("read"):
                time.sleep(READ_S)
        prompt = torch.zeros(workload.prompt_tokens, dtype=torch.int32)
        prompt[0] = int(problem.prompt)
        return {"prompt": prompt, "answer": torch.zeros(8, dtype=torch.uint8)}

    problems = [Example(str(number), "", "") for number in range(workload.prompts)]
    await offer_all(session, play.config(), columns, [TrainingSet("", 1.0, problems)])
    session.finished()


async def trainer(session: Session, play: Play) -> None:
    """Train and publish; the trainer of its run saves after every step."""
    config, pace = play.config(), RealTimeSimClock(play.real_s)
    engine = SimulatedTrainer(play.workload.train, pace)
    for step in range(config.steps):
        await train_step(session, config, engine, RankCollectives(), step, algorithm(config))
        with session.timeline.busy("step"):
            metrics = await asyncio.to_thread(engine.step)
        session.step_done(step, metrics)
        if play.workload_name == "planted save":
            with session.timeline.busy("save"):
                await asyncio.to_thread(pace.wait_until, pace.now() + SAVE_S)
        if step + 1 < config.steps:
            with session.timeline.busy("snapshot"):
                snapshot = await asyncio.to_thread(engine.snapshot, step + 1)
            await session.params.publish(POLICY, snapshot)
    session.finished()


if __name__ == "__main__":
    roles.ROLES.update({"rollout": rollout, "source": source, "trainer": trainer})
    main()
