"""The board: what makes a slot ready, what a commit shows, what an undo takes away."""

import pytest

from flowrt.controller.policies.dispatch.base import Fifo
from flowrt.controller.state.sample_table import SampleTable
from flowrt.controller.state.samples import Group, Lease, Slot
from flowrt.errors import LocalProtocolError
from flowrt.ids import WorkerId
from tests.simulation.scenario import grpo_dataflow

SOURCE, ROLLOUT, REWARD = WorkerId("source"), WorkerId("rollout"), WorkerId("reward")


def new_board() -> SampleTable:
    flow = grpo_dataflow()
    return SampleTable(flow.columns, flow.stages, Fifo().queue)


def open_group(table: SampleTable, members: int = 2, flow: str = "train") -> Group:
    (group,) = table.open(flow, [7], 0, members, 0, SOURCE, {"prompt": [4], "answer": [1]}, {})
    return group


def ready(table: SampleTable, stage: str) -> list[int]:
    if stage in table.ready_groups:
        return list(table.ready_groups[stage])
    return [slot.id for slot in table.slots.values() if slot in table.ready[stage]]


def lease_of(table: SampleTable, stage: str, slot: Slot, worker: WorkerId = ROLLOUT) -> Lease:
    """Take the slot out of its queue, as a pull does, and lease it."""
    table.ready[stage].discard(slot)
    return table.lease(stage, [slot], worker, 10.0, 0)


def done(table: SampleTable, slot: Slot) -> set[str]:
    return {stage for stage in table.stages if table.is_done(slot, stage)}


def do(table: SampleTable, slot: Slot, stage: str, worker: WorkerId = ROLLOUT) -> None:
    lease = lease_of(table, stage, slot, worker)
    lengths = {column: [3] for column in table.stages[stage].makes if column in table.columns}
    inline = {column: [0.5] for column in table.stages[stage].makes if column not in table.columns}
    table.commit(lease, [slot], lengths, inline, [(0, 3)] if stage == "rollout" else ())


def test_a_new_group_is_ready_for_what_needs_its_prompt_only() -> None:
    table = new_board()
    open_group(table)
    assert {stage: ready(table, stage) for stage in table.stages} == {
        "rollout": [0, 1],
        "reward": [],
        "evaluate": [],
        "reference": [],
        "train": [],
    }


def test_a_lease_takes_a_slot_off_the_ready_ones_and_its_release_puts_it_back_in_order() -> None:
    table = new_board()
    first, second = open_group(table).slots
    lease = lease_of(table, "rollout", first)
    assert ready(table, "rollout") == [second.id]
    assert lease.slots == {first.id: first}
    table.release(first, "rollout")
    assert ready(table, "rollout") == [first.id, second.id]
    assert table.leases == {}


def test_a_slot_cannot_be_leased_twice_or_after_it_is_done() -> None:
    table = new_board()
    first, second = open_group(table).slots
    lease_of(table, "rollout", first)
    with pytest.raises(LocalProtocolError):
        table.lease("rollout", [first], ROLLOUT, 10.0, 0)
    do(table, second, "rollout")
    with pytest.raises(LocalProtocolError):
        table.lease("rollout", [second], ROLLOUT, 10.0, 0)


def test_a_lease_is_found_by_its_worker_only() -> None:
    table = new_board()
    slot = open_group(table).slots[0]
    lease = lease_of(table, "rollout", slot)
    assert table.find_lease(lease.id, ROLLOUT) is lease
    assert table.find_lease(lease.id, REWARD) is None
    assert table.find_lease(lease.id + 1, ROLLOUT) is None


def test_columns_make_the_next_stages_ready_at_the_same_moment() -> None:
    table = new_board()
    slot = open_group(table).slots[0]
    do(table, slot, "rollout")
    assert ready(table, "reward") == ready(table, "reference") == [slot.id]
    assert slot.spans == (0, 3)
    assert slot.oldest_version() == 0


def test_a_group_is_ready_for_training_when_its_last_slot_is() -> None:
    table = new_board()
    group = open_group(table)
    for slot in group.slots:
        for stage in ("rollout", "reward", "reference"):
            assert ready(table, "train") == []
            do(table, slot, stage)
    assert ready(table, "train") == [group.id]
    assert table.flows.complete([group]) == []


def test_a_stage_of_another_flow_is_never_ready() -> None:
    table = new_board()
    group = open_group(table, members=1, flow="eval")
    do(table, group.slots[0], "rollout")
    do(table, group.slots[0], "reward")
    assert ready(table, "reference") == ready(table, "train") == []
    assert ready(table, "evaluate") == [group.slots[0].id]
    do(table, group.slots[0], "evaluate")
    assert table.flows.complete([group]) == [group]


def test_undo_takes_along_what_was_made_from_it_and_names_the_dead_copies() -> None:
    table = new_board()
    group = open_group(table)
    for slot in group.slots:
        for stage in ("rollout", "reward", "reference"):
            do(table, slot, stage, WorkerId(f"{stage}-worker"))
    first, second = group.slots
    dead = table.undo(first, "rollout")
    assert dead[WorkerId("rollout-worker")] == {"response", "logprobs"}
    assert dead[WorkerId("reference-worker")] == {"ref_logprobs"}
    assert (first.done, first.tensors, first.inline, first.spans) == (0, {}, {}, ())
    assert done(table, second) == {"rollout", "reward", "reference"}
    assert ready(table, "rollout") == [first.id]
    assert ready(table, "reward") == ready(table, "train") == []


def test_undo_of_a_later_stage_leaves_the_earlier_ones() -> None:
    table = new_board()
    slot = open_group(table, members=1).slots[0]
    for stage in ("rollout", "reward", "reference"):
        do(table, slot, stage)
    table.undo(slot, "reference")
    assert done(table, slot) == {"rollout", "reward"}
    assert slot.spans == (0, 3)
    assert ready(table, "reference") == [slot.id]


def test_undo_ends_the_leases_on_what_it_takes_away() -> None:
    table = new_board()
    slot = open_group(table).slots[0]
    do(table, slot, "rollout")
    lease = lease_of(table, "reward", slot, REWARD)
    table.undo(slot, "rollout")
    assert table.find_lease(lease.id, REWARD) is None
    assert slot.leases == {}


def test_a_closed_group_leaves_nothing_behind() -> None:
    table = new_board()
    group = open_group(table)
    table.lease("rollout", group.slots[:1], ROLLOUT, 10.0, 0)
    table.close([group])
    assert (table.groups, table.slots, table.leases) == ({}, {}, {})
    assert (table.rows.total(), table.bytes.total(), set(table.undone.values())) == (0, 0, {0})
    assert all(len(queue) == 0 for queue in table.ready.values())


def test_ids_are_never_used_again() -> None:
    table = new_board()
    first = open_group(table)
    table.close([first])
    second = open_group(table)
    assert second.id > first.id
    assert min(slot.id for slot in second.slots) == 2
