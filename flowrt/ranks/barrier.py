"""Barrier of a trainer's ranks that distinguishes slow ranks from lost ones, and collective calls behind it.

- Inside a collective, torch.distributed fails every rank that is late, and its error names a connection at best. So
  ranks enter this barrier first; its error names the ranks that did not arrive.
- Each rank records its arrival in the store of the process group. A rank that is exempt, i.e. busy with local work of
  unbounded duration that has its own deadline, sends heartbeats and may arrive late.
- While a rank waits, its timeline records the worker that it waits for.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from time import monotonic
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from flowrt.errors import WaitExpired
from flowrt.ids import RANKS
from flowrt.runtime.compute_thread import ComputeThread
from flowrt.runtime.timeline import Timeline
from flowrt.runtime.waits import (
    POLLS_PER_TIMEOUT,
    BoundedElsewhere,
    every,
    poll_while_alive,
    sleep_blocking,
    wait_until,
)

Result = TypeVar("Result")
OTHERS = "the other ranks"
DEADLINE = BoundedElsewhere("trainer.rank_timeout_s, enforced by torch.distributed")
MAX_ERROR_CHARS = 200
MISSING_EVERY_S = 0.25
"""Interval at which a waiting rank reports the first missing one."""


class RankBarrier:
    """A sequence of barriers that all ranks pass in the same order; ``series`` names it within the process group."""

    def __init__(self, series: str) -> None:
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._store = _get_default_store() if self._ranks > 1 else dist.HashStore()
        self._rank = dist.get_rank() if self._ranks > 1 else 0
        self._timeout_s = self._store.timeout.total_seconds()  # type: ignore[attr-defined]  # not in torch's stubs
        self._series = f"flowrt/{series}"
        self._is_exempt = False
        # Continues the count that an earlier barrier of this series has left in the store.
        self._round = self._count(f"{self._series}/{self._rank}")

    def arrive(self, what: str, on_missing: Callable[[int], object] | None = None) -> None:
        """Enter the next barrier; returns when all ranks have.

        Args:
            what: what the ranks wait for, in errors.
            on_missing: called when this rank has to wait, and every `MISSING_EVERY_S` while it does, with the first
                rank that has not arrived; -1 while a rank has not entered any barrier of this series.

        Raises WaitExpired naming the ranks that neither arrived nor sent a heartbeat within the group's timeout.
        """
        if self._ranks == 1:
            return
        begin_s = report_due_s = monotonic()
        self._round += 1
        self._store.set(f"{self._series}/{self._rank}", str(self._round))
        self._store.add(self._series, 1)

        def all_arrived() -> bool:
            nonlocal report_due_s
            # No rank enters a round before all ranks have entered the previous one.
            if self._count(self._series) >= self._round * self._ranks:
                return True
            if on_missing is not None and monotonic() >= report_due_s:
                report_due_s = monotonic() + MISSING_EVERY_S
                on_missing(self._first_missing())
            return False

        if missing := poll_while_alive(all_arrived, self._heartbeats_of_missing, self._timeout_s, what, OTHERS):
            names = ", ".join(map(str, missing))
            raise WaitExpired(
                f"rank {self._rank} waited {monotonic() - begin_s:.0f} s for {what} with {OTHERS}: rank {names} did "
                "not arrive"
            )

    @contextlib.contextmanager
    def exempt(self, limit_s: float = float("inf")) -> Iterator[None]:
        """Within this block the other ranks wait for this rank as long as its process sends heartbeats.

        It sends none after ``limit_s`` seconds.
        """
        if self._ranks == 1:
            yield
            return
        self._is_exempt = True
        end_s = monotonic() + limit_s

        def beat() -> None:
            if monotonic() < end_s:
                self._beat()

        try:
            with every(beat, self._timeout_s / POLLS_PER_TIMEOUT, "heartbeats"):
                yield
        finally:
            self._is_exempt = False

    def unresponsive_ranks(self) -> list[int]:
        """Ranks that have sent no heartbeat for two heartbeat intervals; blocks for that time.

        Empty if this rank is not exempt: the ranks in the same call send heartbeats only if they are exempt too.
        """
        if not self._is_exempt:
            return []
        others = {rank for rank in range(self._ranks) if rank != self._rank}
        try:
            before = {rank: self._count(_heartbeat_key(rank)) for rank in others}
            sleep_blocking(2 * self._timeout_s / POLLS_PER_TIMEOUT)
            return sorted(rank for rank in others if self._count(_heartbeat_key(rank)) == before[rank])
        except dist.DistError:
            return []  # the rank that hosted the store has exited

    def _first_missing(self) -> int:
        keys = [f"{self._series}/{rank}" for rank in range(self._ranks)]
        if not self._store.check(keys):  # a rank has not entered its first round
            return -1
        return next((rank for rank, count in enumerate(self._store.multi_get(keys)) if int(count) < self._round), -1)

    def _heartbeats_of_missing(self) -> dict[int, int]:
        """Heartbeat counts of the ranks that have not arrived, by rank."""
        rounds = {rank: self._count(f"{self._series}/{rank}") for rank in range(self._ranks)}
        return {rank: self._count(_heartbeat_key(rank)) for rank, entered in rounds.items() if entered < self._round}

    def _beat(self) -> None:
        with contextlib.suppress(dist.DistError):  # the rank that hosted the store has exited: the waiting ranks fail
            self._store.add(_heartbeat_key(self._rank), 1)

    def _count(self, key: str) -> int:
        """The counter's value, 0 if absent; `get` of an absent key would block."""
        return int(self._store.get(key)) if self._store.check([key]) else 0


