"""Ready queues, who gets which slot, when a micro-batch is full, and the admission arithmetic."""

import pytest

from flowrt.controller.admission import StrictLag
from flowrt.controller.dispatch import Fifo, GroupCount, ReadyQueue, TokenBudget
from flowrt.controller.slots import Group, Slot
from flowrt.errors import ConfigError
from flowrt.ids import GroupId, SlotId

GROUP = Group(GroupId(0), "train", 0, 0, 0)
SLOTS = [Slot(SlotId(number), GROUP, number) for number in range(5)]


def filled(*items: int) -> ReadyQueue:
    queue = ReadyQueue()
    for item in items:
        queue.add(item)
    return queue


def test_a_ready_queue_is_in_order_of_issue_not_of_arrival() -> None:
    assert list(filled(5, 1, 3).oldest_first()) == [1, 3, 5]


def test_looking_removes_nothing() -> None:
    queue = filled(2, 1, 3)
    for item in queue.oldest_first():
        if item == 2:
            break
    assert list(queue.oldest_first()) == list(queue.oldest_first()) == [1, 2, 3]


def test_what_is_discarded_is_gone_even_while_someone_looks() -> None:
    queue = filled(1, 2, 3)
    for item in queue.oldest_first():
        queue.discard(item)
        if item == 2:
            break
    assert list(queue.oldest_first()) == [3]
    assert len(queue) == 1
    assert 1 not in queue


def test_discard_and_add_again_keeps_one_entry_in_its_old_place() -> None:
    queue = filled(1, 2, 3)
    for _ in range(3):
        queue.discard(1)
        queue.add(1)
    queue.add(2)
    assert list(queue.oldest_first()) == [1, 2, 3]
    assert len(queue) == 3


def test_discarding_what_is_not_there_is_nothing() -> None:
    queue = filled(1)
    queue.discard(9)
    assert list(queue.oldest_first()) == [1]


def test_first_issued_is_first_served() -> None:
    assert Fifo().choose(iter(SLOTS), 3, lambda slot: True) == SLOTS[:3]
    assert Fifo().choose(iter(SLOTS), 9, lambda slot: True) == SLOTS
    assert Fifo().choose(iter(SLOTS), 0, lambda slot: True) == []


def test_nobody_overtakes_a_slot_that_may_not_start_yet() -> None:
    assert Fifo().choose(iter(SLOTS), 5, lambda slot: slot.id != 2) == SLOTS[:2]


def test_a_token_budget_is_full_at_its_number_of_tokens() -> None:
    assert [TokenBudget(10).full(1, tokens) for tokens in (9, 10, 11)] == [False, True, True]


def test_a_group_count_is_full_at_its_number_of_groups() -> None:
    assert [GroupCount(2).full(groups, 10**9) for groups in (0, 1, 2, 3)] == [False, False, True, True]


@pytest.mark.parametrize("amount", [0, -1])
def test_a_micro_batch_of_nothing_is_refused(amount: int) -> None:
    with pytest.raises(ConfigError):
        TokenBudget(amount)
    with pytest.raises(ConfigError):
        GroupCount(amount)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_strict_lag_counts_versions(bound: int) -> None:
    lag = StrictLag(bound)
    assert [lag.may_train(10, 10 - age) for age in range(5)] == [age <= bound for age in range(5)]
    assert [lag.may_start(10, 10 - age) for age in range(5)] == [age <= bound for age in range(5)]
    assert [lag.may_open(live, 4) for live in (0, 4 * (bound + 1) - 1, 4 * (bound + 1))] == [True, True, False]


@pytest.mark.parametrize("bound", [-1, -5])
def test_a_bound_below_zero_is_refused(bound: int) -> None:
    with pytest.raises(ConfigError):
        StrictLag(bound)
