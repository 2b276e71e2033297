"""Classic bugs of such a runtime, each as one function or value that is replaced by a wrong one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec

from flowrt.client.requests import ResyncState
from flowrt.controller.core import HANDLERS
from flowrt.controller.events import Command, Send
from flowrt.controller.policies.admission import StrictLag
from flowrt.controller.state.controller_restart import Recovery
from flowrt.controller.state.dataflow import Flows
from flowrt.controller.state.membership import Membership
from flowrt.controller.state.opened_prompts import OpenedPrompts
from flowrt.controller.state.sample_table import SampleTable
from flowrt.controller.state.state import Preemption, State
from flowrt.controller.state.training_window import TrainingWindow
from flowrt.controller.state.transfers import Lanes
from flowrt.controller.state.weights import VersionTable
from flowrt.controller.storage import journals, ledger
from flowrt.controller.storage.ledger import Ledger
from flowrt.controller.transitions import commits, offers, rollback, step_end, step_selection
from flowrt.errors import RemoteProtocolError
from flowrt.protocol.messages import CancelRequest, Inventory, Rejected, ReleaseTensors, pack, unpack

Function = Callable[..., Any]
BUGS: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {}
"""By name of the bug: the owner and the name of the function, and what builds the wrong one from the right one."""


@contextmanager
def planted(owner: Any, name: Any, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace one function, or one entry of a dictionary, within a block."""
    if isinstance(owner, dict):
        with patch.dict(owner, {name: make(owner[name])}):
            yield
        return
    right = vars(owner)[name]
    setattr(owner, name, make(right))
    try:
        yield
    finally:
        setattr(owner, name, right)


