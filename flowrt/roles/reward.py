"""The reward role: decodes responses and scores them with the run's task."""

import asyncio

from flowrt.client.batch import Batch
from flowrt.client.session import Session
from flowrt.engines.stopping import StopConditions
from flowrt.ids import REWARD
from flowrt.recipes.config import RunConfig
from flowrt.recipes.run_dir import model_dir
from flowrt.recipes.tasks.registry import task_of
from flowrt.roles.filter import with_filter
from flowrt.roles.main import main

MAX_PULL_SLOTS = 256


async def run(session: Session, config: RunConfig) -> None:
    """Score responses with the run's task until the run ends; commits ``reward`` (a float a slot)."""
    with session.timeline.busy("load"):
        task = task_of(config)
        stop = StopConditions.of(model_dir(config), config.rollout.stop, config.data.chat_template)

    def rewards(batch: Batch) -> list[float]:
        scores = []
        columns = batch.tensors["response"], batch.tensors["answer"], batch.inline["truncated"]
        for tokens, answer, truncated in zip(*columns, strict=True):
            # Most tasks score a truncated response as an empty one.
            text = stop.text(tokens.tolist()) if task.scores_truncated or not truncated else ""
            scores.append(task.reward(text, bytes(answer.tolist()).decode()))
        return scores

    try:
        while True:
            batch = await session.pull("reward", slots=MAX_PULL_SLOTS)
            with session.timeline.busy("reward"):
                # User code may block; it must not hold the event loop.
                scores = await asyncio.to_thread(rewards, batch) if task.calls_user_code else rewards(batch)
            await session.commit("reward", batch.slots, batch.leases, inline={"reward": scores})
    finally:
        task.close()


def start() -> None:
    """Entry point of the worker process."""
    main(REWARD, with_filter(run), drains=True)


if __name__ == "__main__":
    start()
