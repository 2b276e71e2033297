"""The reward of a task file, called in the child processes of reward functions (`flowrt.rewards`).

Its exceptions, run time and memory are handled as those of a reward function; see `RewardOptions`.
"""

import json
from collections.abc import Mapping

from flowrt.recipes.config import RunConfig, changed
from flowrt.recipes.config_io import from_toml, to_toml
from flowrt.recipes.tasks.registry import takes_reward, task_of
from flowrt.recipes.tasks.task_file import is_task_file
from flowrt.rewards.built_in import Scorer
from flowrt.rewards.outcomes import RewardOutcome
from flowrt.rewards.reward_names import TaskReward
from flowrt.rewards.user_file import outcome_of

KIND = "task:"
"""Prefix of a reward function that is the reward of the task file after it."""


def with_task_reward(config: RunConfig) -> RunConfig:
    """The configuration with the task's reward as the only reward function, if a task file defines the reward."""
    if not is_task_file(config.recipe) or takes_reward(config.recipe):
        return config
    return changed(config, {"reward.functions": (f"{KIND}{config.recipe}",)})


def is_scored_by_task(config: RunConfig) -> bool:
    """Whether the only reward function of a run is the reward of its task file."""
    return config.reward.functions == (f"{KIND}{config.recipe}",)


def task_reward(config: RunConfig) -> TaskReward | None:
    """The data from which a child process makes the `scorer`; None unless `is_scored_by_task`."""
    return TaskReward(__name__, to_toml(config)) if is_scored_by_task(config) else None


def row_of(answer: bytes) -> bytes:
    """The row of a call, as JSON, with the answer of an example (UTF-8)."""
    return json.dumps({"answer": answer.decode()}).encode()


def scorer(configuration: str) -> Scorer:
    """A function that scores responses by the task of this configuration (TOML).

    Raises ConfigError if the task cannot be made.
    """
    task = task_of(from_toml(configuration))

    def score(response: str, answer: object, columns: Mapping[str, object]) -> RewardOutcome:  # noqa: ARG001
        return outcome_of(task.reward(response, str(answer)), 0)

    return score
