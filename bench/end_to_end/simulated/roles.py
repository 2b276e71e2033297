"""The roles of a simulated run: the loops of flowrt's workers with simulated engines."""

import asyncio
from collections.abc import Awaitable, Callable

import torch
from end_to_end.simulated.modes import RunSpec

from flowrt.client.sample_tensors import Batch
from flowrt.client.session import Session
from flowrt.client.streams import PULL_INTERVAL_S, StageOutput, run_stage
from flowrt.engines.simulated.engine import SimulatedRollout, SimulatedScorer, SimulatedTrainer
from flowrt.engines.simulated.time import RealTimeSimClock
from flowrt.ranks.barrier import RankCollectives
from flowrt.recipes.grpo import POLICY
from flowrt.recipes.tasks.base import Example, TrainingSet
from flowrt.roles.rollout import RolloutLoop
from flowrt.roles.source import offer_all
from flowrt.roles.trainer import Trainer
from flowrt.transport.weights.snapshot import Snapshot

Role = Callable[[Session, RunSpec], Awaitable[None]]


async def source(session: Session, spec: RunSpec) -> None:
    """Offer every prompt of an epoch, then of the next epoch, until the controller accepts no more."""
    workload = spec.workload

    def columns(problem: Example) -> dict[str, torch.Tensor]:
        # Prompts differ in their first token only.
        prompt = torch.zeros(workload.prompt_tokens, dtype=torch.int32)
        prompt[0] = int(problem.prompt)
        return {"prompt": prompt, "answer": torch.zeros(8, dtype=torch.uint8)}

    problems = [Example(str(number), "", "") for number in range(workload.prompts)]
    await offer_all(session, spec.config(), columns, [TrainingSet("", 1.0, problems)])
    session.finished()


async def rollout(session: Session, spec: RunSpec) -> None:
    """Generate, and report how long the engine's rows were occupied."""
    workload = spec.workload
    engine = SimulatedRollout(
        workload.decode,
        workload.lengths(spec.seed),
        RealTimeSimClock(spec.real_s),
        rows=workload.rows,
        in_flight=spec.mode.in_flight,
    )
    session.params.applied(POLICY, 0)
    try:
        async with asyncio.TaskGroup() as tasks:
            await RolloutLoop(session, engine, spec.seed, tasks, in_flight=spec.mode.in_flight).run()
    finally:
        session.report({f"row_s of {session.worker}": engine.row_s * spec.real_s})


async def reference(session: Session, spec: RunSpec) -> None:
    """Score responses, for the time of the reference model's cost."""
    scorer = SimulatedScorer(spec.workload.reference, RealTimeSimClock(spec.real_s))

    async def score(batches: list[Batch]) -> StageOutput:
        prompts, responses = _rows(batches, "prompt"), _rows(batches, "response")
        with session.timeline.busy("reference"):
            logprobs = await asyncio.to_thread(scorer.logprobs, prompts, responses)
        return StageOutput({"ref_logprobs": logprobs})

    try:
        await _run_stage(session, "reference", spec, score)
    finally:
        session.report({"worked_s of reference": scorer.worked_s * spec.real_s})


async def reward(session: Session, spec: RunSpec) -> None:
    """Reward responses, for the time of the reward's cost."""
    scorer = SimulatedScorer(spec.workload.reward, RealTimeSimClock(spec.real_s))

    async def score(batches: list[Batch]) -> StageOutput:
        with session.timeline.busy("reward"):
            rewards = await asyncio.to_thread(scorer.rewards, _rows(batches, "response"))
        return StageOutput(inline={"reward": rewards})

    try:
        await _run_stage(session, "reward", spec, score)
    finally:
        session.report({"worked_s of reward": scorer.worked_s * spec.real_s})


async def _run_stage(
    session: Session, stage: str, spec: RunSpec, work: Callable[[list[Batch]], Awaitable[StageOutput]]
) -> None:
    """Run a stage on up to one pass of samples at a time; with barriers, on all samples of a step at once."""
    slots = spec.workload.reference.pass_samples
    if not spec.mode.barriers:
        await run_stage(session, stage, slots, lambda batch: work([batch]), PULL_INTERVAL_S)
        return
    while True:
        batches: list[Batch] = []
        while sum(map(len, batches)) < spec.workload.samples:
            batches.append(await session.pull(stage, slots))
        output = await work(batches)
        await session.commit(stage, *_leased(batches), output.tensors, output.inline)


def _rows(batches: list[Batch], column: str) -> list[torch.Tensor]:
    return [tensor for batch in batches for tensor in batch.tensors[column]]


def _leased(batches: list[Batch]) -> tuple[list[int], list[int]]:
    return [slot for batch in batches for slot in batch.slots], [lease for batch in batches for lease in batch.leases]


async def trainer(session: Session, spec: RunSpec) -> None:
    """Train the run's steps; new weights are sent during the next step."""
    config, workload, pace = spec.config(), spec.workload, RealTimeSimClock(spec.real_s)
    engine = SimulatedTrainer(workload.train, pace, workload.parameter_bytes)
    rank = Trainer(session, config, engine, RankCollectives())

    async def publish(snapshot: Snapshot) -> None:
        await asyncio.to_thread(pace.wait_until, pace.now() + workload.transfer_s)
        await session.params.publish(POLICY, snapshot)

    async with asyncio.TaskGroup() as tasks:
        for step in range(config.steps):
            await rank.train_step(step)
            with session.timeline.busy("step"):
                metrics = await asyncio.to_thread(engine.step)
            session.step_done(step, metrics)
            worked = "worked_s of trainer" if step else "worked_s of trainer in the first step"
            session.report({worked: engine.worked_s * spec.real_s})
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
