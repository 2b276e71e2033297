"""Most urgent first: ranks, ageing, slots that may not start, and what a pull costs."""

import math
from collections.abc import Collection

import pytest

from flowrt.controller.policies.dispatch.base import Puller, Queue, Start
from flowrt.controller.policies.dispatch.priority import Priority
from flowrt.controller.state.samples import Slot
from flowrt.errors import ConfigError
from flowrt.ids import WorkerId
from flowrt.simulation.dispatch import ROLLOUT, SampleFactory


def urgency(slot: Slot) -> float:
    return slot.inline["urgency"]


def pull(requests: int, not_yet: Collection[int] = (), elsewhere: Collection[int] = ()) -> Puller:
    def may_start(slot: Slot) -> Start:
        return Start.NOT_YET if slot.id in not_yet else Start.ELSEWHERE if slot.id in elsewhere else Start.NOW

    return Puller(WorkerId("w0"), requests, may_start, lambda slot: 0)


def filled(policy: Priority, urgencies: list[float]) -> Queue:
    queue, slots = policy.queue(ROLLOUT), SampleFactory().many(len(urgencies))
    for slot, value in zip(slots, urgencies, strict=True):
        slot.inline = {"urgency": value}
    queue.add(slots)
    return queue


def ids(slots: list[Slot]) -> list[int]:
    return [slot.id for slot in slots]


def test_the_most_urgent_come_first_and_equals_in_order_of_issue() -> None:
    queue = filled(Priority(urgency, ageing=0.001), [0, 5, 1, 5, 9])
    assert ids(queue.take(pull(3))) == [4, 1, 3]
    assert ids(queue.take(pull(9))) == [2, 0]


def test_a_later_group_starts_behind_by_its_ageing() -> None:
    assert ids(filled(Priority(urgency, ageing=2), [0, 2, 5]).take(pull(3))) == [2, 0, 1]


@pytest.mark.parametrize(("ageing", "expected"), [(1.0, 6), (0.5, 13), (0.3, 23), (7.0, 0), (100.0, 0)])
def test_the_bound_on_overtaking_is_met_exactly_by_the_worst_arrivals(ageing: float, expected: int) -> None:
    policy, issuing = Priority(urgency, ageing), SampleFactory()
    queue = policy.queue(ROLLOUT)
    calm = issuing.many(1)[0]
    calm.inline = {"urgency": 0.0}
    queue.add([calm])
    overtaken = 0
    while True:  # one most urgent slot comes for every one that leaves
        slot = issuing.many(1)[0]
        slot.inline = {"urgency": 7.0}
        queue.add([slot])
        if queue.take(pull(1)) == [calm]:
            break
        overtaken += 1
    assert overtaken == policy.most_overtaking(7.0) == expected


def test_a_slot_keeps_the_urgency_it_came_with_until_it_comes_again() -> None:
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


def test_urgent_slots_that_wait_for_weights_do_not_hide_old_ones_that_may_start() -> None:
    queue = filled(Priority(urgency, ageing=0.001, max_skips=4), [0, 0, *[9.0] * 50])
    late = set(range(2, 52))
    assert ids(queue.take(pull(5, not_yet=late))) == [0, 1]
    assert queue.take(pull(5, not_yet=late)) == []
    assert len(queue) == 50
    assert ids(queue.take(pull(2))) == [2, 3]


def test_one_that_waits_for_its_own_weights_holds_up_nobody() -> None:
    queue = filled(Priority(urgency, ageing=0.001, max_skips=1), [0, 1, 9, 9])
    assert ids(queue.take(pull(9, elsewhere={2, 3}))) == [1, 0]
    assert ids(queue.take(pull(9))) == [2, 3]


@pytest.mark.parametrize("ageing", [0.0, -1.0, math.nan, math.inf])
def test_a_priority_without_ageing_is_refused(ageing: float) -> None:
    with pytest.raises(ConfigError, match="ageing"):
        Priority(urgency, ageing)
    with pytest.raises(ConfigError, match="max_skips"):
        Priority(urgency, 1.0, max_skips=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_urgency_that_cannot_be_compared_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="slot 0"):
        filled(Priority(urgency, 1.0), [value])


class Counted(float):
    """Counts how often ranks are compared."""

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


def comparisons_a_turn(ready: int) -> float:
    """Of taking one and adding one, with so many ready."""
    urgencies = [Counted((index * 7919 % 1009) / 1009) for index in range(ready)]
    queue = filled(Priority(urgency, ageing=1e-9), list(urgencies))
    Counted.compared = 0
    for _ in range(300):
        queue.add(queue.take(pull(1)))
        slots = queue.take(pull(2))
        queue.discard(slots[0])
        queue.add(slots)
    return Counted.compared / 300


def test_a_pull_costs_log_n() -> None:
    few, many = comparisons_a_turn(1_000), comparisons_a_turn(100_000)
    assert few > 10
    assert many <= few * math.log(100_000) / math.log(1_000) * 1.25


def test_what_leaves_from_the_middle_is_swept() -> None:
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
