"""Group filter: groups that have become ready to train are kept, or dropped and replaced by other prompts.

- A decision may be made again: after a restart, and for groups that wait when a step is closed. So no step that has
  tries left trains a group that the filter refuses.
- There is no decision on a group that a trainer has taken.
- Where groups are trained in order of issue, they are decided on in that order too: which groups are dropped before the
  tries of the step are used up must not depend on the order in which groups become complete.
"""

from collections.abc import Iterable

from flowrt.controller.events import AppendRestartLog, Command
from flowrt.controller.state.controller_restart import FILTERED, CounterSet
from flowrt.controller.state.slots import Group
from flowrt.controller.state.state import Environment, State
from flowrt.controller.transitions import rollback
from flowrt.ids import GroupId

REASON = "filtered: "
"""Prefix of the reasons of filtered groups in the ledger."""


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
            window.count_filtered()
            reward = rollback.note_outcome(state, group, window.step)
            commands += rollback.drop(state, env, group, f"{REASON}{why}", reward)
            commands.append(AppendRestartLog(CounterSet(FILTERED, window.filtered)))
    return commands


def _due(state: State, env: Environment, ready: Iterable[GroupId]) -> list[Group]:
    """The groups among ``ready`` that are to be decided on now, in order of issue."""
    complete = state.table.ready_groups[env.flow.train_stage]
    due = state.window.due(ready, complete) if env.settings.strict_issue_order else ready
    return [complete[group_id] for group_id in sorted(due) if group_id in complete]


def recheck(state: State, env: Environment, filtered: int) -> None:
    """After the end of a step that dropped ``filtered`` groups: if it had no tries left, decide again on the groups
    that are ready, with the tries of the next step.
    """
    if env.is_filtering and filtered >= env.settings.filter_tries:
        state.window.decide_again()
        state.work.add_ready(state.table.ready_groups[env.flow.train_stage])
