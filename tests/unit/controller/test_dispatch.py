"""Ready queues and the slots taken from them, full micro-batches, and admission by staleness."""

from collections.abc import Callable

import pytest

from flowrt.controller.policies.admission import StrictLag
from flowrt.controller.policies.batching import GroupCount, TokenBudget
from flowrt.controller.policies.dispatch.base import Fifo, FifoQueue, Puller, Start
from flowrt.controller.state.slots import Group, Slot
from flowrt.errors import ConfigError
from flowrt.ids import GroupId, SlotId, WorkerId
from flowrt.protocol.messages import Stage

STAGE = Stage("rollout", (), ())
GROUP = Group(group_id=GroupId(0), flow="train", prompt=0, epoch=0, at_least=0)
SLOTS = [Slot(SlotId(number), GROUP, number) for number in range(5)]


def queue_of(*items: int) -> FifoQueue:
    queue = Fifo().queue(STAGE)
    for item in items:
        queue.add([SLOTS[item]])
    return queue


def puller_for(requests: int, may_start: Callable[[Slot], Start] | None = None) -> Puller:
    return Puller(WorkerId("rollout"), requests, may_start)


def taken(queue: FifoQueue, requests: int = 9, may_start: Callable[[Slot], Start] | None = None) -> list[int]:
    return [slot.id for slot in queue.take(puller_for(requests, may_start))]


def test_a_queue_is_in_order_of_issue_not_of_arrival() -> None:
    assert taken(queue_of(4, 1, 3)) == [1, 3, 4]


def test_taking_removes_at_most_the_number_of_slots_asked_for() -> None:
    queue = queue_of(2, 1, 3)
    assert taken(queue, 2) == [1, 2]
    assert len(queue) == 1
    assert SLOTS[3] in queue
    assert SLOTS[1] not in queue


def test_a_discarded_slot_is_not_taken() -> None:
    queue = queue_of(1, 2, 3)
    queue.discard(SLOTS[2])
    assert taken(queue) == [1, 3]


def test_a_slot_discarded_and_added_again_keeps_one_entry_in_its_place() -> None:
    queue = queue_of(1, 2, 3)
    for _ in range(3):
        queue.discard(SLOTS[1])
        queue.add([SLOTS[1]])
    queue.add([SLOTS[2]])
    assert len(queue) == 3
    assert taken(queue) == [1, 2, 3]
    assert taken(queue) == []


def test_discarding_an_absent_slot_has_no_effect() -> None:
    queue = queue_of(1)
    queue.discard(SLOTS[4])
    assert taken(queue) == [1]


def test_no_slot_overtakes_one_that_may_not_start_yet() -> None:
    queue = queue_of(0, 1, 2, 3)
    assert taken(queue, 9, lambda slot: Start.NOT_YET if slot.id == 2 else Start.NOW) == [0, 1]
    assert taken(queue) == [2, 3]


def test_slots_that_require_newer_weights_do_not_block_later_slots() -> None:
    queue = queue_of(0, 1, 2, 3)
    assert taken(queue, 2, lambda slot: Start.ELSEWHERE if slot.id in (0, 2) else Start.NOW) == [1, 3]
    assert taken(queue) == [0, 2]


def test_a_token_budget_is_full_at_its_number_of_tokens() -> None:
    assert [TokenBudget(10).full(1, tokens, 1) for tokens in (9, 10, 11)] == [False, True, True]


def test_a_group_count_is_full_at_its_number_of_groups() -> None:
    assert [GroupCount(2).full(groups, 10**9, 1) for groups in (0, 1, 2, 3)] == [False, False, True, True]


@pytest.mark.parametrize("amount", [0, -1])
def test_a_micro_batch_size_below_one_raises_a_config_error(amount: int) -> None:
    with pytest.raises(ConfigError):
        TokenBudget(amount)
    with pytest.raises(ConfigError):
        GroupCount(amount)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_strict_lag_bounds_the_difference_of_versions(bound: int) -> None:
    lag = StrictLag(bound)
    assert [lag.may_train(10, 10 - age) for age in range(5)] == [age <= bound for age in range(5)]
    assert [lag.may_start(10, 10 - age) for age in range(5)] == [age <= bound for age in range(5)]
    assert [lag.may_open(live, 4) for live in (0, 4 * (bound + 1) - 1, 4 * (bound + 1))] == [True, True, False]


@pytest.mark.parametrize("bound", [-1, -5])
def test_a_negative_staleness_bound_raises_a_config_error(bound: int) -> None:
    with pytest.raises(ConfigError):
        StrictLag(bound)
