"""Dispatch in two lanes: answers that are expected to be long run on workers of their own, in small batches.

In a full batch every token takes longer, so the longest answers, which end last wherever they run, are the ones that
should not share a worker with many others. Which they are is known from earlier epochs; how many of them and how many
workers are set apart is searched anew as slots come and history grows.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from flowrt.controller.crew import Crew
from flowrt.controller.dispatch import FifoQueue, Puller, Queue
from flowrt.controller.history import History
from flowrt.controller.slots import Group, Slot
from flowrt.controller.tail_split import NO_SPLIT, Scenario, Split, best_split
from flowrt.errors import ConfigError
from flowrt.ids import GroupId, WorkerId
from flowrt.wire.records import Stage

PLANS_PER_ROUND = 8
# A search looks at so many ways in which the round may turn out: at more of them the fewer slots there are.
SCENARIO_SLOTS = 6144
LEAST_SCENARIOS = 2
MOST_SCENARIOS = 12
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class TailLanes:
    """Set the longest prompts of a round apart; with a fraction of 0 it is first issued, first served.

    Each lane is served in order of issue. While there are two, slots are leased one at a time, so that those of one
    prompt spread over the workers of their lane. A slot is overtaken by `most_overtaking` later ones at most, whoever
    has been reserved for it; then it goes to whoever pulls next and may start it.
    """

    cost: Callable[[int], float]  # seconds in which so many rows of a worker advance by one token
    round_slots: int  # slots that are generated side by side: those of one step
    fraction: float = 0.2  # of the prompts of a round, the most that are set apart

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ConfigError(f"the tail lane is to have {self.fraction} of all prompts; use a fraction from 0 to 1")
        if self.round_slots < 1:
            raise ConfigError(f"a round of {self.round_slots} slots has no lanes; give the slots of one step")

    def queue(self, stage: Stage) -> Queue:
        return TailQueue(self, stage.name) if stage.generates and self.fraction > 0 else FifoQueue()

    @property
    def most_overtaking(self) -> int:
        """How many later slots can be served before a slot that may start."""
        return self.round_slots + 1


class TailQueue:
    """Two queues in order of issue, and who may take from which. What it gives is to be leased before the next take."""

    is_impartial = False

    def __init__(self, policy: TailLanes, stage: str) -> None:
        self._policy = policy
        self._regular = FifoQueue()
        self._tail = FifoQueue()
        self._history = History()
        self._crew = Crew(stage, forget_after=2 * policy.round_slots)
        self._round: deque[Slot] = deque(maxlen=policy.round_slots)  # the last slots that have come
        self._split = NO_SPLIT
        self._least_tokens = math.inf  # what a prompt that comes after the search must promise to be of the tail
        self._unplanned = 0
        self._latest = -1  # highest slot that was given out

    def __len__(self) -> int:
        return len(self._regular) + len(self._tail)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._regular or slot in self._tail

    def add(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            if slot not in self:
                predicted = self._history.predict(slot.group)
                lane = self._tail if predicted is not None and predicted >= self._least_tokens else self._regular
                lane.add([slot])
                self._round.append(slot)
                self._unplanned += 1

    def discard(self, slot: Slot) -> None:
        self._regular.discard(slot)
        self._tail.discard(slot)

    def made(self, slot: Slot, tokens: int) -> None:
        self._history.learn(slot.group, tokens)

    def take(self, puller: Puller) -> list[Slot]:
        changed = self._crew.meet(puller)
        if changed or self._unplanned >= max(1, self._policy.round_slots // PLANS_PER_ROUND):
            self._plan()
        slots, tail = self._choose(puller)
        self._crew.gave(puller.worker, slots, tail)
        self._latest = max([self._latest, *(slot.id for slot in slots)])
        return slots

    def _choose(self, puller: Puller) -> tuple[list[Slot], bool]:
        """What the puller gets, and whether it is from the tail lane.

        The tail lane is for the reserved workers. The others take from it when their own lane has nothing for them,
        if there is more in it than the reserved ones are going to take, or if they themselves are nearly empty.
        While a reserved worker runs slots of the tail lane its batch stays small; otherwise it works like the others.
        """
        if self._split.workers == 0:
            return self._regular.take(puller), False
        one, worker = replace(puller, room=1), puller.worker
        if overdue := self._overdue(one):
            return overdue.take(one), overdue is self._tail
        small = self._crew.running(worker) < self._split.rows
        reserved = worker in self._crew.reserved
        if reserved and small and (slots := self._tail.take(one)):
            return slots, True
        if reserved and not small and self._crew.tail_running(worker):
            return [], False
        if slots := self._regular.take(one):
            return slots, False
        return self._tail.take(one) if small or len(self._tail) > self._places() else [], True

    def _places(self) -> int:
        """How many more slots of the tail lane the reserved workers are going to take."""
        return sum(max(0, self._split.rows - self._crew.tail_running(worker)) for worker in self._crew.reserved)

    def _overdue(self, one: Puller) -> FifoQueue | None:
        """The lane of the oldest slot that may start, if one issued a whole round later has been given out before."""
        heads: list[tuple[int, FifoQueue]] = []
        for lane in (self._regular, self._tail):
            head = lane.take(one)
            lane.add(head)
            heads += [(slot.id, lane) for slot in head]
        oldest, lane = min(heads, key=lambda head: head[0], default=(self._latest, self._regular))
        return lane if self._latest - oldest > self._policy.round_slots else None

    def _plan(self) -> None:
        """Search the split anew and put the slots of the round that are still here into their lanes."""
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
        self._least_tokens = known[self._split.prompts - 1][0] if lane else math.inf
        self._crew.reserve(self._split.workers)
        self._sort_out(lane)

    def _search(self, ranked: list[Group], samples: dict[GroupId, int], most_prompts: int) -> Split:
        most_prompts = min(most_prompts, len(ranked))
        if not most_prompts or len(self._crew) < 2:
            return NO_SPLIT
        believed = self._history.believed(ranked)
        loads = [(tokens, samples.pop(group.id)) for tokens, group in zip(believed, ranked, strict=True)]
        loads += [(believed[len(believed) // 2], count) for count in samples.values()]  # unknown: as long as most are
        number = max(LEAST_SCENARIOS, min(MOST_SCENARIOS, SCENARIO_SLOTS // len(self._round)))
        spread = self._history.spread()
        scenarios = [_scenario(loads, spread, place / number) for place in range(number)]
        return best_split(scenarios, most_prompts, len(self._crew), self._crew.rows, self._policy.cost)

    def _sort_out(self, lane: set[GroupId]) -> None:
        if not lane:
            self._regular.add(_take_any(self._tail, len(self._tail)))
            return
        for slot in self._round:
            source, target = (self._regular, self._tail) if slot.group.id in lane else (self._tail, self._regular)
            if slot in source:
                source.discard(slot)
                target.add([slot])


def _take_any(lane: FifoQueue, room: int) -> list[Slot]:
    """The oldest, for no worker in particular."""
    return lane.take(Puller(WorkerId(""), room, None, lambda _: 0))


def _scenario(loads: list[tuple[float, int]], spread: list[float], place: float) -> Scenario:
    """One way in which a round may turn out: every sample a different multiple of what is predicted for its prompt.

    The multiples run through the whole spread evenly and out of order, by steps of the golden ratio.
    """
    scenario: list[tuple[float, int]] = []
    for rank, (tokens, samples) in enumerate(loads):
        for _ in range(samples):
            place = (place + GOLDEN) % 1.0
            scenario.append((tokens * spread[int(place * len(spread))], rank))
    scenario.sort(reverse=True)
    return scenario