def bug(owner: Any, name: Any) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def enter(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        BUGS[make.__name__] = (owner, name, make)
        return make

    return enter


def do_nothing(*_: Any, **__: Any) -> None:
    pass


def no_commands(*_: Any, **__: Any) -> list[Command]:
    return []


# ---- commits and leases


@bug(commits, "by_lease")
def a_late_commit_is_accepted(right: Function) -> Function:
    def by_current_lease(table: SampleTable, worker: Any, message: Any, stage: Any) -> Iterator[Any]:
        for row, slot_id in enumerate(message.slots):
            slot = table.slots.get(slot_id)
            yield (slot.leases.get(stage.name) if slot else None), [row]

    return by_current_lease


@bug(SampleTable, "find_lease")
def a_commit_under_an_ended_lease_of_its_worker_is_accepted(right: Function) -> Function:
    ended: dict[Any, Any] = {}

    def find(self: SampleTable, lease_id: int, worker: Any) -> Any:
        lease = right(self, lease_id, worker)
        if lease is not None:
            ended[id(self), lease_id] = lease
        old = ended.get((id(self), lease_id))
        if old is None or old.slots or old.worker != worker:
            return lease
        return next((candidate for candidate in self.leases.values() if candidate.stage == old.stage), lease)

    return find


@bug(rollback, "expire_leases")
def a_lease_never_expires(right: Function) -> Function:
    return no_commands


@bug(rollback, "give_back_lease")
def the_leases_of_a_dead_worker_are_kept(right: Function) -> Function:
    return no_commands


@bug(SampleTable, "lease")
def a_leased_slot_stays_in_its_queue(right: Function) -> Function:
    def lease(self: SampleTable, stage: str, slots: Any, *more: Any, **named: Any) -> Any:
        given = right(self, stage, slots, *more, **named)
        if stage in self.ready:
            self.ready[stage].add(slots)
        return given

    return lease


# ---- columns


@bug(rollback, "lose_copies")
def a_dead_owner_keeps_its_columns(right: Function) -> Function:
    return do_nothing


@bug(SampleTable, "commit")
def a_column_is_visible_before_its_inline_values(right: Function) -> Function:
    def commit(self: SampleTable, lease: Any, slots: Any, lengths: Any, inline: Any, spans: Any = ()) -> None:
        right(self, lease, slots, lengths, {}, spans)
        self._set_inline(slots, inline)

    return commit


@bug(SampleTable, "is_ready")
def a_stage_does_not_wait_for_inline_values(right: Function) -> Function:
    def is_ready(self: SampleTable, slot: Any, stage: Any) -> bool:
        started = self.is_done(slot, stage.name) or stage.name in slot.leases
        return not started and all(slot.has(need) for need in stage.needs if need in self.columns)

    return is_ready


@bug(SampleTable, "undo")
def results_derived_from_a_lost_column_survive(right: Function) -> Function:
    def undo(self: SampleTable, slot: Any, stage: str) -> Any:
        after, self.flows.after = self.flows.after, {name: [] for name in self.stages}
        try:
            return right(self, slot, stage)
        finally:
            self.flows.after = after

    return undo


# ---- groups


@bug(SampleTable, "enqueue_if_ready")
def a_group_is_trained_once_one_sample_is_ready(right: Function) -> Function:
    def enqueue_if_ready(self: SampleTable, slot: Any, stage: Any) -> None:
        if stage.flow in ("", slot.group.flow) and self.is_ready(slot, stage):
            self._enqueue(stage, (slot.group,), (slot,))

    return enqueue_if_ready


@bug(SampleTable, "open")
def slots_of_two_groups_are_swapped(right: Function) -> Function:
    def open_swapped(self: SampleTable, **offer: Any) -> Any:
        groups = right(self, **offer)
        if len(groups) > 1:
            (first, second), slots = groups[:2], [group.slots[-1] for group in groups[:2]]
            first.slots[-1], second.slots[-1] = slots[1], slots[0]
            slots[0].group, slots[1].group, slots[0].member = second, first, 0
        return groups

    return open_swapped


@bug(SampleTable, "_take_off")
def the_slots_of_a_dropped_group_stay_in_their_queues(right: Function) -> Function:
    def take_off(self: SampleTable, slot: Any) -> None:
        queued = [name for name, queue in self.ready.items() if slot in queue]
        right(self, slot)
        for name in queued:
            self.ready[name].add((slot,))

    return take_off


@bug(StrictLag, "__post_init__")
def the_staleness_bound_is_off_by_one(right: Function) -> Function:
    return lambda self: object.__setattr__(self, "bound", self.bound + 1)


# ---- counts


@bug(SampleTable, "_weigh_off")
def a_budget_is_never_freed(right: Function) -> Function:
    return do_nothing


@bug(SampleTable, "open")
def a_budget_is_counted_twice(right: Function) -> Function:
    def twice(self: SampleTable, **offer: Any) -> Any:
        self.rows[offer["flow"]] += len(offer["prompts"]) * offer["members"]
        return right(self, **offer)

    return twice


@bug(rollback, "releases")
def no_worker_is_ordered_to_release_tensors(right: Function) -> Function:
    return lambda groups: {}


# ---- requests


@bug(HANDLERS, CancelRequest)
def a_withdrawn_pull_is_still_granted(right: Function) -> Function:
    def cancel_request(state: State, env: Any, worker: Any, message: Any, now: float) -> list[Command]:
        if message.request not in state.requests._of[worker]:
            return []
        return [Send(worker, Rejected(message.request, "withdrawn"))]

    return cancel_request


@bug(step_end, "close_step")
def a_refused_message_changes_the_state(right: Function) -> Function:
    def close_step(state: State, env: Any, worker: Any, message: Any) -> Any:
        try:
            return right(state, env, worker, message)
        except RemoteProtocolError:
            for group in list(state.window.taken.values()):
                state.window.put_back(group)
            raise

    return close_step


@bug(step_end, "close_step")
def a_repeated_step_report_closes_the_next_step(right: Function) -> Function:
    def close_step(state: State, env: Any, worker: Any, message: Any) -> Any:
        return right(state, env, worker, msgspec.structs.replace(message, step=state.window.step))

    return close_step


@bug(TrainingWindow, "put_back")
def a_returned_group_is_not_trained_again(right: Function) -> Function:
    def put_back(self: TrainingWindow, group: Any) -> None:
        right(self, group)
        self.waiting.remove(group.id)

    return put_back


# ---- the group filter


@bug(step_selection, "decide")
def the_filter_tries_of_a_step_are_not_counted(right: Function) -> Function:
    def decide(state: State, env: Any, ready: Any) -> list[Command]:
        commands: list[Command] = right(state, env, ready)
        state.window.filtered = 0
        return commands

    return decide


@bug(step_selection, "decide_again")
def a_group_kept_without_tries_left_is_not_decided_again(right: Function) -> Function:
    return do_nothing


@bug(step_selection, "decide")
def a_filtered_group_stays_in_the_window(right: Function) -> Function:
    def decide(state: State, env: Any, ready: Any) -> list[Command]:
        for group in step_selection._due(state, env, ready):
            if env.policies.group_filter.refusal(group):
                return rollback.record(state, env, group, "dropped", "filtered: equal rewards")
        return []

    return decide


@bug(TrainingWindow, "restore")
def a_restarted_controller_resets_the_filter_tries(right: Function) -> Function:
    def restore(self: TrainingWindow, step: int, groups: Any, filtered: int, **others: Any) -> None:
        right(self, step, groups, filtered=0, **others)

    return restore


# ---- stalls and restarts of the controller


@bug(State, "extend_deadlines")
def a_deadline_contains_a_stall_of_the_controller(right: Function) -> Function:
    return do_nothing


@bug(Recovery, "extend_deadline")
def a_stall_of_the_controller_ends_recovery(right: Function) -> Function:
    return do_nothing


@bug(ResyncState, "drained")
def a_drain_is_not_repeated_to_a_restarted_controller(right: Function) -> Function:
    return do_nothing


# ---- evaluations


@bug(rollback, "_policy")
def the_policy_of_lost_samples_applies_to_evaluations(right: Function) -> Function:
    return lambda env, group: env.settings.on_lost_sample


@bug(rollback, "drop_untrained")
def the_source_is_not_notified_of_dropped_groups(right: Function) -> Function:
    return lambda state, env, groups, reason: rollback.close(state, env, groups)


@bug(HANDLERS, Inventory)
def the_source_is_not_notified_of_groups_that_were_closed_in_a_crash(right: Function) -> Function:
    def inventory(*arguments: Any) -> list[Command]:
        commands = right(*arguments)
        return [
            command
            for command in commands
            if not (isinstance(command, Send) and isinstance(command.message, ReleaseTensors))
        ]

    return inventory


@bug(commits, "_late")
def a_refused_commit_is_answered_as_granted(right: Function) -> Function:
    return lambda *_: ([], set())


# ---- sources


@bug(offers, "_repeated_fault")
def a_prompt_of_two_sources_is_opened_twice(right: Function) -> Function:
    return lambda *_: ""


@bug(Flows, "__init__")
def unscored_samples_depend_on_their_source(right: Function) -> Function:
    def init(self: Flows, *arguments: Any) -> None:
        right(self, *arguments)
        for name in self.generating:
            self.fetched[name] = [need for need in self.stages[name].needs if need in self.columns]

    return init


@bug(OpenedPrompts, "discard")
def an_unread_prompt_counts_as_opened(right: Function) -> Function:
    return do_nothing


@bug(rollback, "end_evaluations")
def an_evaluation_outlasts_its_source(right: Function) -> Function:
    return no_commands


# ---- lanes and versions


@bug(Lanes, "abandon")
def a_broken_lane_is_used_again(right: Function) -> Function:
    return do_nothing


@bug(Lanes, "is_cut")
def a_link_that_fails_again_and_again_is_used(right: Function) -> Function:
    return lambda self, owner, receiver: False


@bug(VersionTable, "_release")
def receivers_below_a_fetch_that_resumes_are_no_sources(right: Function) -> Function:
    return do_nothing


@bug(VersionTable, "_stall")
def a_receiver_fetches_from_one_below_it(right: Function) -> Function:
    return do_nothing


@bug(VersionTable, "failed")
def a_failed_fetch_is_not_retried(right: Function) -> Function:
    return do_nothing


# ---- a restarted controller


@bug(Recovery, "end")
def a_late_inventory_makes_stale_columns_current(right: Function) -> Function:
    def end(self: Recovery) -> Any:
        claims = self.claims
        absent = right(self)
        self.claims = claims
        return absent

    return end


@bug(Membership, "restore_drain")
def a_restarted_controller_forgets_drains(right: Function) -> Function:
    return do_nothing


@bug(Preemption, "restore")
def a_restarted_controller_forgets_preemption(right: Function) -> Function:
    return do_nothing


@bug(Recovery, "is_parked")
def a_worker_gets_work_before_its_late_inventory(right: Function) -> Function:
    return lambda self, worker: self.is_active


# ---- samples in journals


@bug(journals, "_fault")
def a_sample_of_a_version_after_the_checkpoint_is_kept(right: Function) -> Function:
    return lambda part, newest, may_train: right(part, max(newest, part.newest), may_train)


# ---- rollback


@bug(ledger, "_ROLLBACK")
def a_rollback_leaves_a_prompt_trained(right: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(statement.replace("OR (state IN ('trained', 'dropped') AND step >= :step)", "") for statement in right)


@bug(Ledger, "resume")
def a_rollback_loses_a_prompt_in_flight(right: Function) -> Function:
    def resume(self: Ledger, step: int, at_s: float) -> Any:
        self.flush()
        in_flight_prompts = self._db.execute("SELECT epoch, prompt FROM prompts WHERE state = 'in_flight'").fetchall()
        position = right(self, step, at_s)
        done = [(epoch, prompt) for epoch, prompts in unpack(position.passed).items() for prompt in prompts]
        return msgspec.structs.replace(position, passed=pack([*done, *in_flight_prompts]))

    return resume
