"""The workers of a small training run without tensors, with their sessions in one process. A child of a bench."""

import asyncio
import os
import time

from common.children import serve_commands_on_loop

from flowrt.client.session import Session, connect
from flowrt.runtime.event_loop import run_loop

JOIN_S = 60.0
ROOM = 64
TOKENS = 32


async def offer(source: Session, groups: int, members: int) -> None:
    """Offer the prompts of a step at a time, until the controller accepts no more."""
    prompt = 0
    while True:
        prompts = range(prompt, prompt + groups)
        if await source.offer_many("train", prompts, 0, members, tags={"prompt": [1.0] * groups * members}) is None:
            return
        prompt += groups


async def generate(rollout: Session) -> None:
    rollout.params.applied("policy", 0)
    while True:
        batch = await rollout.pull("rollout", ROOM)
        spans = [(0, TOKENS)] * len(batch)
        outputs = {"response": batch.inline["prompt"]}
        await rollout.commit("rollout", batch.slots, batch.leases, inline=outputs, spans=spans)


async def score(reward: Session) -> None:
    while True:
        batch = await reward.pull("reward", ROOM)
        await reward.commit("reward", batch.slots, batch.leases, inline={"reward": batch.inline["response"]})


async def train(trainer: Session, steps: int) -> int:
    """Train all steps; returns the number of samples."""
    samples = 0
    for step in range(steps):
        while not (batch := await trainer.pull("train", 0, step=step)).closed:
            samples += len(batch)
        trainer.step_done(step, {})
    return samples


async def run(address: str, steps: int, groups: int, members: int) -> float:
    """Run the training; returns the seconds from the first offer to the last step."""
    source, rollout, reward, trainer = [
        await connect(address, role, role, JOIN_S) for role in ("source", "rollout", "reward", "trainer")
    ]
    start_s = time.monotonic()
    others = [asyncio.create_task(work) for work in (offer(source, groups, members), generate(rollout), score(reward))]
    samples = await train(trainer, steps)
    seconds = time.monotonic() - start_s
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for session in (source, rollout, reward, trainer):
        await session.close()
    if samples != steps * groups * members:
        raise ValueError(f"{samples} samples were trained in {steps} steps of {groups} groups of {members}")
    return seconds


if __name__ == "__main__":
    run_loop(serve_commands_on_loop({"run": run}, os.getpid()))
