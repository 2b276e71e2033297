"""Classic bugs of a runtime like this one, each as one function or value that is swapped for a wrong one."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from flowrt.controller.core import HANDLERS
from flowrt.controller.events import Command, Send
from flowrt.controller.policies.admission import StrictLag
from flowrt.controller.state.sample_table import SampleTable
from flowrt.controller.state.state import State
from flowrt.controller.state.training_window import TrainingWindow
from flowrt.controller.state.transfers import Lanes
from flowrt.controller.state.weights import VersionTable
from flowrt.controller.storage import ledger
from flowrt.controller.storage.ledger import Ledger
from flowrt.controller.transitions import commits, filtering, rollback, training
from flowrt.errors import RemoteProtocolError
from flowrt.protocol.messages import CancelRequest, Rejected, pack, unpack

Wrong = Callable[..., Any]
BUGS: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {}
"""By what goes wrong: whose function is swapped, its name, and what makes the wrong one from the right one."""


@contextmanager
def planted(owner: Any, name: Any, make: Callable[[Any], Any]) -> Iterator[None]:
    """One function, or one entry of a dictionary, is wrong for the length of a block."""
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


def nothing(*_: Any, **__: Any) -> None:
    pass


def no_commands(*_: Any, **__: Any) -> list[Command]:
    return []


# ---- commits and leases


@bug(commits, "by_lease")
def a_late_commit_is_accepted(right: Wrong) -> Wrong:
    def by_whoever_has_the_lease_now(table: SampleTable, worker: Any, message: Any, stage: Any) -> Iterator[Any]:
        for row, slot_id in enumerate(message.slots):
            slot = table.slots.get(slot_id)
            yield (slot.leases.get(stage.name) if slot else None), [row]

    return by_whoever_has_the_lease_now


@bug(SampleTable, "find_lease")
def a_commit_of_an_earlier_life_of_its_worker_is_accepted(right: Wrong) -> Wrong:
    ended: dict[Any, Any] = {}

    def find(self: SampleTable, lease_id: int, worker: Any) -> Any:
        found = right(self, lease_id, worker)
        if found is not None:
            ended[id(self), lease_id] = found
        old = ended.get((id(self), lease_id))
        if old is None or old.slots or old.worker != worker:
            return found
        return next((one for one in self.leases.values() if one.stage == old.stage), found)

    return find


@bug(rollback, "expire_leases")
def a_lease_never_expires(right: Wrong) -> Wrong:
    return no_commands


@bug(rollback, "give_back_lease")
def the_leases_of_the_dead_are_kept(right: Wrong) -> Wrong:
    return no_commands


@bug(SampleTable, "lease")
def a_slot_that_is_leased_stays_in_its_queue(right: Wrong) -> Wrong:
    def lease(self: SampleTable, stage: str, slots: Any, *more: Any, **named: Any) -> Any:
        given = right(self, stage, slots, *more, **named)
        if stage in self.ready:
            self.ready[stage].add(slots)
        return given

    return lease


# ---- columns


@bug(rollback, "lose_copies")
def a_dead_owner_keeps_its_columns(right: Wrong) -> Wrong:
    return nothing


@bug(SampleTable, "commit")
def a_column_is_seen_before_its_numbers(right: Wrong) -> Wrong:
    def commit(self: SampleTable, lease: Any, slots: Any, lengths: Any, inline: Any, spans: Any = ()) -> None:
        right(self, lease, slots, lengths, {}, spans)
        self._set_inline(slots, inline)

    return commit


@bug(SampleTable, "is_ready")
def a_stage_does_not_wait_for_numbers(right: Wrong) -> Wrong:
    def is_ready(self: SampleTable, slot: Any, stage: Any) -> bool:
        started = self.is_done(slot, stage.name) or stage.name in slot.leases
        return not started and all(slot.has(need) for need in stage.needs if need in self.columns)

    return is_ready


@bug(SampleTable, "undo")
def what_was_made_from_a_lost_column_survives(right: Wrong) -> Wrong:
    def undo(self: SampleTable, slot: Any, stage: str) -> Any:
        after, self.flows.after = self.flows.after, {name: [] for name in self.stages}
        try:
            return right(self, slot, stage)
        finally:
            self.flows.after = after

    return undo


# ---- groups


@bug(SampleTable, "enqueue_if_ready")
def a_group_is_trained_as_soon_as_one_of_it_is_ready(right: Wrong) -> Wrong:
    def enqueue_if_ready(self: SampleTable, slot: Any, stage: Any) -> None:
        if stage.flow in ("", slot.group.flow) and self.is_ready(slot, stage):
            self._enqueue(stage, (slot.group,), (slot,))

    return enqueue_if_ready


@bug(SampleTable, "open")
def groups_are_mixed(right: Wrong) -> Wrong:
    def mixed(self: SampleTable, **offer: Any) -> Any:
        groups = right(self, **offer)
        if len(groups) > 1:
            (one, other), slots = groups[:2], [group.slots[-1] for group in groups[:2]]
            one.slots[-1], other.slots[-1] = slots[1], slots[0]
            slots[0].group, slots[1].group, slots[0].member = other, one, 0
        return groups

    return mixed


@bug(SampleTable, "_take_off")
def the_slots_of_a_dropped_group_are_still_served(right: Wrong) -> Wrong:
    def take_off(self: SampleTable, slot: Any) -> None:
        queued = [name for name, queue in self.ready.items() if slot in queue]
        right(self, slot)
        for name in queued:
            self.ready[name].add((slot,))

    return take_off


@bug(StrictLag, "__post_init__")
def staleness_is_off_by_one(right: Wrong) -> Wrong:
    return lambda self: object.__setattr__(self, "bound", self.bound + 1)


# ---- counts


@bug(SampleTable, "_weigh_off")
def a_budget_is_never_freed(right: Wrong) -> Wrong:
    return nothing


@bug(SampleTable, "open")
def a_budget_is_counted_twice(right: Wrong) -> Wrong:
    def twice(self: SampleTable, **offer: Any) -> Any:
        self.rows[offer["flow"]] += len(offer["prompts"]) * offer["members"]
        return right(self, **offer)

    return twice


@bug(rollback, "releases")
def nobody_is_told_to_free(right: Wrong) -> Wrong:
    return lambda groups: {}


# ---- requests


@bug(HANDLERS, CancelRequest)
def a_withdrawn_pull_is_still_granted(right: Wrong) -> Wrong:
    def cancel_request(state: State, env: Any, worker: Any, message: Any, now: float) -> list[Command]:
        if message.request not in state.requests._of[worker]:
            return []
        return [Send(worker, Rejected(message.request, "withdrawn"))]

    return cancel_request


@bug(training, "close_step")
def a_refused_message_changes_the_state(right: Wrong) -> Wrong:
    def close_step(state: State, env: Any, worker: Any, message: Any) -> Any:
        try:
            return right(state, env, worker, message)
        except RemoteProtocolError:
            for group in list(state.window.taken.values()):
                state.window.put_back(group)
            raise

    return close_step


@bug(training, "close_step")
def a_step_that_is_said_twice_is_trained_twice(right: Wrong) -> Wrong:
    def close_step(state: State, env: Any, worker: Any, message: Any) -> Any:
        return right(state, env, worker, dataclasses.replace(message, step=state.window.step))

    return close_step


@bug(TrainingWindow, "put_back")
def a_group_that_is_given_back_is_not_trained_again(right: Wrong) -> Wrong:
    def put_back(self: TrainingWindow, group: Any) -> None:
        right(self, group)
        self.waiting.remove(group.id)

    return put_back


# ---- the group filter


@bug(TrainingWindow, "count_filtered")
def the_tries_of_a_step_are_not_counted(right: Wrong) -> Wrong:
    return nothing


@bug(filtering, "recheck")
def a_group_that_was_kept_for_want_of_tries_is_not_decided_on_again(right: Wrong) -> Wrong:
    return nothing


@bug(filtering, "decide")
def a_filtered_group_stays_in_the_window(right: Wrong) -> Wrong:
    def decide(state: State, env: Any, ready: Any) -> list[Command]:
        for group in filtering._due(state, env, ready):
            if env.policies.group_filter.refusal(group):
                return rollback.record(state, env, group, "dropped", "filtered: equal rewards")
        return []

    return decide


@bug(TrainingWindow, "restore")
def a_restarted_controller_counts_the_tries_anew(right: Wrong) -> Wrong:
    def restore(self: TrainingWindow, step: int, groups: Any, filtered: int, skipped: int) -> None:
        right(self, step, groups, 0, skipped)

    return restore


# ---- lanes and versions


@bug(Lanes, "abandon")
def a_broken_lane_is_used_again(right: Wrong) -> Wrong:
    return nothing


@bug(VersionTable, "failed")
def a_fetch_that_failed_is_not_tried_again(right: Wrong) -> Wrong:
    return nothing


# ---- going back


@bug(ledger, "_ROLLBACK")
def going_back_leaves_a_prompt_trained(right: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(one.replace("OR (state IN ('trained', 'dropped') AND step >= :step)", "") for one in right)


@bug(Ledger, "resume")
def going_back_forgets_a_prompt_that_was_in_flight(right: Wrong) -> Wrong:
    def resume(self: Ledger, step: int, at_s: float) -> Any:
        self.flush()
        under_way = self._db.execute("SELECT epoch, prompt FROM prompts WHERE state = 'in_flight'").fetchall()
        position = right(self, step, at_s)
        done = [(epoch, prompt) for epoch, prompts in unpack(position.passed).items() for prompt in prompts]
        return dataclasses.replace(position, passed=pack([*done, *under_way]))

    return resume