class RankCollectives:
    """Runs calls that all ranks make in the same order, in one thread. With a single rank there is no barrier.

    Inside a call torch.distributed enforces the deadline.
    """

    def __init__(self, timeline: Timeline | None = None, worker: str = "") -> None:
        """Waits for other ranks are added to ``timeline``; ``worker`` is this rank's name in their timelines."""
        self._barrier = RankBarrier("calls")
        self._thread = ComputeThread()
        self._timeline = timeline
        self._waiting = contextlib.ExitStack()  # the open span of the present wait
        self._names: dict[int, str] = {}
        if worker and dist.is_initialized():
            _get_default_store().set(_name_key(dist.get_rank()), worker)

    async def call(self, call: Callable[[], Result], what: str) -> Result:
        """Run ``call`` once all ranks have arrived. Returns its result.

        Raises WaitExpired if a rank does not arrive in time, or is lost during the call; ``what`` names the call.
        """

        loop = asyncio.get_running_loop()

        def on_missing(rank: int) -> None:
            loop.call_soon_threadsafe(self._wait_for, self._name_of(rank))

        def arrive_and_call() -> Result:
            try:
                self._barrier.arrive(what, None if self._timeline is None else on_missing)
            finally:
                loop.call_soon_threadsafe(self._waiting.close)
            return call()

        return await self._run(arrive_and_call, what)

    async def local_call(self, call: Callable[[], Result], what: str) -> Result:
        """Run ``call`` without a barrier: each rank calls at its own pace. Collectives inside may still wait.

        Raises WaitExpired if a rank is lost during the call.
        """
        return await self._run(call, what)

    def exempt(self, limit_s: float = float("inf")) -> contextlib.AbstractContextManager[None]:
        """Context manager for local work of any duration up to ``limit_s`` seconds: the other ranks wait while this
        process is alive.
        """
        return self._barrier.exempt(limit_s)

    def _wait_for(self, worker: str) -> None:
        """Begin a span of waiting for ``worker``; it lasts until the next call or the end of the wait."""
        self._waiting.close()
        if self._timeline is not None:
            self._waiting.enter_context(self._timeline.busy(RANKS, root=worker))

    def _name_of(self, rank: int) -> str:
        """The worker's name of a rank; empty if it is not known."""
        if rank not in self._names:
            store, key = _get_default_store(), _name_key(rank)
            if rank < 0 or not store.check([key]):
                return ""
            self._names[rank] = store.get(key).decode()
        return self._names[rank]

    async def _run(self, call: Callable[[], Result], what: str) -> Result:
        begin_s = monotonic()
        try:
            return await wait_until(self._thread.run(call), DEADLINE, what, OTHERS)
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            lost = await wait_until(asyncio.to_thread(self._barrier.unresponsive_ranks), DEADLINE, "heartbeats", OTHERS)
            reason = f"rank {', '.join(map(str, lost))} is unresponsive" if lost else f"{error}"[:MAX_ERROR_CHARS]
            raise WaitExpired(
                f"rank {dist.get_rank()} waited {monotonic() - begin_s:.0f} s for {what} with {OTHERS}: {reason}"
            ) from error


def _heartbeat_key(rank: int) -> str:
    return f"flowrt/heartbeats/{rank}"


def _name_key(rank: int) -> str:
    return f"flowrt/workers/{rank}"
