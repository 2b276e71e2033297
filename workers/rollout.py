"""A rollout worker: pulls slots as sequences finish, generates, swaps weights between sequences."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any

from flowrt.workers.engines import rollout_engine, sglang_engine
from flowrt.workers.entry import main

from flowrt.client.batches import Batch
from flowrt.client.params import StagedWeights
from flowrt.client.session import Session
from flowrt.engines.protocols import Prompt, Response, RolloutEngine
from flowrt.engines.seeds import sample_seed
from flowrt.errors import Drained
from flowrt.recipes.config import RunConfig
from flowrt.recipes.grpo import EVAL, POLICY
from flowrt.waiting import CONTROLLER, Guard, first_of

LEASE, PULL = Guard("the lease on what is generated"), Guard("the deadline of the pull, or the end of the session")


async def run(session: Session, config: RunConfig) -> None:
    """Generate with the engine that the configuration names until the run ends."""
    if config.rollout.engine == "torch":
        with session.timeline.busy("load"):
            engine = await asyncio.to_thread(rollout_engine, config)
        await generate(session, config, engine)
        return
    server = await asyncio.to_thread(sglang_engine, config, session.worker)
    with contextlib.closing(server):
        with session.timeline.busy("load"):
            await session.unless_ended(asyncio.to_thread(server.start))
        await generate(session, config, server)


async def generate(session: Session, config: RunConfig, engine: RolloutEngine) -> None:
    """Generate until the run ends; the engine has the weights that the run starts from."""
    session.params.applied(POLICY, 0)
    async with asyncio.TaskGroup() as tasks:
        in_flight = config.rollout.swap == "inflight"
        await RolloutLoop(session, engine, config.seed, tasks, in_flight=in_flight).run()


class RolloutLoop:
    """Keeps the engine full, and its weights as new as its sequences allow.

    New weights are put into use between sequences: once they are here, nothing is begun until everything has ended.
    With ``in_flight`` (for engines that can) they are put into use at once, and what runs goes on with them. What an
    engine can do for that beside its generation (``prepare``) is done first.
    """

    def __init__(
        self, session: Session, engine: RolloutEngine, seed: int, tasks: asyncio.TaskGroup, *, in_flight: bool = False
    ) -> None:
        self._session = session
        self._engine = engine
        self._seed = seed
        self._tasks = tasks
        self._in_flight = in_flight
        self._interrupt = threading.Event()
        self._pull: asyncio.Task[Batch | None] | None = None
        # By number: a slot may come back, under another lease, while what was begun of it before still runs here.
        self._running: dict[int, tuple[int, int]] = {}
        self._begun = 0
        self._leaving = False
        self._chosen: StagedWeights | None = None  # what is prepared, in flight
        self._preparing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Runs until the session ends, and raises what ended it, or until nothing runs in a worker that is leaving."""
        while self._engine.running or not self._leaving:
            await self._swap_if_safe()
            if self._session.params.staged() is None or self._preparing is not None:
                self._admit()
                if self._pull is None and self._engine.room and not self._leaving:
                    self._start_pull()
            if self._engine.running:
                await self._generate()
            elif not self._leaving and (self._pull is None or not self._pull.done()):
                await self._wait_for_work()

    async def _generate(self) -> None:
        self._interrupt.clear()
        staged = self._session.params.staged() is not None and self._preparing is None
        if (staged and self._in_flight) or (not staged and self._pull is not None and self._pull.done()):
            return
        with self._session.timeline.busy("generate"):
            run = asyncio.to_thread(self._engine.run, self._interrupt)
            finished = await (self._until_staged(run) if self._in_flight else run)
        if finished:
            self._tasks.create_task(self._commit(finished))

    async def _until_staged(self, run: Coroutine[Any, Any, list[Response]]) -> list[Response]:
        """What the engine has finished when it comes back; it is called back as soon as new weights are here."""
        running = asyncio.create_task(run)
        waited = self._session.params.wait_staged() if self._preparing is None else _done(self._preparing)
        staged = asyncio.create_task(self._session.unless_ended(waited))
        try:
            await first_of({running, staged}, LEASE, "the engine, or newer weights", "this worker's engine")
            self._interrupt.set()
            finished = await running
            if staged.done():
                staged.result()  # raises what ended the session
            return finished
        finally:
            self._interrupt.set()
            staged.cancel()

    async def _wait_for_work(self) -> None:
        staged = asyncio.create_task(self._session.unless_ended(self._session.params.wait_staged()))
        waits = {staged} if self._pull is None else {staged, self._pull}
        try:
            await first_of(waits, PULL, "slots, or newer weights", CONTROLLER)
            if staged.done():
                staged.result()  # raises what ended the session
        finally:
            staged.cancel()

    async def _swap_if_safe(self) -> None:
        staged = self._chosen or self._session.params.staged()
        if staged is None or (self._in_flight and await self._prepares(staged)):
            return
        if self._in_flight or not self._engine.running:
            with self._session.timeline.busy("swap"):
                await asyncio.to_thread(self._engine.swap, staged.snapshot)
            self._session.params.applied(staged.model, staged.snapshot.version)
            self._chosen = None

    async def _prepares(self, staged: StagedWeights) -> bool:
        """Whether there is something to do for these weights while the engine goes on generating.

        They are put into use before any that come meanwhile: else none might ever be, where they come fast.
        """
        if self._preparing is not None:
            if self._engine.running and not self._preparing.done():
                return True
            await _done(self._preparing)
            self._preparing.result()
            self._preparing = None
        prepare = getattr(self._engine, "prepare", None)
        work = None if prepare is None else prepare(staged.snapshot)
        if work is not None:
            self._chosen, self._preparing = staged, asyncio.create_task(asyncio.to_thread(work))
        return work is not None

    def _start_pull(self) -> None:
        self._pull = self._tasks.create_task(self._pulled(self._engine.room))
        self._pull.add_done_callback(lambda _: self._interrupt.set())

    async def _pulled(self, slots: int) -> Batch | None:
        """None when this worker is to leave: an error would take the group's other tasks, what runs, along."""
        try:
            return await self._session.pull("rollout", slots=slots)
        except Drained:
            return None

    def _admit(self) -> None:
        """Give what was pulled to the engine."""
        if self._pull is None or not self._pull.done():
            return
        pull, self._pull = self._pull, None
        if pull.cancelled():
            return  # whoever cancelled it did not mean what runs: the next one asks again
        batch = pull.result()
        if batch is None:
            self._leaving = True
            return
        grant = batch.grant
        prompts = []
        for row, slot in enumerate(batch.slots):
            self._begun += 1
            self._running[self._begun] = slot, grant.lease
            seed = sample_seed(
                self._seed, grant.prompts[row], grant.epochs[row], grant.members[row], grant.attempts[row]
            )
            prompts.append(Prompt(self._begun, batch.tensors["prompt"][row], seed, greedy=batch.flows[row] == EVAL))
        self._engine.add(prompts)

    async def _commit(self, finished: list[Response]) -> None:
        slots, leases = zip(*(self._running.pop(response.key) for response in finished), strict=True)
        await self._session.commit(
            "rollout",
            slots,
            leases,
            {"response": [one.tokens for one in finished], "logprobs": [one.logprobs for one in finished]},
            spans=[one.spans for one in finished],
        )


async def _done(preparing: asyncio.Task[None]) -> None:
    await first_of({preparing}, LEASE, "newer weights to be prepared", "this worker's engine")


if __name__ == "__main__":
    main("rollout", run, drains=True)
