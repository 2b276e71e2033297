"""The board: what makes a slot ready, what a commit shows, what an undo takes away."""

import pytest

from flowrt.controller.board import Board
from flowrt.controller.dispatch import Fifo
from flowrt.controller.slots import Group, Lease, Slot
from flowrt.errors import LocalProtocolError
from flowrt.ids import WorkerId
from flowrt.testing.scenario import grpo_dataflow

SOURCE, ROLLOUT, REWARD = WorkerId("source"), WorkerId("rollout"), WorkerId("reward")


def new_board() -> Board:
    flow = grpo_dataflow()
    return Board(flow.columns, flow.stages, Fifo().queue)


def open_group(board: Board, members: int = 2, flow: str = "train") -> Group:
    (group,) = board.open(flow, [7], 0, members, 0, SOURCE, {"prompt": [4], "answer": [1]}, {})
    return group


def ready(board: Board, stage: str) -> list[int]:
    if stage in board.ready_groups:
        return list(board.ready_groups[stage])
    return [slot.id for slot in board.slots.values() if slot in board.ready[stage]]


def lease_of(board: Board, stage: str, slot: Slot, worker: WorkerId = ROLLOUT) -> Lease:
    """Take the slot out of its queue, as a pull does, and lease it."""
    board.ready[stage].discard(slot)
    return board.lease(stage, [slot], worker, 10.0, 0)


def done(board: Board, slot: Slot) -> set[str]:
    return {stage for stage in board.stages if board.is_done(slot, stage)}


def do(board: Board, slot: Slot, stage: str, worker: WorkerId = ROLLOUT) -> None:
    lease = lease_of(board, stage, slot, worker)
    lengths = {column: [3] for column in board.stages[stage].makes if column in board.columns}
    inline = {column: [0.5] for column in board.stages[stage].makes if column not in board.columns}
    board.commit(lease, [slot], lengths, inline, [(0, 3)] if stage == "rollout" else ())


def test_a_new_group_is_ready_for_what_needs_its_prompt_only() -> None:
    board = new_board()
    open_group(board)
    assert {stage: ready(board, stage) for stage in board.stages} == {
        "rollout": [0, 1],
        "reward": [],
        "evaluate": [],
        "reference": [],
        "train": [],
    }


def test_a_lease_takes_a_slot_off_the_ready_ones_and_its_release_puts_it_back_in_order() -> None:
    board = new_board()
    first, second = open_group(board).slots
    lease = lease_of(board, "rollout", first)
    assert ready(board, "rollout") == [second.id]
    assert lease.slots == {first.id: first}
    board.release(first, "rollout")
    assert ready(board, "rollout") == [first.id, second.id]
    assert board.leases == {}


def test_a_slot_cannot_be_leased_twice_or_after_it_is_done() -> None:
    board = new_board()
    first, second = open_group(board).slots
    lease_of(board, "rollout", first)
    with pytest.raises(LocalProtocolError):
        board.lease("rollout", [first], ROLLOUT, 10.0, 0)
    do(board, second, "rollout")
    with pytest.raises(LocalProtocolError):
        board.lease("rollout", [second], ROLLOUT, 10.0, 0)


def test_a_lease_is_found_by_its_worker_only() -> None:
    board = new_board()
    slot = open_group(board).slots[0]
    lease = lease_of(board, "rollout", slot)
    assert board.find_lease(lease.id, ROLLOUT) is lease
    assert board.find_lease(lease.id, REWARD) is None
    assert board.find_lease(lease.id + 1, ROLLOUT) is None


def test_columns_make_the_next_stages_ready_at_the_same_moment() -> None:
    board = new_board()
    slot = open_group(board).slots[0]
    do(board, slot, "rollout")
    assert ready(board, "reward") == ready(board, "reference") == [slot.id]
    assert slot.spans == (0, 3)
    assert slot.oldest_version() == 0


def test_a_group_is_ready_for_training_when_its_last_slot_is() -> None:
    board = new_board()
    group = open_group(board)
    for slot in group.slots:
        for stage in ("rollout", "reward", "reference"):
            assert ready(board, "train") == []
            do(board, slot, stage)
    assert ready(board, "train") == [group.id]
    assert board.flows.complete([group]) == []


def test_a_stage_of_another_flow_is_never_ready() -> None:
    board = new_board()
    group = open_group(board, members=1, flow="eval")
    do(board, group.slots[0], "rollout")
    do(board, group.slots[0], "reward")
    assert ready(board, "reference") == ready(board, "train") == []
    assert ready(board, "evaluate") == [group.slots[0].id]
    do(board, group.slots[0], "evaluate")
    assert board.flows.complete([group]) == [group]


def test_undo_takes_along_what_was_made_from_it_and_names_the_dead_copies() -> None:
    board = new_board()
    group = open_group(board)
    for slot in group.slots:
        for stage in ("rollout", "reward", "reference"):
            do(board, slot, stage, WorkerId(f"{stage}-worker"))
    first, second = group.slots
    dead = board.undo(first, "rollout")
    assert dead[WorkerId("rollout-worker")] == {"response", "logprobs"}
    assert dead[WorkerId("reference-worker")] == {"ref_logprobs"}
    assert (first.done, first.tensors, first.inline, first.spans) == (0, {}, {}, ())
    assert done(board, second) == {"rollout", "reward", "reference"}
    assert ready(board, "rollout") == [first.id]
    assert ready(board, "reward") == ready(board, "train") == []


def test_undo_of_a_later_stage_leaves_the_earlier_ones() -> None:
    board = new_board()
    slot = open_group(board, members=1).slots[0]
    for stage in ("rollout", "reward", "reference"):
        do(board, slot, stage)
    board.undo(slot, "reference")
    assert done(board, slot) == {"rollout", "reward"}
    assert slot.spans == (0, 3)
    assert ready(board, "reference") == [slot.id]


def test_undo_ends_the_leases_on_what_it_takes_away() -> None:
    board = new_board()
    slot = open_group(board).slots[0]
    do(board, slot, "rollout")
    lease = lease_of(board, "reward", slot, REWARD)
    board.undo(slot, "rollout")
    assert board.find_lease(lease.id, REWARD) is None
    assert slot.leases == {}


def test_a_closed_group_leaves_nothing_behind() -> None:
    board = new_board()
    group = open_group(board)
    board.lease("rollout", group.slots[:1], ROLLOUT, 10.0, 0)
    board.close([group])
    assert (board.groups, board.slots, board.leases) == ({}, {}, {})
    assert (board.rows.total(), board.bytes.total(), set(board.undone.values())) == (0, 0, {0})
    assert all(len(queue) == 0 for queue in board.ready.values())


def test_ids_are_never_used_again() -> None:
    board = new_board()
    first = open_group(board)
    board.close([first])
    second = open_group(board)
    assert second.id > first.id
    assert min(slot.id for slot in second.slots) == 2
