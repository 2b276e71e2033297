"""How long a batch of generations takes under a dispatch policy: continuous batching with a driven clock.

Every worker has a number of rows. All rows that it runs advance together, one token each in ``cost(rows running)``
seconds, so a long answer is slow in a full batch and fast in an empty one. Workers pull whenever they have room,
again after every grant, and at no cost; nothing here is drawn at random.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flowrt.controller.dispatch import Dispatch, Puller, Queue
from flowrt.controller.slots import NO_STEP, Lease, Slot
from flowrt.ids import LeaseId, WorkerId
from flowrt.testing.issuing import Issuing
from flowrt.wire.records import Stage

ROLLOUT = Stage("rollout", ("prompt",), ("response",), generates=True)

Step = Mapping[int, Sequence[int]]
"""The prompts of one synchronous step, in order of issue: how many tokens each of its samples gets."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal workers."""

    workers: int
    rows: int  # slots that one works on at once
    cost: Callable[[int], float]  # seconds in which so many rows advance by one token


@dataclass(slots=True)
class _Worker:
    name: WorkerId
    at_s: float = 0.0
    tokens: float = 0.0  # that every row has advanced since the beginning
    running: list[tuple[float, int]] = field(default_factory=list)  # (tokens at which it ends, slot), a heap
    alarms: int = 0  # an alarm of an earlier number is void: the batch has changed since

    def advance(self, now_s: float, cost: Callable[[int], float]) -> None:
        if self.running:
            self.tokens += (now_s - self.at_s) / cost(len(self.running))
        self.at_s = now_s

    def next_end_s(self, cost: Callable[[int], float]) -> float:
        return self.at_s + max(0.0, self.running[0][0] - self.tokens) * cost(len(self.running))


class Makespan:
    """Runs synchronous steps one after another through one queue, which keeps what it has learned."""

    def __init__(self, dispatch: Dispatch, cluster: Cluster) -> None:
        self.queue: Queue = dispatch.queue(ROLLOUT)
        self._cluster = cluster
        self._workers = [_Worker(WorkerId(f"rollout{number}")) for number in range(cluster.workers)]
        self._alarms: list[tuple[float, int, int]] = []  # (moment, worker, number of the alarm)
        self._tokens_of: dict[int, int] = {}
        self._slots: dict[int, Slot] = {}
        self._now_s = 0.0
        self._issuing = Issuing()

    def run(self, step: Step, epoch: int = 0) -> float:
        """Seconds until every sample of the step is generated."""
        begin_s = self._now_s
        self.queue.add(self._issue(step, epoch))
        self._serve()
        while self._alarms:
            now_s, number, alarm = heapq.heappop(self._alarms)
            worker = self._workers[number]
            if alarm != worker.alarms:
                continue
            self._now_s = now_s
            worker.advance(now_s, self._cluster.cost)
            # The row of the alarm ends whatever rounding says; others that end with it go too.
            worker.tokens = max(worker.tokens, worker.running[0][0])
            while worker.running and worker.running[0][0] <= worker.tokens:
                _, slot_id = heapq.heappop(worker.running)
                slot = self._slots.pop(slot_id)
                del slot.leases[ROLLOUT.name]
                self.queue.made(slot, self._tokens_of.pop(slot_id))
            self._set_alarm(number)
            self._serve()
        if len(self.queue) or self._slots:
            raise AssertionError(f"{len(self.queue)} slots are ready and every worker is idle: the dispatch holds back")
        return self._now_s - begin_s

    def _issue(self, step: Step, epoch: int) -> Iterator[Slot]:
        for prompt, lengths in step.items():
            for slot, tokens in zip(self._issuing.group(len(lengths), prompt, epoch).slots, lengths, strict=True):
                self._slots[slot.id], self._tokens_of[slot.id] = slot, tokens
                yield slot

    def _serve(self) -> None:
        """Pulls in turn; who got something and has room left pulls again behind the others."""
        turns = deque(n for n, worker in enumerate(self._workers) if len(worker.running) < self._cluster.rows)
        while turns and len(self.queue):
            number = turns.popleft()
            if self._pull(number) and len(self._workers[number].running) < self._cluster.rows:
                turns.append(number)

    def _pull(self, number: int) -> bool:
        worker, cluster = self._workers[number], self._cluster
        room = cluster.rows - len(worker.running)
        slots = self.queue.take(Puller(worker.name, room, None, lambda _: 0))
        if slots:
            worker.advance(self._now_s, cluster.cost)
            for slot in slots:
                slot.leases[ROLLOUT.name] = Lease(
                    LeaseId(slot.id), ROLLOUT.name, worker.name, math.inf, 0, NO_STEP, {slot.id: slot}
                )
                heapq.heappush(worker.running, (worker.tokens + self._tokens_of[slot.id], slot.id))
            self._set_alarm(number)
        return bool(slots)

    def _set_alarm(self, number: int) -> None:
        worker = self._workers[number]
        worker.alarms += 1
        if worker.running:
            heapq.heappush(self._alarms, (worker.next_end_s(self._cluster.cost), number, worker.alarms))
