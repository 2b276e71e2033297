"""A rollout worker that notes when its engine ran and when it swapped; on demand one that stands still for updates."""

import asyncio
import threading
import time
from itertools import pairwise
from pathlib import Path

import torch
from common.links import Orders
from weight_sync.roles import JOIN_S, MODEL, small_model

from flowrt.api import Session, Snapshot, connect
from flowrt.engines.base import Interrupt, Response
from flowrt.engines.hf import named_parameters
from flowrt.engines.stopping import StopConditions
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.net.curve_keys import worker_keys
from flowrt.protocol.messages import ReceiveWeights
from flowrt.roles.rollout import RolloutLoop

ROWS, MAX_NEW, EOS = 8, 128, 1
LONGEST_BLOCK_S = 30.0
WAYS = ("boundary", "inflight", "kept", "blocking")
"""When new weights are put into use: between sequences; between decode steps, with the keys and values of what runs
computed again or kept; before anything else is done, as in a loop without delayed updates."""
Span = tuple[float, float]


class TimedRollout(TorchRollout):
    """Notes its spans of work; runs only while ``may_run`` is set."""

    def begin(self) -> None:
        self.may_run = threading.Event()
        self.may_run.set()
        self.forget()

    def forget(self) -> None:
        self.runs: list[Span] = []
        self.swaps: list[Span] = []
        self.tokens = 0

    def run(self, interrupt: Interrupt) -> list[Response]:
        self.may_run.wait(LONGEST_BLOCK_S)
        begun_s = time.monotonic()
        finished = super().run(interrupt)
        self.runs.append((begun_s, time.monotonic()))
        return finished

    def _sample(self, rows: slice, logits_RV: torch.Tensor) -> None:
        super()._sample(rows, logits_RV)
        self.tokens += len(logits_RV)

    def swap(self, snapshot: Snapshot) -> None:
        begun_s = time.monotonic()
        super().swap(snapshot)
        self.swaps.append((begun_s, time.monotonic()))


def stalls(runs: list[Span], updates: list[Span]) -> list[float]:
    """The lengths of the gaps between runs in which an update took place."""
    gaps = [(before[1], after[0]) for before, after in pairwise(runs)]
    return [end - begin for begin, end in gaps if any(at < end and done > begin for at, done in updates)]


class BlockingUpdates:
    """Generation stands still from the order to fetch a version until it is here."""

    def __init__(self, session: Session, engine: TimedRollout, loop: RolloutLoop) -> None:
        self.on = False
        self.spans: list[Span] = []
        self._session = session
        self._engine = engine
        self._loop = loop
        self._fetch = session.params.receive
        session.params.receive = self.fetch  # type: ignore[method-assign]

    def fetch(self, order: ReceiveWeights) -> None:
        self._fetch(order)
        if self.on:
            self._engine.may_run.clear()
            self._loop._interrupt.set()
            self._waiting = asyncio.create_task(self._wait(time.monotonic()))

    async def _wait(self, begun_s: float) -> None:
        await self._session.params.wait_staged(MODEL)
        self._engine.may_run.set()
        self.spans.append((begun_s, time.monotonic()))


class Generating:
    """The worker's orders."""

    async def join(self, address: str, keys: Path) -> None:
        torch.set_num_threads(1)
        self.session = await connect(address, "rollout", "rollout", JOIN_S, worker_keys(keys, "rollout"))
        model = small_model()
        self.tensors = named_parameters(model)
        self.engine = TimedRollout(
            model, stop=StopConditions((EOS,)), rows=ROWS, max_new_tokens=MAX_NEW, temperature=1.0
        )
        self.engine.begin()

    async def swap_ms(self, times: int) -> list[float]:
        """Of the swap alone, milliseconds each, for as many versions."""
        snapshots = [Snapshot.take(version, self.tensors) for version in range(2)]
        for number in range(times):
            self.engine.swap(snapshots[number % 2])
        self.engine.version = 0
        return [1000 * (end - begin) for begin, end in self.engine.swaps]

    async def start(self) -> None:
        self.session.params.applied(MODEL, 0)
        started: asyncio.Future[RolloutLoop] = asyncio.get_running_loop().create_future()
        self.generating = asyncio.create_task(self._generate(started))
        self.loop = await started
        self.blocking = BlockingUpdates(self.session, self.engine, self.loop)

    async def _generate(self, started: "asyncio.Future[RolloutLoop]") -> None:
        async with asyncio.TaskGroup() as tasks:
            loop = RolloutLoop(self.session, self.engine, 0, tasks)
            started.set_result(loop)
            await loop.run()

    async def measure(self, seconds: float, way: str) -> dict[str, float]:
        """Generate for ``seconds`` while updates arrive; they are put into use in one of the WAYS."""
        self.engine.forget()
        self.blocking.on = way == "blocking"
        self.loop._in_flight = way in ("inflight", "kept")
        self.engine._recompute = way != "kept"
        self.blocking.spans.clear()
        begun_s = time.monotonic()
        await asyncio.sleep(seconds)
        if self.generating.done():
            self.generating.result()
        wall_s = time.monotonic() - begun_s
        stood = stalls(self.engine.runs, self.engine.swaps + self.blocking.spans)
        return {
            "versions": len(self.engine.swaps),
            "stall_fraction": sum(stood) / wall_s,
            "stall_ms": 1000 * sum(stood) / max(1, len(self.engine.swaps)),
            "tokens_per_s": self.engine.tokens / wall_s,
        }


def generating() -> Orders:
    worker = Generating()
    return {name: getattr(worker, name) for name in ("join", "swap_ms", "start", "measure")}
