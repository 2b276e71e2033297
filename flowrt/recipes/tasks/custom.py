"""The user's own task: prompts from a file, a Python function as the reward, any model.

The function takes the response and the reference answer as text and returns a number, the higher the better::

    def reward(response: str, answer: str) -> float: ...
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from tokenizers import Tokenizer

from flowrt.errors import ConfigError
from flowrt.recipes.config import DataConfig, RolloutConfig, RunConfig, TrainerConfig
from flowrt.recipes.tasks.base import Example, Recipe, Task
from flowrt.recipes.tasks.reward_client import RewardProcess, check_reward
from flowrt.recipes.tasks.rows import data_path, split_rows


class CustomTask(Task):
    """The user's prompts and reward; the last ``data.eval_prompts`` rows of the file are held out."""

    scores_truncated = True
    calls_user_code = True

    def __init__(self, path: Path, data: DataConfig) -> None:
        self._data = data
        self._reward = RewardProcess(data.reward, data.reward_timeout_s)
        rows = split_rows(path, (data.prompt_field, data.answer_field), data.eval_prompts)
        self._training, self._held_out = (
            [Example(row.values[0], row.values[1], "", row.where) for row in part] for part in rows
        )

    def training_problems(self) -> Sequence[Example]:
        return self._training

    def held_out_problems(self) -> Sequence[Example]:
        return self._held_out

    def reward(self, response: str, answer: str) -> float:
        return self._reward(response, answer)

    def check(self, progress: Callable[[str], None]) -> None:
        """Call the reward function once, on the first row."""
        check_reward(self._data.reward, self._data.reward_timeout_s, self._training[0].answer, progress)

    def close(self) -> None:
        self._reward.close()

    def sft_example(self, rng: random.Random, answer_only: bool) -> Example:  # noqa: ARG002
        _no_model()

    def tokenizer(self) -> Tokenizer:
        _no_model()


def _no_model() -> NoReturn:
    raise ConfigError("recipe custom starts from a model of yours; name its directory with --model")


def _task(config: RunConfig) -> CustomTask:
    path = data_path(config)
    if not config.model or not config.data.reward:
        raise ConfigError("recipe custom needs --model DIRECTORY and --data.reward FILE.py:FUNCTION, too")
    return CustomTask(path, config.data)


RECIPE = Recipe(
    "your prompts, reward and model: --data FILE.jsonl --data.reward FILE.py:FUNCTION --model DIR",
    RunConfig(
        recipe="custom",
        data=DataConfig(prompt_field="prompt", eval_prompts=64),
        rollout=RolloutConfig(max_new_tokens=256),
        trainer=TrainerConfig(lr=1e-5, warmup_steps=10, micro_batch_tokens=8192),
    ),
    _task,
    takes_reward=True,
)
"""Suited to a pretrained model; the data, the reward and the model have no default."""
