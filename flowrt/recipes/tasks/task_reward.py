"""The reward of a task in a file of the user's, in the child processes of reward functions (`flowrt.rewards`).

What it raises, how long it takes and what memory it takes is handled as for a reward function; see `RewardOptions`.
"""

import json
from collections.abc import Mapping
from dataclasses import replace

from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import from_toml, to_toml
from flowrt.recipes.tasks.registry import takes_reward, task_of
from flowrt.recipes.tasks.task_file import is_task_file
from flowrt.rewards.built_in import Scorer
from flowrt.rewards.functions import TaskReward
from flowrt.rewards.outcomes import RewardOutcome
from flowrt.rewards.user_file import outcome_of

KIND = "task:"
"""The function of this kind is the task's reward."""


def with_task_reward(config: RunConfig) -> RunConfig:
    """The configuration with its task's reward as the only reward function, if the task is in a file and has one."""
    if not is_task_file(config.recipe) or takes_reward(config.recipe):
        return config
    return replace(config, reward=replace(config.reward, functions=(f"{KIND}{config.recipe}",)))


def is_scored_by_task(config: RunConfig) -> bool:
    """Whether the reward function of a run is the reward of its task in a file."""
    return config.reward.functions == (f"{KIND}{config.recipe}",)


def task_reward(config: RunConfig) -> TaskReward | None:
    """What a child process makes the scorer from; None if the task has no part in the reward."""
    return TaskReward(__name__, to_toml(config)) if is_scored_by_task(config) else None


def row_of(answer: bytes) -> bytes:
    """The answer of an example as the row of a call."""
    return json.dumps({"answer": answer.decode()}).encode()


def scorer(configuration: str) -> Scorer:
    """The reward of the task of this configuration. Raises ConfigError if the task cannot be made."""
    task = task_of(from_toml(configuration))

    def score(response: str, answer: object, columns: Mapping[str, object]) -> RewardOutcome:  # noqa: ARG001
        return outcome_of(task.reward(response, str(answer)), 0)

    return score
