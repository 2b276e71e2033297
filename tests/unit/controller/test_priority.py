"""Priority dispatch: order, ageing, slots that may not start, and the cost of a pull."""

import math
from collections.abc import Collection

import pytest

from flowrt.controller.policies.dispatch.base import Puller, Queue, Start
from flowrt.controller.policies.dispatch.priority import Priority
from flowrt.controller.state.slots import Slot
from flowrt.errors import ConfigError
from flowrt.ids import WorkerId
from flowrt.simulation.dispatch import ROLLOUT, SampleFactory


def urgency(slot: Slot) -> float:
    return slot.inline["urgency"]


def pull(requests: int, not_yet: Collection[int] = (), elsewhere: Collection[int] = ()) -> Puller:
    def may_start(slot: Slot) -> Start:
        return Start.NOT_YET if slot.id in not_yet else Start.ELSEWHERE if slot.id in elsewhere else Start.NOW

    return Puller(WorkerId("w0"), requests, may_start)


def filled(policy: Priority, urgencies: list[float]) -> Queue:
    queue, slots = policy.queue(ROLLOUT), SampleFactory().many(len(urgencies))
    for slot, value in zip(slots, urgencies, strict=True):
        slot.inline = {"urgency": value}
    queue.add(slots)
    return queue


def ids(slots: list[Slot]) -> list[int]:
    return [slot.id for slot in slots]


def test_slots_are_taken_by_urgency_and_then_in_order_of_issue() -> None:
    queue = filled(Priority(urgency, ageing=0.001), [0, 5, 1, 5, 9])
    assert ids(queue.take(pull(3))) == [4, 1, 3]
    assert ids(queue.take(pull(9))) == [2, 0]


def test_ageing_lowers_the_rank_of_later_groups() -> None:
    assert ids(filled(Priority(urgency, ageing=2), [0, 2, 5]).take(pull(3))) == [2, 0, 1]


@pytest.mark.parametrize(("ageing", "expected"), [(1.0, 6), (0.5, 13), (0.3, 23), (7.0, 0), (100.0, 0)])
def test_worst_case_arrivals_reach_the_overtaking_bound_exactly(ageing: float, expected: int) -> None:
    policy, factory = Priority(urgency, ageing), SampleFactory()
    queue = policy.queue(ROLLOUT)
    lowest = factory.many(1)[0]
    lowest.inline = {"urgency": 0.0}
    queue.add([lowest])
    overtaken = 0
    while True:  # each slot that is taken is replaced by one of the largest urgency
        slot = factory.many(1)[0]
        slot.inline = {"urgency": 7.0}
        queue.add([slot])
        if queue.take(pull(1)) == [lowest]:
            break
        overtaken += 1
    assert overtaken == policy.most_overtaking(7.0) == expected


def test_the_urgency_of_a_slot_is_read_when_it_enters_the_queue() -> None:
    policy, slots = Priority(urgency, ageing=0.001), SampleFactory().many(2)
    queue = policy.queue(ROLLOUT)
    for slot in slots:
        slot.inline = {"urgency": 1.0}
    queue.add(slots)
    slots[1].inline = {"urgency": 2.0}
    queue.add(slots)
    assert ids(queue.take(pull(1))) == [0]
    queue.add(slots[:1])
    queue.discard(slots[1])
    queue.add(slots[1:])
    assert ids(queue.take(pull(1))) == [1]


def test_urgent_slots_waiting_for_weights_do_not_block_older_startable_slots() -> None:
    queue = filled(Priority(urgency, ageing=0.001, max_skips=4), [0, 0, *[9.0] * 50])
    blocked = set(range(2, 52))
    assert ids(queue.take(pull(5, not_yet=blocked))) == [0, 1]
    assert queue.take(pull(5, not_yet=blocked)) == []
    assert len(queue) == 50
    assert ids(queue.take(pull(2))) == [2, 3]


def test_a_slot_that_requires_newer_weights_blocks_no_other_slot() -> None:
    queue = filled(Priority(urgency, ageing=0.001, max_skips=1), [0, 1, 9, 9])
    assert ids(queue.take(pull(9, elsewhere={2, 3}))) == [1, 0]
    assert ids(queue.take(pull(9))) == [2, 3]


@pytest.mark.parametrize("ageing", [0.0, -1.0, math.nan, math.inf])
def test_invalid_ageing_and_max_skips_are_refused(ageing: float) -> None:
    with pytest.raises(ConfigError, match="ageing"):
        Priority(urgency, ageing)
    with pytest.raises(ConfigError, match="max_skips"):
        Priority(urgency, 1.0, max_skips=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_urgency_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="slot 0"):
        filled(Priority(urgency, 1.0), [value])


class Counted(float):
    """A number that counts comparisons of ranks."""

    compared = 0

    def __rsub__(self, other: float) -> "Counted":
        return Counted(other - float(self))

    def __lt__(self, other: float) -> bool:
        Counted.compared += 1
        return float(self) < float(other)

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return float(self) == other

    __hash__ = float.__hash__


def comparisons_per_round(ready: int) -> float:
    """Mean number of comparisons in a round of takes and adds, with ``ready`` slots in the queue."""
    urgencies = [Counted((index * 7919 % 1009) / 1009) for index in range(ready)]
    queue = filled(Priority(urgency, ageing=1e-9), list(urgencies))
    Counted.compared = 0
    for _ in range(300):
        queue.add(queue.take(pull(1)))
        slots = queue.take(pull(2))
        queue.discard(slots[0])
        queue.add(slots)
    return Counted.compared / 300


def test_a_pull_needs_a_logarithmic_number_of_comparisons() -> None:
    few, many = comparisons_per_round(1_000), comparisons_per_round(100_000)
    assert few > 10
    assert many <= few * math.log(100_000) / math.log(1_000) * 1.25


def test_discarded_slots_are_removed_from_the_heap() -> None:
    policy, slots = Priority(urgency, ageing=1.0), SampleFactory().many(100)
    queue = policy.queue(ROLLOUT)
    for slot in slots:
        slot.inline = {"urgency": 0.0}
    queue.add(slots)
    for _ in range(200):
        for slot in slots[50:]:
            queue.discard(slot)
        queue.add(slots[50:])
    assert len(queue._by_rank._heap) <= 2 * len(queue) + 64 + 50
    assert ids(queue.take(pull(100))) == list(range(100))
