"""A rollout worker that records when its engine ran and swapped; optionally it pauses for each update."""

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
"""When new weights are used: between sequences (boundary); between decode steps, with the KV cache recomputed
(inflight) or kept (kept); or at once, with generation paused during the fetch (blocking)."""
Span = tuple[float, float]


class TimedRollout(TorchRollout):
    """Records its runs and swaps (monotonic seconds). A run waits for ``may_run``, at most LONGEST_BLOCK_S seconds."""

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

    def _sample_rows(self, rows: slice, logits_RV: torch.Tensor) -> None:
        super()._sample_rows(rows, logits_RV)
        self.tokens += len(logits_RV)

    def swap(self, snapshot: Snapshot) -> None:
        begun_s = time.monotonic()
        super().swap(snapshot)
        self.swaps.append((begun_s, time.monotonic()))


def stalls(runs: list[Span], updates: list[Span]) -> list[float]:
    """Lengths in seconds of the gaps between runs that overlap an update."""
    gaps = [(before[1], after[0]) for before, after in pairwise(runs)]
    return [end - begin for begin, end in gaps if any(at < end and done > begin for at, done in updates)]


class BlockingUpdates:
    """While ``on``, pauses generation from the order to fetch a version until that version is staged."""

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


class RolloutWorker:
    """The commands of the rollout worker's process."""

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
        """Milliseconds of each of ``times`` swaps, without any transfer."""
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
        """Generate for ``seconds`` while versions arrive, which are used in one of the WAYS.

        Returns the number of swaps, the share of time stalled, the milliseconds stalled per swap, and tokens/s.
        """
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
        stalled_s = stalls(self.engine.runs, self.engine.swaps + self.blocking.spans)
        return {
            "versions": len(self.engine.swaps),
            "stall_fraction": sum(stalled_s) / wall_s,
            "stall_ms": 1000 * sum(stalled_s) / max(1, len(self.engine.swaps)),
            "tokens_per_s": self.engine.tokens / wall_s,
        }


def rollout_orders() -> Orders:
    worker = RolloutWorker()
    return {name: getattr(worker, name) for name in ("join", "swap_ms", "start", "measure")}
