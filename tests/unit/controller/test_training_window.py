"""The training window: expected steps, quotas, and which groups a micro-batch takes."""

import cProfile
from collections.abc import Sequence

from flowrt.controller.policies.admission import StrictLag
from flowrt.controller.policies.batching import Batcher, GroupCount, TokenBudget
from flowrt.controller.state.ready_groups import ReadyGroups
from flowrt.controller.state.slots import Group, Slot
from flowrt.controller.state.training_window import TrainingWindow
from flowrt.ids import GroupId, SlotId


def group_of(number: int, oldest: int | None) -> Group:
    group = Group(group_id=GroupId(number), flow="train", prompt=number, epoch=0, at_least=0)
    spans = () if oldest is None else (oldest, 4)
    group.slots.append(Slot(SlotId(number), group, 0))
    group.slots[0].spans = spans
    return group


def window_of(
    *oldest: int | None, step: int = 0, per_step: int = 2, strict_issue_order: bool = False
) -> tuple[TrainingWindow, list[Group]]:
    """A window in which group i has a token of version oldest[i]; None: it has none yet."""
    window = TrainingWindow(per_step, 10, strict_issue_order, step=step)
    groups = [group_of(number, version) for number, version in enumerate(oldest)]
    window.enter(groups)
    return window, groups


def choose(
    window: TrainingWindow, groups: Sequence[Group], ready: Sequence[int], bound: int, batcher: Batcher, tokens: int = 5
) -> list[int]:
    chosen = window.choose(
        ReadyGroups([groups[number] for number in ready]),
        StrictLag(bound),
        batcher,
        lambda group: tokens,
    )
    return [group.id for group in chosen]


def test_the_expected_step_counts_the_groups_ahead() -> None:
    window, groups = window_of(*[None] * 5, step=3)
    assert [window.expected_step(group) for group in groups] == [3, 3, 4, 4, 5]


def test_taken_groups_count_as_ahead_until_the_step_closes() -> None:
    window, groups = window_of(*[None] * 4, step=3)
    window.take(groups[3:])
    assert [window.expected_step(group) for group in groups] == [3, 4, 4, 3]
    window.take(groups[:1])
    assert window.close() == [groups[3], groups[0]]
    assert [window.expected_step(group) for group in groups[1:3]] == [4, 4]


def test_a_group_that_is_put_back_regains_its_place() -> None:
    window, groups = window_of(*[None] * 3)
    window.take(groups[:2])
    window.put_back(groups[0])
    assert window.waiting == [0, 2]
    assert (window.places, window.live) == (1, 3)


def test_dropped_groups_are_removed_from_taken_and_waiting() -> None:
    window, groups = window_of(*[None] * 3)
    window.take(groups[1:2])
    window.leave(groups[1])
    window.leave(groups[2])
    assert (window.taken, window.waiting) == ({}, [0])


def test_enough_groups_are_open_when_they_complete_the_run() -> None:
    window = TrainingWindow(2, 2, False)
    for number in range(4):
        assert not window.enough_opened()
        window.enter([group_of(number, None)])
    assert window.enough_opened()
    window.step = 2
    assert window.over


def test_the_oldest_ready_groups_are_chosen_first() -> None:
    window, groups = window_of(0, 0, 0, 0)
    assert choose(window, groups, [3, 1, 2], 1, GroupCount(2)) == [1, 2]


def test_a_micro_batch_waits_until_it_is_full() -> None:
    window, groups = window_of(0, 0, 0, per_step=3)
    assert choose(window, groups, [0], 1, TokenBudget(10)) == []
    assert choose(window, groups, [0, 1], 1, TokenBudget(10)) == [0, 1]
    assert choose(window, groups, [0, 1, 2], 1, TokenBudget(10)) == [0, 1]
    assert choose(window, groups, [0, 1, 2], 1, TokenBudget(11)) == [0, 1, 2]


def test_the_rest_of_a_step_counts_as_a_full_micro_batch() -> None:
    window, groups = window_of(0, 0, 0)
    window.take(groups[:1])
    assert choose(window, groups, [1, 2], 1, TokenBudget(10**9)) == [1]


def test_places_are_reserved_for_groups_too_old_for_the_next_step() -> None:
    window, groups = window_of(0, 0, 1, 1, step=1)
    assert choose(window, groups, [2, 3], 1, GroupCount(1)) == []
    assert choose(window, groups, [1, 2, 3], 1, GroupCount(1)) == [1]
    assert choose(window, groups, [2, 3], 2, GroupCount(1)) == [2]


def test_an_urgent_group_is_chosen_before_an_earlier_one_that_can_wait() -> None:
    window, groups = window_of(1, 0, 1, step=1)
    assert choose(window, groups, [0, 1, 2], 1, GroupCount(1)) == [1]


def test_places_are_reserved_for_urgent_groups_of_later_steps_too() -> None:
    # Bound 2: groups 0 to 3 can wait for step 2, but it has only two places, so two of them belong to step 1.
    window, groups = window_of(0, 0, 0, 0, 1, 1, step=1)
    assert choose(window, groups, [4, 5], 2, GroupCount(1)) == []
    assert choose(window, groups, [1, 4, 5], 2, GroupCount(1)) == [1]


def test_strict_issue_order_takes_only_a_contiguous_prefix() -> None:
    window, groups = window_of(0, 0, 0, 0, strict_issue_order=True)
    assert choose(window, groups, [1, 2, 3], 1, GroupCount(1)) == []
    assert choose(window, groups, [0, 2, 3], 1, GroupCount(1)) == [0]
    assert choose(window, groups, [0, 2, 3], 1, GroupCount(2)) == []
    assert choose(window, groups, [3, 1, 0], 1, GroupCount(2)) == [0, 1]


def test_the_cost_of_a_choice_does_not_grow_with_the_waiting_or_ready_groups() -> None:
    def calls(waiting: int, number_ready: int) -> int:
        window, groups = window_of(*[0] * waiting, per_step=16)
        profile = cProfile.Profile()
        ready = ReadyGroups(groups[:number_ready])
        chosen = profile.runcall(window.choose, ready, StrictLag(1), GroupCount(4), lambda group: 5)
        assert [group.id for group in chosen] == [0, 1, 2, 3]
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(4096, 8) < 1.5 * calls(64, 8)
    assert calls(4096, 4096) < 1.5 * calls(64, 64)


def test_recording_an_older_version_makes_a_group_urgent() -> None:
    window, groups = window_of(1, 1, 1, step=1)
    assert choose(window, groups, [0, 1, 2], 1, GroupCount(1)) == [0]
    groups[2].slots[0].spans = (0, 4)
    window.note_versions([groups[2], group_of(9, 0)])
    assert choose(window, groups, [0, 1, 2], 1, GroupCount(1)) == [2]
    assert window.oldest_versions == {0: 1, 1: 1, 2: 0}
