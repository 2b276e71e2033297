"""The train stage: micro-batches of whole groups, streamed as they become ready, or planned for a whole step.

A step is planned as a whole where policies share it among ranks or cut it to a budget of tokens.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from flowrt.controller.events import AppendRestartLog, Command, LogEvent, Persist, StepClosed
from flowrt.controller.policies.batching import Batcher, GroupCount
from flowrt.controller.policies.group_filter import REWARD, compared, mean_reward, rewards, zero_variance_groups
from flowrt.controller.state.controller_restart import FILTERED, SKIPPED, STEP, CounterSet, Deferrable
from flowrt.controller.state.counters import validate_names
from flowrt.controller.state.slots import Group, Slot
from flowrt.controller.state.state import Environment, State
from flowrt.controller.transitions import failed_transfers, filtering, rollback, step_end
from flowrt.errors import RemoteProtocolError
from flowrt.ids import UNSCORED, WorkerId, data_set_of
from flowrt.protocol.messages import KEPT_TOKENS, CheckpointWritten, StepCompleted, Values

# Fields of metrics.jsonl that count what is trained, and what the group filter and the curriculum leave out.
ZERO_VARIANCE = "zero_variance_groups"
FILTERED_GROUPS = "filtered_groups"
REFUSED_TRAINED = "refused_groups_trained"
SKIPPED_PROMPTS = "skipped_prompts"
REWARD_STD, REWARD_P10, REWARD_P90 = "reward_std", "reward_p10", "reward_p90"
LENGTH_MEAN, LENGTH_MAX = "length_mean", "length_max"
REWARD_OF, GROUPS_OF = "reward_of/", "groups_of/"
"""Prefixes of the metrics of one data set, followed by its name."""

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
        plan.keep(dict(zip(tokens_of, kept, strict=True)))


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
    kept = [min(state.plan.kept.get(slot.id, 0), _generated_tokens(slot)) for slot in slots]
    return (Values(KEPT_TOKENS, tuple(map(float, kept))),)


def _trainable_tokens(group: Group) -> Iterator[tuple[Slot, int]]:
    """Each slot of a group with the number of its response tokens, 0 for one that is not trained."""
    trained = compared([slot.inline.get(UNSCORED, 0.0) for slot in group.slots])
    for place, slot in enumerate(group.slots):
        yield slot, _generated_tokens(slot) if place in trained else 0


def _generated_tokens(slot: Slot) -> int:
    return sum(slot.spans[1::2])


# ---- ends of steps and checkpoints


def step_completed(
    state: State, env: Environment, worker: WorkerId, message: StepCompleted, now: float
) -> list[Command]:
    """Close the step after the optimiser has stepped; during recovery the message is deferred.

    Raises RemoteProtocolError as `close_step`, and if the worker is no trainer.
    """
    return _of_trainer(state, env, worker, message)


def checkpoint_written(
    state: State, env: Environment, worker: WorkerId, message: CheckpointWritten, now: float
) -> list[Command]:
    """Make the ledger durable after a checkpoint was written, and answer; during recovery the message is deferred.

    Raises RemoteProtocolError if the worker is no trainer, or the checkpoint is not that of the last closed step.
    """
    return _of_trainer(state, env, worker, message)


def _of_trainer(state: State, env: Environment, worker: WorkerId, message: Deferrable) -> list[Command]:
    """Check that the worker trains, then handle or defer its message."""
    what = f"says {type(message).__name__}"
    trainers, stage = env.settings.checkpointing_roles, env.flow.train_stage
    fault = state.membership.role_fault(worker, trainers, what)
    has_pulled = worker in state.requests.pullers.get(stage, {})
    if not fault and not (trainers or has_pulled or state.recovery.has_returned(worker)):
        fault = f"{worker} {what}, but has never pulled {stage!r}"
    if fault:
        raise RemoteProtocolError(fault)
    if state.recovery.is_active:
        state.recovery.defer(worker, message)
        return []
    return apply_deferrable(state, env, worker, message)


def apply_deferrable(state: State, env: Environment, worker: WorkerId, message: Deferrable) -> list[Command]:
    """Handle a message of a trainer outside recovery. Raises RemoteProtocolError if it does not fit the step."""
    if isinstance(message, CheckpointWritten):
        return _publish_checkpoint(state, worker, message)
    if state.recovery.has_returned(worker) and message.step < state.window.step:
        return []  # an earlier controller has recorded the end of this step
    return close_step(state, env, worker, message)


def close_step(state: State, env: Environment, worker: WorkerId, message: StepCompleted) -> list[Command]:
    """Close the step in training: all taken groups are trained.

    Raises RemoteProtocolError if another step is in training, it lacks groups, or a metric has an invalid name.
    """
    window = state.window
    if message.step != window.step or window.places != 0 or window.over:
        raise RemoteProtocolError(
            f"{worker} ended step {message.step}, but step {window.step} is in training with {window.places} "
            "places open"
        )
    if fault := validate_names(message.metrics, {}):
        raise RemoteProtocolError(f"{worker} ended step {message.step}, and {fault}")
    filtered, skipped = window.filtered, window.skipped
    trained = window.close()
    if state.lanes.failed:
        for slot in [slot for group in trained for slot in group.slots]:
            failed_transfers.note_arrived(
                state, slot.leases[env.flow.train_stage].worker, env.flow.train_stage, (slot,)
            )
    state.table.end_training(env.flow.train_stage, trained)
    commands: list[Command] = []
    for group in trained:
        reward = rollback.note_outcome(state, group, message.step)
        commands += rollback.record(state, env, group, "trained", step=message.step, reward=reward)
    state.history.close_step()
    closed, guarded = step_end.guard(state, env, _step_closed(env, message, trained, filtered, skipped))
    commands.append(closed)
    commands += guarded
    commands.append(AppendRestartLog(CounterSet(STEP, window.step)))
    if filtered:
        commands.append(AppendRestartLog(CounterSet(FILTERED, 0)))
    if skipped:
        commands.append(AppendRestartLog(CounterSet(SKIPPED, 0)))
    commands += rollback.close(state, env, trained)
    filtering.recheck(state, env, filtered)
    return commands + rollback.drop_over_age(state, env)


def _step_closed(
    env: Environment, message: StepCompleted, trained: Sequence[Group], filtered: int, skipped: int
) -> StepClosed:
    """The statistics of a completed step."""
    counts: list[tuple[str, int]] = []
    if REWARD in env.flow.train_inline:
        counts.append((ZERO_VARIANCE, zero_variance_groups(trained)))
    if env.is_filtering:
        refused = sum(bool(env.policies.group_filter.refusal(group)) for group in trained)
        counts += [(FILTERED_GROUPS, filtered), (REFUSED_TRAINED, refused)]
    if env.policies.curriculum.history:
        counts.append((SKIPPED_PROMPTS, skipped))
    measures: list[tuple[str, float]] = []
    if REWARD in env.flow.train_inline:
        measures += _spread(trained)
    if len(env.settings.data_sets) > 1:
        of_set = [
            [sample for sample in trained if data_set_of(sample.prompt) == at]
            for at in range(len(env.settings.data_sets))
        ]
        for name, groups in zip(env.settings.data_sets, of_set, strict=True):
            counts.append((f"{GROUPS_OF}{name}", len(groups)))
            if REWARD in env.flow.train_inline and (of_groups := _rewards(groups)):
                measures.append((f"{REWARD_OF}{name}", sum(of_groups) / len(of_groups)))
    slots = [slot for group in trained for slot in group.slots]
    lengths = [_generated_tokens(slot) for slot in slots]
    if any(lengths):
        measures.append((LENGTH_MEAN, sum(lengths) / len(lengths)))
        counts.append((LENGTH_MAX, max(lengths)))
    columns = sorted({column for slot in slots for column in slot.inline})
    return StepClosed(
        step=message.step,
        groups=len(trained),
        samples=len(slots),
        tokens=sum(map(env.sizes.tokens, trained)),
        lags=tuple(message.step - (slot.oldest_version() or 0) for slot in slots),
        inline_means=(*((name, value) for name in columns if (value := _mean(name, trained)) is not None), *measures),
        metrics=message.metrics,
        counts=tuple(counts),
    )


def _spread(groups: Sequence[Group]) -> list[tuple[str, float]]:
    """The standard deviation of the reward over the samples, and two percentiles of the groups' mean rewards."""
    rewards = _rewards(groups)
    if not rewards:
        return []
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    means = sorted(mean_of_group for group in groups if (mean_of_group := mean_reward(group)) is not None)
    return [(REWARD_STD, deviation), (REWARD_P10, _percentile(means, 0.1)), (REWARD_P90, _percentile(means, 0.9))]


def _percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of sorted values lies, interpolated linearly between two of them."""
    place = share * (len(values) - 1)
    below = min(int(place), len(values) - 1)
    above = min(below + 1, len(values) - 1)
    return values[below] + (place - below) * (values[above] - values[below])


def _rewards(groups: Sequence[Group]) -> list[float]:
    """The rewards of the samples of these groups to which a reward function applies."""
    return [reward for group in groups for reward in rewards(group)]


def _mean(column: str, groups: Sequence[Group]) -> float | None:
    """The mean of an inline column over the samples of these groups; None for the reward if no function applies."""
    values = _rewards(groups) if column == REWARD else [slot.inline[column] for group in groups for slot in group.slots]
    return sum(values) / len(values) if values else None


def _publish_checkpoint(state: State, worker: WorkerId, message: CheckpointWritten) -> list[Command]:
    """The commands that sync the ledger to disk and then answer the trainer."""
    if message.step != state.window.step:
        raise RemoteProtocolError(
            f"{worker} saved its state after {message.step} steps, but {state.window.step} are closed"
        )
    text = f"{worker} has saved its state after {message.step} steps"
    return [LogEvent("checkpoint", message.step, text, worker), Persist(worker, message.request)]
