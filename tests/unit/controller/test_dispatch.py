"""Ready queues, who gets which slot, when a micro-batch is full, and the admission arithmetic."""

from collections.abc import Callable

import pytest

from flowrt.controller.policies.admission import StrictLag
from flowrt.controller.policies.batching import GroupCount, TokenBudget
from flowrt.controller.policies.dispatch.base import Fifo, FifoQueue, Puller, Start
from flowrt.controller.state.samples import Group, Slot
from flowrt.errors import ConfigError
from flowrt.ids import GroupId, SlotId, WorkerId
from flowrt.protocol.messages import Stage

STAGE = Stage("rollout", (), ())
GROUP = Group(group_id=GroupId(0), flow="train", prompt=0, epoch=0, at_least=0)
SLOTS = [Slot(SlotId(number), GROUP, number) for number in range(5)]


def filled(*items: int) -> FifoQueue:
    queue = Fifo().queue(STAGE)
    for item in items:
        queue.add([SLOTS[item]])
    return queue


def pulling(requests: int, may_start: Callable[[Slot], Start] | None = None) -> Puller:
    return Puller(WorkerId("rollout"), requests, may_start, lambda slot: 0)


def taken(queue: FifoQueue, requests: int = 9, may_start: Callable[[Slot], Start] | None = None) -> list[int]:
    return [slot.id for slot in queue.take(pulling(requests, may_start))]


def test_a_queue_is_in_order_of_issue_not_of_arrival() -> None:
    assert taken(filled(4, 1, 3)) == [1, 3, 4]


def test_what_is_taken_is_gone_and_what_is_beyond_the_room_stays() -> None:
    queue = filled(2, 1, 3)
    assert taken(queue, 2) == [1, 2]
    assert len(queue) == 1
    assert SLOTS[3] in queue
    assert SLOTS[1] not in queue


def test_what_is_discarded_is_gone() -> None:
    queue = filled(1, 2, 3)
    queue.discard(SLOTS[2])
    assert taken(queue) == [1, 3]


def test_discard_and_add_again_keeps_one_entry_in_its_old_place() -> None:
    queue = filled(1, 2, 3)
    for _ in range(3):
        queue.discard(SLOTS[1])
        queue.add([SLOTS[1]])
    queue.add([SLOTS[2]])
    assert len(queue) == 3
    assert taken(queue) == [1, 2, 3]
    assert taken(queue) == []


def test_discarding_what_is_not_there_is_nothing() -> None:
    queue = filled(1)
    queue.discard(SLOTS[4])
    assert taken(queue) == [1]


def test_nobody_overtakes_a_slot_that_may_not_start_yet() -> None:
    queue = filled(0, 1, 2, 3)
    assert taken(queue, 9, lambda slot: Start.NOT_YET if slot.id == 2 else Start.NOW) == [0, 1]
    assert taken(queue) == [2, 3]


def test_who_waits_for_weights_of_its_own_wish_holds_up_nobody() -> None:
    queue = filled(0, 1, 2, 3)
    assert taken(queue, 2, lambda slot: Start.ELSEWHERE if slot.id in (0, 2) else Start.NOW) == [1, 3]
    assert taken(queue) == [0, 2]


def test_a_token_budget_is_full_at_its_number_of_tokens() -> None:
    assert [TokenBudget(10).full(1, tokens, 1) for tokens in (9, 10, 11)] == [False, True, True]


def test_a_group_count_is_full_at_its_number_of_groups() -> None:
    assert [GroupCount(2).full(groups, 10**9, 1) for groups in (0, 1, 2, 3)] == [False, False, True, True]


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
