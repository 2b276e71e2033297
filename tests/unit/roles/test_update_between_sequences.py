"""New weights for a rollout worker with a running sequence: applied in flight, or after the sequence."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from flowrt import api
from flowrt.engines.base import Interrupt, RolloutEngine
from flowrt.engines.hf import named_parameters
from flowrt.engines.simulated.engine import SimulatedRollout
from flowrt.engines.simulated.time import NEVER
from flowrt.engines.simulated.workload import GenerationCost, Lengths, Uniform
from flowrt.engines.stopping import StopConditions
from flowrt.engines.tiny_model import build_model
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.recipes.grpo import POLICY
from flowrt.roles.rollout import RolloutLoop
from flowrt.runtime.clock import DrivenClock

TOKENS, EARLY = 10, 4
TIMEOUT_S = 120.0
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


class PausingClock:
    """A clock that stops after EARLY tokens (one second each) until the engine is interrupted.

    Every later wait ends at once.
    """

    def __init__(self) -> None:
        self._clock = DrivenClock()
        self.paused = threading.Event()

    def now(self) -> float:
        return self._clock.now()

    def wait_until(self, at_s: float, interrupt: Interrupt = NEVER) -> None:
        if at_s <= self.now():
            return
        if self.paused.is_set():
            self._clock.advance(at_s - self.now())
            return
        self._clock.advance(EARLY)
        self.paused.set()
        if not interrupt.wait(TIMEOUT_S):
            raise TimeoutError("the engine was not interrupted")


async def generate(session: api.Session, engine: RolloutEngine, in_flight: bool) -> None:
    session.params.applied(POLICY, 0)
    async with asyncio.TaskGroup() as tasks:
        await RolloutLoop(session, engine, 0, tasks, in_flight=in_flight).run()


async def versions_of_two(address: str, in_flight: bool) -> list[list[int]]:
    """The version of each token of two consecutive samples; version 1 arrives while the first one runs.

    Without ``in_flight`` only the grant of the second prompt interrupts the engine: the worker then has the weights,
    a running sequence, and a prompt that it could start.
    """
    sim_clock, lengths = PausingClock(), Lengths(Uniform(TOKENS, TOKENS))
    engine = SimulatedRollout(GenerationCost(base_s=1.0), lengths, sim_clock, rows=2, in_flight=in_flight)
    source, rollout, reader = [await api.connect(address, role, role, 60) for role in ("source", "rollout", "read")]

    async def offer(prompt: int) -> None:
        await source.offer("data", prompt, 0, 1, {"prompt": torch.zeros(2, dtype=torch.int32)})

    try:
        async with asyncio.TaskGroup() as tasks:
            await offer(0)
            generating = tasks.create_task(generate(rollout, engine, in_flight))
            assert await asyncio.to_thread(sim_clock.paused.wait, TIMEOUT_S)
            await source.params.publish(POLICY, api.Snapshot.take(1, {"w": torch.ones(2)}))
            if not in_flight:
                await asyncio.wait_for(rollout.params.wait_staged(), TIMEOUT_S)
                await offer(1)
            first = await reader.pull("read", 1, deadline_s=TIMEOUT_S)
            if in_flight:
                await offer(1)
            second = await reader.pull("read", 1, deadline_s=TIMEOUT_S)
            generating.cancel()
        return [batch.versions(0).tolist() for batch in (first, second)]
    finally:
        for session in (source, rollout, reader):
            await session.close()


@pytest.mark.parametrize("in_flight", [True, False])
async def test_only_an_in_flight_update_mixes_versions_in_a_sequence(tmp_path: Path, in_flight: bool) -> None:
    """The versions are those that a reader receives with committed samples; the next sequence has the new one."""
    async with api.controller(FLOW, api.Settings(), POLICIES, tmp_path) as (_, address):
        first, second = await versions_of_two(address, in_flight)
    assert first == ([0] * EARLY + [1] * (TOKENS - EARLY) if in_flight else [0] * TOKENS)
    assert second == [1] * TOKENS


@pytest.mark.slow
async def test_the_torch_engine_swaps_in_flight_weights_prepared_meanwhile(tmp_path: Path) -> None:
    model = build_model(
        vocab_size=24, hidden_size=32, layers=2, heads=2, intermediate_size=64, max_length=4096, seed=1
    ).eval()
    engine = TorchRollout(model, stop=StopConditions((99,)), rows=4, max_new_tokens=1500, temperature=1.0)
    published = [api.Snapshot.take(version, named_parameters(model)) for version in (1, 2)]
    async with api.controller(FLOW, api.Settings(), POLICIES, tmp_path) as (_, address):
        source, rollout, reader = [await api.connect(address, role, role, 60) for role in ("source", "rollout", "read")]
        async with asyncio.TaskGroup() as tasks:
            generating = tasks.create_task(generate(rollout, engine, in_flight=True))
            await source.offer("data", 0, 0, 1, {"prompt": torch.ones(2, dtype=torch.int32)})
            async with asyncio.timeout(TIMEOUT_S):
                # Otherwise the last version may generate the whole sample.
                while not engine.running:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            for snapshot in published:
                await source.params.publish(POLICY, snapshot)
            batch = await reader.pull("read", 1, deadline_s=6 * TIMEOUT_S)
            generating.cancel()
        for session in (source, rollout, reader):
            await session.close()
    versions = batch.versions(0).tolist()
    assert (versions, engine.version) == (sorted(versions), 2)
    assert len(set(versions)) >= 2
    assert engine._shadow.cached is not None, "no weights were prepared"
