"""Length-aware dispatch in two lanes: prompts with long expected answers run on reserved workers, in small batches.

Each token takes longer in a full batch, so the longest answers, which end last on any worker, should share a worker
with few others. The numbers of such prompts and of reserved workers are searched again as slots arrive and the history
grows.

- Lengths are predicted from the responses to the same prompt in earlier epochs; a prompt without history goes to the
  regular lane.
- With a fraction of 0 this is the default, first issued, first served.
- The slots that `take` returns must be leased before the next `take`: running slots are counted by their leases.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from flowrt.controller.policies.dispatch.base import FifoQueue, Puller, Queue
from flowrt.controller.state.slots import Group, Slot
from flowrt.errors import ConfigError
from flowrt.ids import GroupId, WorkerId
from flowrt.protocol.messages import Stage


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds per decoding step of ``rows`` sequences: a constant for reading the weights, plus a cost per row.

    Raises ConfigError for negative times, or if both are 0.
    """

    base_s: float
    per_row_s: float

    def __post_init__(self) -> None:
        if self.base_s < 0 or self.per_row_s < 0 or self.base_s + self.per_row_s == 0:
            raise ConfigError(
                f"decoding costs {self.base_s} s and {self.per_row_s} s per row; give times, not both of them 0"
            )

    def __call__(self, rows: int) -> float:
        return self.base_s + self.per_row_s * rows


def completion_s(tokens: Sequence[float], cost: Callable[[int], float]) -> float:
    """Seconds until the last of these sequences ends if all start together in one batch; exact.

    While j rows run, every step costs cost(j) seconds: T = sum over j of L_j * (cost(j) - cost(j - 1)), where L_j is
    the j-th longest length in tokens, and cost(0) = 0.
    """
    total, slower = 0.0, 0.0
    for row, length in enumerate(sorted(tokens, reverse=True), 1):
        faster, slower = slower, cost(row)
        total += length * (slower - faster)
    return total


def pool_s(tokens: Sequence[float], workers: int, rows: int, cost: Callable[[int], float]) -> float:
    """Predicted seconds of a pool of equal workers; sequences, longest first, are assigned round robin.

    The result is the time of the worker with the longest sequence. A sequence without a free row waits for the first
    row that ends. Rows of one worker advance together, so a row with several sequences counts as one of their total
    length.

    Args:
        tokens: lengths of the sequences, longest first.
        workers: number of workers.
        rows: maximum number of sequences that a worker runs at a time.
        cost: seconds per decoding step by number of rows.
    """
    longest_share = tokens[::workers]
    chains = list(longest_share[:rows])
    if len(longest_share) > rows:
        heapq.heapify(chains)
        for length in longest_share[rows:]:
            heapq.heapreplace(chains, chains[0] + length)
    return completion_s(chains, cost)


EXHAUSTIVE = 12  # all numbers of prompts up to this are tried, and about one in five beyond
TIE_FACTOR = 1.03  # accuracy of predictions: within this factor of the best, the split with the fewest workers wins

Scenario = Sequence[tuple[float, int]]
"""One possible outcome of a round: (tokens, rank of the prompt) of each sample, longest first."""


@dataclass(frozen=True, slots=True)
class Split:
    """The ``prompts`` prompts of the longest predicted answers go to ``workers`` workers.

    Each of these runs ``rows`` of their samples; ``latency_s`` is the predicted time until both pools have ended.
    """

    prompts: int
    workers: int
    rows: int
    latency_s: float


NO_SPLIT = Split(0, 0, 0, math.inf)


def best_split(
    scenarios: Sequence[Scenario], max_prompts: int, workers: int, rows: int, cost: Callable[[int], float]
) -> Split:
    """The split with the least predicted time of the slower pool, on average over the scenarios.

    A split without prompts is one pool of all workers. All samples of the tail lane start at once: a split without
    enough rows for them is not considered. Of splits within `TIE_FACTOR` of the best, the one with the fewest workers
    wins.

    Args:
        scenarios: possible outcomes of the round, each with the same prompts.
        max_prompts: maximum number of prompts in the tail lane.
        workers: number of workers of both pools.
        rows: maximum number of sequences that a worker runs at a time.
        cost: seconds per decoding step by number of rows.
    """
    unsplit_s = [pool_s([tokens for tokens, _ in scenario], workers, rows, cost) for scenario in scenarios]
    splits = [Split(0, 0, 0, _mean(unsplit_s))]
    for prompts in _tried(max_prompts):
        lanes = [[tokens for tokens, rank in scenario if rank < prompts] for scenario in scenarios]
        rests = [[tokens for tokens, rank in scenario if rank >= prompts] for scenario in scenarios]
        for reserved in range(max(1, math.ceil(len(lanes[0]) / rows)), workers):
            lanes_s = [pool_s(lane, reserved, rows, cost) for lane in lanes]
            rests_s = [pool_s(rest, workers - reserved, rows, cost) for rest in rests]
            latency_s = _mean(list(map(max, lanes_s, rests_s)))
            splits.append(Split(prompts, reserved, math.ceil(len(lanes[0]) / reserved), latency_s))
            if all(map(float.__le__, lanes_s, rests_s)):
                break  # with more reserved workers the other pool, already the slower one, only gets slower
    least_s = min(split.latency_s for split in splits)
    near = [split for split in splits if split.latency_s <= TIE_FACTOR * least_s]
    return min(near, key=lambda split: (split.workers, split.latency_s))


