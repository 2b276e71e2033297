"""What the processes of a simulated run do: the shipped workers' own loops, around simulated engines."""

import asyncio
from collections.abc import Awaitable, Callable

import torch
from end_to_end.simulated.modes import Play

from flowrt.client.samples import Batch
from flowrt.client.session import Session
from flowrt.client.streams import StageOutput, run_stage
from flowrt.engines.simulated.engine import SimulatedRollout, SimulatedScorer, SimulatedTrainer
from flowrt.engines.simulated.time import RealTimeSimClock
from flowrt.ranks.barrier import RankCollectives
from flowrt.recipes.grpo import POLICY
from flowrt.recipes.tasks.base import Example, TrainingSet
from flowrt.roles.algorithm import algorithm
from flowrt.roles.rollout import RolloutLoop
from flowrt.roles.source import offer_all
from flowrt.roles.trainer import train_step
from flowrt.transport.weights.snapshot import Snapshot

Role = Callable[[Session, Play], Awaitable[None]]


async def source(session: Session, play: Play) -> None:
    """Offer every prompt of an epoch, then the next epoch, until the run has enough."""
    workload = play.workload

    def columns(problem: Example) -> dict[str, torch.Tensor]:
        # A prompt is told from others by its first token.
        prompt = torch.zeros(workload.prompt_tokens, dtype=torch.int32)
        prompt[0] = int(problem.prompt)
        return {"prompt": prompt, "answer": torch.zeros(8, dtype=torch.uint8)}

    problems = [Example(str(number), "", "") for number in range(workload.prompts)]
    await offer_all(session, play.config(), columns, [TrainingSet("", 1.0, problems)])
    session.finished()


async def rollout(session: Session, play: Play) -> None:
    """Generate, and report how long the engine's rows were occupied."""
    workload = play.workload
    engine = SimulatedRollout(
        workload.decode,
        workload.lengths(play.seed),
        RealTimeSimClock(play.real_s),
        rows=workload.rows,
        in_flight=play.mode.in_flight,
    )
    session.params.applied(POLICY, 0)
    try:
        async with asyncio.TaskGroup() as tasks:
            await RolloutLoop(session, engine, play.seed, tasks, in_flight=play.mode.in_flight).run()
    finally:
        session.report({f"row_s of {session.worker}": engine.row_s * play.real_s})


async def reference(session: Session, play: Play) -> None:
    """Score whatever has a response."""
    scorer = SimulatedScorer(play.workload.reference, RealTimeSimClock(play.real_s))

    async def score(batches: list[Batch]) -> StageOutput:
        prompts, responses = _rows(batches, "prompt"), _rows(batches, "response")
        with session.timeline.busy("reference"):
            logprobs = await asyncio.to_thread(scorer.logprobs, prompts, responses)
        return StageOutput({"ref_logprobs": logprobs})

    try:
        await _run_stage(session, "reference", play, score)
    finally:
        session.report({"worked_s of reference": scorer.worked_s * play.real_s})


async def reward(session: Session, play: Play) -> None:
    """Reward whatever has a response."""
    scorer = SimulatedScorer(play.workload.reward, RealTimeSimClock(play.real_s))

    async def score(batches: list[Batch]) -> StageOutput:
        with session.timeline.busy("reward"):
            rewards = await asyncio.to_thread(scorer.rewards, _rows(batches, "response"))
        return StageOutput(inline={"reward": rewards})

    try:
        await _run_stage(session, "reward", play, score)
    finally:
        session.report({"worked_s of reward": scorer.worked_s * play.real_s})


async def _run_stage(
    session: Session, stage: str, play: Play, work: Callable[[list[Batch]], Awaitable[StageOutput]]
) -> None:
    """At most one pass of what there is; with barriers the whole step's samples, once they are all there."""
    slots = play.workload.reference.pass_samples
    if not play.mode.barriers:
        await run_stage(session, stage, slots, lambda batch: work([batch]))
        return
    while True:
        batches: list[Batch] = []
        while sum(map(len, batches)) < play.workload.samples:
            batches.append(await session.pull(stage, slots))
        output = await work(batches)
        await session.commit(stage, *_leased(batches), output.tensors, output.inline)


def _rows(batches: list[Batch], column: str) -> list[torch.Tensor]:
    return [tensor for batch in batches for tensor in batch.tensors[column]]


def _leased(batches: list[Batch]) -> tuple[list[int], list[int]]:
    return [slot for batch in batches for slot in batch.slots], [one for batch in batches for one in batch.leases]


async def trainer(session: Session, play: Play) -> None:
    """Train the run's steps; new weights are sent during the next step."""
    config, workload, pace = play.config(), play.workload, RealTimeSimClock(play.real_s)
    engine = SimulatedTrainer(workload.train, pace, workload.parameter_bytes)

    async def publish(snapshot: Snapshot) -> None:
        await asyncio.to_thread(pace.wait_until, pace.now() + workload.transfer_s)
        await session.params.publish(POLICY, snapshot)

    async with asyncio.TaskGroup() as tasks:
        for step in range(config.steps):
            await train_step(session, config, engine, RankCollectives(), step, algorithm(config))
            with session.timeline.busy("step"):
                metrics = await asyncio.to_thread(engine.step)
            session.step_done(step, metrics)
            worked = "worked_s of trainer" if step else "worked_s of trainer in the first step"
            session.report({worked: engine.worked_s * play.real_s})
            if step + 1 < config.steps:
                with session.timeline.busy("snapshot"):
                    snapshot = await asyncio.to_thread(engine.snapshot, step + 1)
                tasks.create_task(publish(snapshot))
    session.finished()


ROLES: dict[str, Role] = {
    "source": source,
    "rollout": rollout,
    "reference": reference,
    "reward": reward,
    "trainer": trainer,
}
