"""Which groups form a step: the group filter, and micro-batches of groups that are ready to train.

- Micro-batches are whole groups, streamed as they become ready. A step is planned as a whole where policies share it
  among ranks or cut it to a budget of tokens. Which groups may wait for a later step: `TrainingWindow.choose`.
- The group filter decides on groups that have become ready: they are kept, or dropped and replaced by other prompts. A
  decision may be made again: after a restart, and for groups that wait when a step is closed. So no step that has tries
  left trains a group that the filter refuses. There is no decision on a group that a trainer has taken.
- Where groups are trained in order of issue, they are decided on in that order too: which groups are dropped before the
  tries of the step are used up must not depend on the order in which groups become complete.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from flowrt.controller.events import AppendRestartLog, Command
from flowrt.controller.policies.batching import Batcher, GroupCount
from flowrt.controller.policies.group_filter import compared
from flowrt.controller.state.controller_restart import FILTERED, CounterSet
from flowrt.controller.state.slots import Group, Slot
from flowrt.controller.state.state import Environment, State
from flowrt.controller.transitions import rollback
from flowrt.ids import UNSCORED, GroupId, WorkerId
from flowrt.protocol.messages import KEPT_TOKENS, Values

REASON = "filtered: "
"""Prefix of the reasons of filtered groups in the ledger."""

# ---- group filter


def decide(state: State, env: Environment, ready: Iterable[GroupId]) -> list[Command]:
    """Drop those of the ready groups that the filter refuses, while the step has tries left."""
    if not env.is_filtering:
        return []
    commands: list[Command] = []
    window, group_filter = state.window, env.policies.group_filter
    for group in _due(state, env, ready):
        if window.filtered >= env.settings.filter_tries:
            break
        if why := group_filter.refusal(group):
            window.filtered += 1
            reward = rollback.note_outcome(state, group, window.step)
            commands += rollback.drop(state, env, group, f"{REASON}{why}", reward)
            commands.append(AppendRestartLog(CounterSet(FILTERED, window.filtered)))
    return commands


def _due(state: State, env: Environment, ready: Iterable[GroupId]) -> list[Group]:
    """The groups among ``ready`` that are to be decided on now, in order of issue."""
    complete = state.table.ready_groups[env.flow.train_stage]
    due = state.window.due(ready, complete) if env.settings.strict_issue_order else ready
    return [complete[group_id] for group_id in sorted(due) if group_id in complete]


def decide_again(state: State, env: Environment, filtered: int) -> None:
    """After the end of a step that dropped ``filtered`` groups: if it had no tries left, decide again on the groups
    that are ready, with the tries of the next step.
    """
    if env.is_filtering and filtered >= env.settings.filter_tries:
        state.window.decided = -1
        state.work.add_ready(state.table.ready_groups[env.flow.train_stage])


# ---- micro-batches


def next_batch(state: State, env: Environment, worker: WorkerId, step: int) -> list[Group] | None:
    """The next micro-batch for a trainer at ``step``, whole groups.

    Returns an empty list while the trainer has to wait, and None if ``step`` has no groups left for it.
    """
    window = state.window
    if not window.over and step > window.step:
        return []
    groups: list[Group] | None = None
    if not window.over and window.places:
        is_planned = env.policies.rank_balancing.whole_step or env.policies.tokens_per_step is not None
        groups = _planned(state, env, worker) if is_planned else _streamed(state, env, env.policies.batcher)
    return groups


def _streamed(state: State, env: Environment, batcher: Batcher) -> list[Group]:
    """The next micro-batch of ready groups; empty while it is not full."""
    state.window.note_versions(state.table.aged())
    ready = state.table.ready_groups[env.flow.train_stage]
    return state.window.choose(ready, state.admission(env), batcher, env.sizes.tokens)


def _planned(state: State, env: Environment, worker: WorkerId) -> list[Group] | None:
    """The worker's next micro-batch of a planned step; None if its share is done."""
    plan, window = state.plan, state.window
    # A taken group that was dropped leaves a place that the plan does not include.
    if not plan.is_valid(window.step, state.table.groups) or plan.left(window.taken) < window.places:
        whole = _streamed(state, env, GroupCount(window.places))
        if not whole:
            return []
        _plan_step(state, env, whole)
        state.work.add_window()  # other ranks may wait for their shares
    share = [group for group in plan.share_of(worker) if group.id not in window.taken]
    if not share:
        return None
    # A group that was lost after planning is waited for, not replaced.
    ready = state.table.ready_groups[env.flow.train_stage]
    available = list(itertools.takewhile(lambda group: group.id in ready, share))
    batch = _first_batch(env, available)
    return batch if len(batch) < len(available) or len(available) == len(share) else []


def _plan_step(state: State, env: Environment, groups: Sequence[Group]) -> None:
    """Plan the step in training, all of whose groups are ready.

    A second plan of the same step is not shared: some ranks may have been told that none of it is left for them.
    """
    plan, step, cut = state.plan, state.window.step, env.policies.tokens_per_step
    groups = sorted(groups, key=lambda group: group.id)
    is_second = plan.step == step
    tokens = [] if is_second else [env.sizes.tokens(group) for group in groups]
    plan.fill(step, groups, None if is_second else env.policies.rank_balancing.split(groups, tokens))
    if cut is not None:
        tokens_of = {slot.id: count for group in groups for slot, count in _trainable_tokens(group)}
        kept = cut.kept(list(tokens_of.values()), step)
        plan.kept = dict(zip(tokens_of, kept, strict=True))


def _first_batch(env: Environment, groups: Sequence[Group]) -> list[Group]:
    """The first of these groups that fill a micro-batch, or all of them."""
    chosen: list[Group] = []
    tokens = rows = 0
    for group in groups:
        if env.policies.batcher.full(len(chosen), tokens, rows):
            break
        chosen.append(group)
        tokens += env.sizes.tokens(group)
        rows += len(group.slots)
    return chosen


def kept_tokens(state: State, env: Environment, slots: Sequence[Slot]) -> tuple[Values, ...]:
    """The number of leading response tokens of each sample that are trained, as a column; empty if steps are not cut.

    A sample that was generated again after the step was planned keeps the planned number, at most its new length.
    """
    if env.policies.tokens_per_step is None or not slots:
        return ()
    kept = [min(state.plan.kept.get(slot.id, 0), generated_tokens(slot)) for slot in slots]
    return (Values(KEPT_TOKENS, tuple(map(float, kept))),)


def _trainable_tokens(group: Group) -> Iterator[tuple[Slot, int]]:
    """Each slot of a group with the number of its response tokens, 0 for one that is not trained."""
    trained = compared([slot.inline.get(UNSCORED, 0.0) for slot in group.slots])
    for place, slot in enumerate(group.slots):
        yield slot, generated_tokens(slot) if place in trained else 0


def generated_tokens(slot: Slot) -> int:
    """Number of tokens of its response."""
    return sum(slot.spans[1::2])