def _tried(most: int) -> Iterator[int]:
    prompts = 1
    while prompts < most:
        yield prompts
        prompts += max(1, prompts // 5) if prompts >= EXHAUSTIVE else 1
    if most > 0:
        yield most


@dataclass(slots=True)
class _Member:
    rows: int = 0  # maximum seen so far
    seen: int = 0  # slots that all workers had taken from the queue at the time of this worker's last pull
    slots: dict[int, tuple[Slot, bool]] = field(default_factory=dict)  # slots it took, and whether from the tail lane

    def pull(self, room: int, running: int, seen: int) -> bool:
        """Record a pull; returns True if the worker has more rows than at any earlier pull."""
        self.seen = seen
        # A parked pull may predate the end of some rows: then the worker has more room than it asks for.
        rows = max(self.rows, running + room)
        has_grown = rows != self.rows
        self.rows = rows
        return has_grown

    def running(self, worker: WorkerId, stage: str) -> dict[int, tuple[Slot, bool]]:
        """The taken slots on which the worker still has a lease; the others are forgotten."""
        self.slots = {
            slot_id: (slot, tail)
            for slot_id, (slot, tail) in self.slots.items()
            if (lease := slot.leases.get(stage)) is not None and lease.worker == worker
        }
        return self.slots


class PullerStats:
    """The workers that pull, their rows and running slots.

    A queue is not told that a worker left: a worker is removed when more than ``remove_after`` slots were taken since
    its last pull. A slot counts as running while the worker that took it has a lease on it, so slots must be leased
    before the next take.
    """

    def __init__(self, stage: str, remove_after: int) -> None:
        self._stage = stage
        self._remove_after = remove_after  # slots taken since a worker's last pull
        self._taken = 0
        self._members: dict[WorkerId, _Member] = {}  # least recent pull first
        self.reserved: frozenset[WorkerId] = frozenset()

    def __len__(self) -> int:
        return len(self._members)

    @property
    def rows(self) -> int:
        """Rows of the worker that has the fewest."""
        return min((member.rows for member in self._members.values()), default=0)

    def observe(self, puller: Puller) -> bool:
        """Record a pull; returns True if that changes the workers or their rows."""
        member = self._members.pop(puller.worker, None) or _Member()
        self._members[puller.worker] = member
        changed = member.pull(puller.room, self.running(puller.worker), self._taken)
        oldest = next(iter(self._members))
        if self._taken - self._members[oldest].seen > self._remove_after:
            del self._members[oldest]
            changed = True
        return changed

    def record_taken(self, worker: WorkerId, slots: list[Slot], tail: bool) -> None:
        """Record the slots that a worker has taken; ``tail``: from the tail lane."""
        self._taken += len(slots)
        self._members[worker].slots.update((slot.id, (slot, tail)) for slot in slots)

    def reserve(self, workers: int) -> None:
        """Reserve this number of workers: the same workers each time, as long as none joins or is removed."""
        self.reserved = frozenset(sorted(self._members)[:workers])

    def running(self, worker: WorkerId) -> int:
        """Number of slots that the worker runs."""
        return len(self._leased(worker))

    def tail_running(self, worker: WorkerId) -> int:
        """Number of slots of the tail lane that the worker runs."""
        return sum(tail for _, tail in self._leased(worker).values())

    def _leased(self, worker: WorkerId) -> dict[int, tuple[Slot, bool]]:
        return self._members[worker].running(worker, self._stage)


MEMORY = 16  # samples: about the last two epochs of a prompt
RECENT = 512  # samples from which the variance within a prompt is estimated
MAX_PROMPTS = 1_000_000  # beyond this, the least recently sampled prompt is removed


@dataclass(slots=True)
class History:
    """The mean response length of each prompt in tokens; an exponential mean after ``memory`` samples."""

    memory: int = MEMORY
    prompts: int = MAX_PROMPTS
    _mean: dict[tuple[str, int], tuple[float, int]] = field(default_factory=dict)  # with the number of samples
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  # actual over predicted length

    def learn(self, group: Group, tokens: int) -> None:
        """Add the response length of a sample of this group's prompt."""
        prompt = (group.flow, group.prompt)
        mean, samples = self._mean.pop(prompt, (0.0, 0))
        if mean > 0:
            self._ratios.append(tokens / mean)
        samples = min(samples + 1, self.memory)
        self._mean[prompt] = (mean + (tokens - mean) / samples, samples)
        if len(self._mean) > self.prompts:
            del self._mean[next(iter(self._mean))]

    def predict(self, group: Group) -> float | None:
        """The predicted length in tokens; None for a prompt without samples."""
        known = self._mean.get((group.flow, group.prompt))
        return None if known is None else known[0]

    def shrunk_means(self, groups: Sequence[Group]) -> list[float]:
        """Predictions of known groups in tokens, shrunk towards their mean by the part of their variance due to chance.

        Means of few samples differ even if all prompts are alike. The variance within a prompt gives the expected
        variance of the means; only the excess is kept (shrinkage of log lengths).
        """
        known = [self._mean[group.flow, group.prompt] for group in groups]
        logs = [math.log(max(1.0, mean)) for mean, _ in known]
        within = _variance([math.log(max(1e-3, ratio)) for ratio in self._ratios])
        chance = within * _mean([1 / samples for _, samples in known])
        total = _variance(logs)
        weight = max(0.0, 1 - chance / total) if total > 0 else 0.0
        middle = _mean(logs)
        return [math.exp(middle + weight * (log - middle)) for log in logs]

    def spread(self) -> list[float]:
        """Recent ratios of actual to predicted length in ascending order; [1.0] before the first."""
        return sorted(self._ratios) or [1.0]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    return _mean([(value - mean) ** 2 for value in values])


PLANS_PER_ROUND = 8
# Approximate number of slots over all scenarios of a search: the fewer slots a round has, the more scenarios.
SCENARIO_SLOTS = 6144
MIN_SCENARIOS = 2
MAX_SCENARIOS = 12
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class LengthAware:
    """Give the longest prompts of a round a lane of their own; with a fraction of 0 it is FIFO.

    Each lane is served in order of issue. While there are two lanes, slots are leased one at a time, so that the slots
    of a prompt spread over the workers of their lane. A slot is overtaken by at most `most_overtaking` later slots;
    then the next puller that may start it gets it, reserved or not. Raises ConfigError for a value out of range.
    """

    cost: Callable[[int], float]  # seconds per decoding step of a worker, by number of rows
    round_slots: int  # slots that are generated at the same time: the slots of one step
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
    """A FIFO queue for each lane; each worker is served from one. Slots must be leased before the next `take`."""

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

        The tail lane is for the reserved workers. Another worker takes from it only if the regular lane has no slot for
        that worker, and either the worker runs few slots or the tail lane has more than the reserved workers have room
        for. While a reserved worker runs slots of the tail lane its batch stays small; otherwise it is served like the
        others.
        """
        if self._split.workers == 0:
            return self._regular.take(puller), False
        single, worker = replace(puller, room=1), puller.worker
        if overdue := self._overdue(single):
            return overdue.take(single), overdue is self._tail
        small = self._pullers.running(worker) < self._split.rows
        reserved = worker in self._pullers.reserved
        if reserved and small and (slots := self._tail.take(single)):
            return slots, True
        if reserved and not small and self._pullers.tail_running(worker):
            return [], False
        if slots := self._regular.take(single):
            return slots, False
        return self._tail.take(single) if small or len(self._tail) > self._reserved_room() else [], True

    def _reserved_room(self) -> int:
        """Room of the reserved workers for slots of the tail lane."""
        return sum(max(0, self._split.rows - self._pullers.tail_running(worker)) for worker in self._pullers.reserved)

    def _overdue(self, puller: Puller) -> FifoQueue | None:
        """The lane of the oldest slot that may start, if a slot issued more than a round later was taken before it."""
        heads: list[tuple[int, FifoQueue]] = []
        for lane in (self._regular, self._tail):
            head = lane.take(puller)
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
    return lane.take(Puller(WorkerId(""), room, None))


def _scenario(loads: list[tuple[float, int]], spread: list[float], place: float) -> Scenario:
    """One possible outcome of a round: each sample has a different multiple of its prompt's predicted length.

    The multiples cover ``spread`` evenly in a scattered order: ``place``, from 0 to 1, advances by the golden ratio.
    """
    scenario: list[tuple[float, int]] = []
    for rank, (tokens, samples) in enumerate(loads):
        for _ in range(samples):
            place = (place + GOLDEN) % 1.0
            scenario.append((tokens * spread[int(place * len(spread))], rank))
    scenario.sort(reverse=True)
    return scenario
