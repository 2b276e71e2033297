"""Length-aware dispatch in two lanes: prompts with long expected answers run on reserved workers, in small batches.

Each token takes longer in a full batch, so the longest answers, which end last on any worker, should share a worker
with few others. They are predicted from earlier epochs; the numbers of such prompts and of reserved workers are
searched again as slots arrive and the history grows.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from flowrt.controller.policies.dispatch.base import FifoQueue, Puller, Queue
from flowrt.controller.policies.dispatch.length_aware.history import History
from flowrt.controller.policies.dispatch.length_aware.pullers import PullerStats
from flowrt.controller.policies.dispatch.length_aware.search import NO_SPLIT, Scenario, Split, best_split
from flowrt.controller.state.samples import Group, Slot
from flowrt.errors import ConfigError
from flowrt.ids import GroupId, WorkerId
from flowrt.protocol.messages import Stage

PLANS_PER_ROUND = 8
# Number of slots over all scenarios of a search: the fewer slots a round has, the more scenarios.
SCENARIO_SLOTS = 6144
MIN_SCENARIOS = 2
MAX_SCENARIOS = 12
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class LengthAware:
    """Give the longest prompts of a round a lane of their own; with a fraction of 0 it is FIFO.

    Each lane is served in order of issue. While there are two, slots are leased one at a time, so that those of one
    prompt spread over the workers of their lane. A slot is overtaken by at most `most_overtaking` later ones; then the
    next puller that may start it gets it, reserved or not.
    """

    cost: Callable[[int], float]  # seconds per decoding step of a worker, by number of rows
    round_slots: int  # slots that are generated at the same time: those of one step
    fraction: float = 0.2  # maximum fraction of the prompts of a round in the tail lane

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ConfigError(f"the tail lane is to have {self.fraction} of all prompts; use a fraction from 0 to 1")
        if self.round_slots < 1:
            raise ConfigError(f"a round of {self.round_slots} slots has no lanes; give the slots of one step")

    def queue(self, stage: Stage) -> Queue:
        return LengthAwareQueue(self, stage.name) if stage.generates and self.fraction > 0 else FifoQueue()

    @property
    def most_overtaking(self) -> int:
        """The maximum number of later slots that are served before a slot that may start."""
        return self.round_slots + 1


class LengthAwareQueue:
    """Two FIFO queues, and which worker takes from which. Slots must be leased before the next `take`."""

    is_impartial = False

    def __init__(self, policy: LengthAware, stage: str) -> None:
        self._policy = policy
        self._regular = FifoQueue()
        self._tail = FifoQueue()
        self._history = History()
        self._pullers = PullerStats(stage, remove_after=2 * policy.round_slots)
        self._round: deque[Slot] = deque(maxlen=policy.round_slots)  # the latest slots added
        self._split = NO_SPLIT
        self._tail_threshold_tokens = math.inf  # predicted tokens from which a new prompt joins the tail lane
        self._unplanned = 0
        self._latest = -1  # highest slot id that was taken

    def __len__(self) -> int:
        return len(self._regular) + len(self._tail)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._regular or slot in self._tail

    def add(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            if slot not in self:
                predicted = self._history.predict(slot.group)
                lane = (
                    self._tail if predicted is not None and predicted >= self._tail_threshold_tokens else self._regular
                )
                lane.add([slot])
                self._round.append(slot)
                self._unplanned += 1

    def discard(self, slot: Slot) -> None:
        self._regular.discard(slot)
        self._tail.discard(slot)

    def on_generated(self, slot: Slot, tokens: int) -> None:
        self._history.learn(slot.group, tokens)

    def take(self, puller: Puller) -> list[Slot]:
        changed = self._pullers.observe(puller)
        if changed or self._unplanned >= max(1, self._policy.round_slots // PLANS_PER_ROUND):
            self._plan()
        slots, tail = self._choose(puller)
        self._pullers.record_taken(puller.worker, slots, tail)
        self._latest = max([self._latest, *(slot.id for slot in slots)])
        return slots

    def _choose(self, puller: Puller) -> tuple[list[Slot], bool]:
        """The slots for the puller, and whether they are from the tail lane.

        The tail lane is for the reserved workers. The others take from it when the regular lane has nothing for them,
        if it has more than the reserved workers have room for, or if they themselves run few slots.
        While a reserved worker runs slots of the tail lane its batch stays small; otherwise it works like the others.
        """
        if self._split.workers == 0:
            return self._regular.take(puller), False
        one, worker = replace(puller, room=1), puller.worker
        if overdue := self._overdue(one):
            return overdue.take(one), overdue is self._tail
        small = self._pullers.running(worker) < self._split.rows
        reserved = worker in self._pullers.reserved
        if reserved and small and (slots := self._tail.take(one)):
            return slots, True
        if reserved and not small and self._pullers.tail_running(worker):
            return [], False
        if slots := self._regular.take(one):
            return slots, False
        return self._tail.take(one) if small or len(self._tail) > self._reserved_room() else [], True

    def _reserved_room(self) -> int:
        """Room of the reserved workers for slots of the tail lane."""
        return sum(max(0, self._split.rows - self._pullers.tail_running(worker)) for worker in self._pullers.reserved)

    def _overdue(self, one: Puller) -> FifoQueue | None:
        """The lane of the oldest slot that may start, if a slot issued a whole round later was taken before it."""
        heads: list[tuple[int, FifoQueue]] = []
        for lane in (self._regular, self._tail):
            head = lane.take(one)
            lane.add(head)
            heads += [(slot.id, lane) for slot in head]
        oldest, lane = min(heads, key=lambda head: head[0], default=(self._latest, self._regular))
        return lane if self._latest - oldest > self._policy.round_slots else None

    def _plan(self) -> None:
        """Search a new split and move the queued slots of the round to their lanes."""
        self._unplanned = 0
        samples: dict[GroupId, int] = {}
        groups: list[Group] = []
        for slot in self._round:
            if slot.group.id not in samples:
                groups.append(slot.group)
            samples[slot.group.id] = samples.get(slot.group.id, 0) + 1
        known = [(tokens, group) for group in groups if (tokens := self._history.predict(group)) is not None]
        known.sort(key=lambda item: (-item[0], item[1].id))
        self._split = self._search([group for _, group in known], samples, int(self._policy.fraction * len(groups)))
        lane = {group.id for _, group in known[: self._split.prompts]}
        self._tail_threshold_tokens = known[self._split.prompts - 1][0] if lane else math.inf
        self._pullers.reserve(self._split.workers)
        self._move_to_lanes(lane)

    def _search(self, ranked: list[Group], samples: dict[GroupId, int], max_prompts: int) -> Split:
        max_prompts = min(max_prompts, len(ranked))
        if not max_prompts or len(self._pullers) < 2:
            return NO_SPLIT
        lengths = self._history.shrunk_means(ranked)
        loads = [(tokens, samples.pop(group.id)) for tokens, group in zip(lengths, ranked, strict=True)]
        loads += [
            (lengths[len(lengths) // 2], count) for count in samples.values()
        ]  # unknown prompts: the median length
        number = max(MIN_SCENARIOS, min(MAX_SCENARIOS, SCENARIO_SLOTS // len(self._round)))
        spread = self._history.spread()
        scenarios = [_scenario(loads, spread, place / number) for place in range(number)]
        return best_split(scenarios, max_prompts, len(self._pullers), self._pullers.rows, self._policy.cost)

    def _move_to_lanes(self, lane: set[GroupId]) -> None:
        if not lane:
            self._regular.add(_take_any(self._tail, len(self._tail)))
            return
        for slot in self._round:
            source, target = (self._regular, self._tail) if slot.group.id in lane else (self._tail, self._regular)
            if slot in source:
                source.discard(slot)
                target.add([slot])


def _take_any(lane: FifoQueue, room: int) -> list[Slot]:
    """The oldest slots, for any worker."""
    return lane.take(Puller(WorkerId(""), room, None, lambda _: 0))


def _scenario(loads: list[tuple[float, int]], spread: list[float], place: float) -> Scenario:
    """One possible outcome of a round: each sample has a different multiple of its prompt's predicted length.

    The multiples cover the spread evenly in a scattered order (steps of the golden ratio).
    """
    scenario: list[tuple[float, int]] = []
    for rank, (tokens, samples) in enumerate(loads):
        for _ in range(samples):
            place = (place + GOLDEN) % 1.0
            scenario.append((tokens * spread[int(place * len(spread))], rank))
    scenario.sort(reverse=True)
    return scenario
