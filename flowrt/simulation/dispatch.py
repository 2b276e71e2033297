"""Simulation of synchronous generation steps under a dispatch policy: continuous batching in virtual time.

All running rows of a worker advance together, by one token each in ``cost(running rows)`` seconds, so a long response
is slow in a full batch and fast in an empty one. Workers pull whenever they have room, and again after each grant;
pulls take no time.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flowrt.controller.policies.dispatch.base import Dispatch, Puller, Queue
from flowrt.controller.state.slots import NO_STEP, Group, Lease, Slot
from flowrt.ids import GroupId, LeaseId, SlotId, WorkerId
from flowrt.protocol.messages import Stage

ROLLOUT = Stage("rollout", ("prompt",), ("response",), generates=True)

Step = Mapping[int, Sequence[int]]
"""One synchronous step: for each prompt, in order of issue, the response lengths of its samples in tokens."""


@dataclass(slots=True)
class SampleFactory:
    """Makes groups and slots outside a `SampleTable`, with ids in order of issue as the table assigns them."""

    groups: int = 0
    """Number of groups made so far, which is the id of the next one."""
    slots: int = 0
    """Number of slots made so far, which is the id of the next one."""

    def group(self, members: int = 1, prompt: int = 0, epoch: int = 0) -> Group:
        """A new group and its slots."""
        group = Group(group_id=GroupId(self.groups), flow="train", prompt=prompt, epoch=epoch, at_least=0)
        self.groups += 1
        group.slots = [Slot(SlotId(self.slots + member), group, member) for member in range(members)]
        self.slots += members
        return group

    def many(self, groups: int, members: int = 1) -> list[Slot]:
        """The slots of ``groups`` new groups, each with its own prompt."""
        return [slot for _ in range(groups) for slot in self.group(members, prompt=self.groups).slots]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Identical workers."""

    workers: int
    rows: int
    """Most slots that one worker runs at the same time."""
    cost: Callable[[int], float]
    """Seconds in which all of this many running rows advance by one token."""


@dataclass(slots=True)
class _Worker:
    name: WorkerId
    at_s: float = 0.0
    tokens: float = 0.0  # by which a row that always ran would have advanced since the beginning
    running: list[tuple[float, int]] = field(default_factory=list)  # heap of (``tokens`` at the end of the row, slot)
    timer: int = 0  # number of the newest event; earlier ones are ignored, because the batch has changed

    def advance(self, now_s: float, cost: Callable[[int], float]) -> None:
        if self.running:
            self.tokens += (now_s - self.at_s) / cost(len(self.running))
        self.at_s = now_s

    def next_end_s(self, cost: Callable[[int], float]) -> float:
        return self.at_s + max(0.0, self.running[0][0] - self.tokens) * cost(len(self.running))


class DispatchSimulator:
    """Runs synchronous steps one after another through one queue, which keeps its statistics of response lengths."""

    def __init__(self, dispatch: Dispatch, cluster: Cluster) -> None:
        self.queue: Queue = dispatch.queue(ROLLOUT)
        self._cluster = cluster
        self._workers = [_Worker(WorkerId(f"rollout{number}")) for number in range(cluster.workers)]
        self._events: list[tuple[float, int, int]] = []  # heap of (time, index of the worker, number of the event)
        self._tokens_of: dict[int, int] = {}
        self._slots: dict[int, Slot] = {}
        self._now_s = 0.0
        self._samples = SampleFactory()

    def run(self, step: Step, epoch: int = 0) -> float:
        """Run one step. Returns the virtual seconds until every sample of it is generated.

        Raises AssertionError if the queue holds back slots while every worker is idle.
        """
        begin_s = self._now_s
        self.queue.add(self._issue(step, epoch))
        self._serve()
        while self._events:
            now_s, number, timer = heapq.heappop(self._events)
            worker = self._workers[number]
            if timer != worker.timer:
                continue
            self._now_s = now_s
            worker.advance(now_s, self._cluster.cost)
            # The row of this event ends, whatever the rounding; so do rows that end at the same time.
            worker.tokens = max(worker.tokens, worker.running[0][0])
            while worker.running and worker.running[0][0] <= worker.tokens:
                _, slot_id = heapq.heappop(worker.running)
                slot = self._slots.pop(slot_id)
                del slot.leases[ROLLOUT.name]
                self.queue.on_generated(slot, self._tokens_of.pop(slot_id))
            self._set_timer(number)
            self._serve()
        if len(self.queue) or self._slots:
            raise AssertionError(
                f"{len(self.queue)} slots are ready and every worker is idle: the dispatch policy holds them back"
            )
        return self._now_s - begin_s

    def _issue(self, step: Step, epoch: int) -> Iterator[Slot]:
        for prompt, lengths in step.items():
            for slot, tokens in zip(self._samples.group(len(lengths), prompt, epoch).slots, lengths, strict=True):
                self._slots[slot.id], self._tokens_of[slot.id] = slot, tokens
                yield slot

    def _serve(self) -> None:
        """Let workers with room pull in turn. A worker with room left after a grant pulls again, after the others."""
        turns = deque(n for n, worker in enumerate(self._workers) if len(worker.running) < self._cluster.rows)
        while turns and len(self.queue):
            number = turns.popleft()
            if self._pull(number) and len(self._workers[number].running) < self._cluster.rows:
                turns.append(number)

    def _pull(self, number: int) -> bool:
        worker, cluster = self._workers[number], self._cluster
        room = cluster.rows - len(worker.running)
        slots = self.queue.take(Puller(worker.name, room, None))
        if slots:
            worker.advance(self._now_s, cluster.cost)
            for slot in slots:
                slot.leases[ROLLOUT.name] = Lease(
                    id=LeaseId(slot.id),
                    stage=ROLLOUT.name,
                    worker=worker.name,
                    deadline_s=math.inf,
                    version=0,
                    step=NO_STEP,
                    slots={slot.id: slot},
                )
                heapq.heappush(worker.running, (worker.tokens + self._tokens_of[slot.id], slot.id))
            self._set_timer(number)
        return bool(slots)

    def _set_timer(self, number: int) -> None:
        worker = self._workers[number]
        worker.timer += 1
        if worker.running:
            heapq.heappush(self._events, (worker.next_end_s(self._cluster.cost), number, worker.timer))
