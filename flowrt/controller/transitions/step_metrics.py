"""The metrics of a step that the controller computes: their names in metrics.jsonl, and their values.

The trainer's metrics come with `StepCompleted` (`flowrt.engines.training.loss_passes`). `StepClosed.measured` joins
both, `flowrt.controller.storage.run_metrics` writes them, and `flowrt.recipes.metric_names` lists the names of a run.
"""

import math
from collections.abc import Sequence

from flowrt.controller.events import COUNTED, FRACTIONS, ZERO_VARIANCE, StepClosed
from flowrt.controller.policies.group_filter import REWARD, mean_reward, rewards, zero_variance_groups
from flowrt.controller.state.slots import Group
from flowrt.controller.state.state import Environment
from flowrt.controller.transitions.step_selection import generated_tokens
from flowrt.ids import data_set_of
from flowrt.protocol.messages import StepCompleted

FILTERED_GROUPS = "filtered_groups"
REFUSED_TRAINED = "refused_groups_trained"
SKIPPED_PROMPTS = "skipped_prompts"
REWARD_STD, REWARD_P10, REWARD_P90 = "reward_std", "reward_p10", "reward_p90"
LENGTH_MEAN, LENGTH_MAX = "length_mean", "length_max"
REWARD_OF, GROUPS_OF = "reward_of/", "groups_of/"
"""Prefixes of the metrics of one data set, followed by its name."""
OF_SAMPLES = (REWARD_STD, REWARD_P10, REWARD_P90, LENGTH_MEAN, LENGTH_MAX)
"""What is computed from the samples of a step; no metric of a trainer may overwrite it."""
OF_ALL_STEPS = (*COUNTED, ZERO_VARIANCE, *FRACTIONS.values(), *OF_SAMPLES)
"""The controller's metrics that every step of GRPO has."""


def step_closed(
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
            [group for group in trained if data_set_of(group.prompt) == at] for at in range(len(env.settings.data_sets))
        ]
        for name, groups in zip(env.settings.data_sets, of_set, strict=True):
            counts.append((f"{GROUPS_OF}{name}", len(groups)))
            if REWARD in env.flow.train_inline and (of_groups := _rewards(groups)):
                measures.append((f"{REWARD_OF}{name}", sum(of_groups) / len(of_groups)))
    slots = [slot for group in trained for slot in group.slots]
    lengths = [generated_tokens(slot) for slot in slots]
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
