"""The sample table: when slots become ready, what a commit makes visible, and what an undo removes."""

import pytest

from flowrt.controller.policies.dispatch.base import Fifo
from flowrt.controller.state.sample_table import SampleTable
from flowrt.controller.state.slots import Group, Lease, Slot
from flowrt.errors import LocalProtocolError
from flowrt.ids import WorkerId
from tests.simulation.scenario import grpo_dataflow

SOURCE, ROLLOUT, REWARD = WorkerId("source"), WorkerId("rollout"), WorkerId("reward")


def new_table() -> SampleTable:
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


def completed_stages(table: SampleTable, slot: Slot) -> set[str]:
    return {stage for stage in table.stages if table.is_done(slot, stage)}


def run_stage(table: SampleTable, slot: Slot, stage: str, worker: WorkerId = ROLLOUT) -> None:
    lease = lease_of(table, stage, slot, worker)
    lengths = {column: [3] for column in table.stages[stage].makes if column in table.columns}
    inline = {column: [0.5] for column in table.stages[stage].makes if column not in table.columns}
    table.commit(lease, [slot], lengths, inline, [(0, 3)] if stage == "rollout" else ())


def test_a_new_group_is_ready_for_stages_that_need_only_its_prompt() -> None:
    table = new_table()
    open_group(table)
    assert {stage: ready(table, stage) for stage in table.stages} == {
        "rollout": [0, 1],
        "reward": [],
        "evaluate": [],
        "reference": [],
        "train": [],
    }


def test_a_leased_slot_is_not_ready_and_returns_in_order_when_released() -> None:
    table = new_table()
    first, second = open_group(table).slots
    lease = lease_of(table, "rollout", first)
    assert ready(table, "rollout") == [second.id]
    assert lease.slots == {first.id: first}
    table.release(first, "rollout")
    assert ready(table, "rollout") == [first.id, second.id]
    assert table.leases == {}


def test_a_slot_cannot_be_leased_twice_or_after_it_is_done() -> None:
    table = new_table()
    first, second = open_group(table).slots
    lease_of(table, "rollout", first)
    with pytest.raises(LocalProtocolError):
        table.lease("rollout", [first], ROLLOUT, 10.0, 0)
    run_stage(table, second, "rollout")
    with pytest.raises(LocalProtocolError):
        table.lease("rollout", [second], ROLLOUT, 10.0, 0)


def test_a_lease_is_found_by_its_worker_only() -> None:
    table = new_table()
    slot = open_group(table).slots[0]
    lease = lease_of(table, "rollout", slot)
    assert table.find_lease(lease.id, ROLLOUT) is lease
    assert table.find_lease(lease.id, REWARD) is None
    assert table.find_lease(lease.id + 1, ROLLOUT) is None


def test_a_commit_makes_all_next_stages_ready_at_once() -> None:
    table = new_table()
    slot = open_group(table).slots[0]
    run_stage(table, slot, "rollout")
    assert ready(table, "reward") == ready(table, "reference") == [slot.id]
    assert slot.spans == (0, 3)
    assert slot.oldest_version() == 0


def test_a_group_is_ready_for_training_when_its_last_slot_is() -> None:
    table = new_table()
    group = open_group(table)
    for slot in group.slots:
        for stage in ("rollout", "reward", "reference"):
            assert ready(table, "train") == []
            run_stage(table, slot, stage)
    assert ready(table, "train") == [group.id]
    assert table.flows.complete([group]) == []


def test_a_stage_of_another_flow_is_never_ready() -> None:
    table = new_table()
    group = open_group(table, members=1, flow="eval")
    run_stage(table, group.slots[0], "rollout")
    run_stage(table, group.slots[0], "reward")
    assert ready(table, "reference") == ready(table, "train") == []
    assert ready(table, "evaluate") == [group.slots[0].id]
    run_stage(table, group.slots[0], "evaluate")
    assert table.flows.complete([group]) == [group]


def test_undo_removes_derived_columns_and_returns_the_invalid_copies() -> None:
    table = new_table()
    group = open_group(table)
    for slot in group.slots:
        for stage in ("rollout", "reward", "reference"):
            run_stage(table, slot, stage, WorkerId(f"{stage}-worker"))
    first, second = group.slots
    invalid = table.undo(first, "rollout")
    assert invalid[WorkerId("rollout-worker")] == {"response", "logprobs"}
    assert invalid[WorkerId("reference-worker")] == {"ref_logprobs"}
    assert (first.done, first.tensors, first.inline, first.spans) == (0, {}, {}, ())
    assert completed_stages(table, second) == {"rollout", "reward", "reference"}
    assert ready(table, "rollout") == [first.id]
    assert ready(table, "reward") == ready(table, "train") == []


def test_undo_of_a_later_stage_keeps_the_earlier_ones() -> None:
    table = new_table()
    slot = open_group(table, members=1).slots[0]
    for stage in ("rollout", "reward", "reference"):
        run_stage(table, slot, stage)
    table.undo(slot, "reference")
    assert completed_stages(table, slot) == {"rollout", "reward"}
    assert slot.spans == (0, 3)
    assert ready(table, "reference") == [slot.id]


def test_undo_ends_the_leases_on_later_stages() -> None:
    table = new_table()
    slot = open_group(table).slots[0]
    run_stage(table, slot, "rollout")
    lease = lease_of(table, "reward", slot, REWARD)
    table.undo(slot, "rollout")
    assert table.find_lease(lease.id, REWARD) is None
    assert slot.leases == {}


def test_closing_a_group_removes_its_slots_and_leases() -> None:
    table = new_table()
    group = open_group(table)
    table.lease("rollout", group.slots[:1], ROLLOUT, 10.0, 0)
    table.close([group])
    assert (table.groups, table.slots, table.leases) == ({}, {}, {})
    assert (table.rows.total(), table.bytes.total(), set(table.undone.values())) == (0, 0, {0})
    assert all(len(queue) == 0 for queue in table.ready.values())


def test_ids_are_never_reused() -> None:
    table = new_table()
    first = open_group(table)
    table.close([first])
    second = open_group(table)
    assert second.id > first.id
    assert min(slot.id for slot in second.slots) == 2
