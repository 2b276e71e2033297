"""A rollout worker repeats a cancelled pull; running sequences continue, and grants are delivered again."""

import asyncio
from pathlib import Path

import pytest
import torch

from flowrt import api
from flowrt.engines.simulated.engine import SimulatedRollout
from flowrt.engines.simulated.time import ManualSimClock
from flowrt.engines.simulated.workload import GenerationCost, Lengths, Uniform
from flowrt.recipes.grpo import POLICY
from flowrt.roles.rollout import Pulled, RolloutLoop

TIMEOUT_S = 120.0
TOKENS = 3
FLOW = api.Dataflow(
    (
        api.Column("prompt", "int32", "group"),
        api.Column("response", "int32", "slot"),
        api.Column("logprobs", "float32", "slot"),
    ),
    (
        api.Stage("rollout", needs=("prompt",), makes=("response", "logprobs", "truncated"), generates=True),
        api.Stage("read", needs=("response",), makes=()),
    ),
)
POLICIES = api.Policies(api.StrictLag(1), api.Fifo(), api.TokenBudget(1), api.DelayedUpdate())


class ObservedLoop(RolloutLoop):
    """A rollout loop that puts each of its pulls into a queue."""

    pulls: asyncio.Queue["asyncio.Task[Pulled | None]"]

    def _start_pull(self) -> None:
        super()._start_pull()
        assert self._pull is not None
        self.pulls.put_nowait(self._pull)


@pytest.mark.parametrize("in_flight", [False, True])
async def test_a_cancelled_pull_is_repeated(tmp_path: Path, in_flight: bool) -> None:
    engine = SimulatedRollout(GenerationCost(base_s=1.0), Lengths(Uniform(TOKENS, TOKENS)), ManualSimClock(), rows=2)
    async with api.controller(FLOW, api.Settings(), POLICIES, tmp_path) as (server, address), asyncio.timeout(60.0):
        source, rollout, reader = [await api.connect(address, role, role, 60) for role in ("source", "rollout", "read")]
        pulls: asyncio.Queue[asyncio.Task[Pulled | None]] = asyncio.Queue()

        async def generate() -> None:
            rollout.params.applied(POLICY, 0)
            async with asyncio.TaskGroup() as tasks:
                loop = ObservedLoop(rollout, engine, 0, tasks, in_flight=in_flight)
                loop.pulls = pulls
                await loop.run()

        generating = asyncio.create_task(generate())
        cancelled = 0
        for prompt in range(3):
            waiting = await pulls.get()
            waiting.cancel()
            await asyncio.wait([waiting])
            cancelled += waiting.cancelled()
            await source.offer("data", prompt, 0, 1, {"prompt": torch.zeros(2, dtype=torch.int32)})
            batch = await reader.pull("read", 1, deadline_s=TIMEOUT_S)
            assert len(batch.tensors["response"][0]) == TOKENS
            assert not generating.done()
            while pulls.qsize() > 1:
                pulls.get_nowait()
        assert cancelled, "no pull was cancelled"
        generating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await generating
        for session in (source, rollout, reader):
            await session.close()
        assert server.ended is None
