"""The user's own task: prompts from a data set, a Python function as the reward, any model.

The function takes the response as text, the answer as its column has it, and any further columns by their names, and
returns a number, the higher the better::

    def reward(response: str, answer: str) -> float: ...
    def reward(response: str, answer: dict[str, Any], prompt: str, difficulty: int) -> float: ...

`Example.answer` is the JSON of what the function may take: the columns, with "prompt" and "answer" by these names.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import NoReturn

from tokenizers import Tokenizer

from flowrt.errors import ConfigError
from flowrt.recipes.config import DataConfig, RolloutConfig, RunConfig, TrainerConfig
from flowrt.recipes.tasks.base import Example, PromptBlock, Recipe, Task, TrainingSet
from flowrt.recipes.tasks.problems import Concatenated, ProblemSet, open_sets
from flowrt.recipes.tasks.reward_client import RewardProcess, check_reward
from flowrt.recipes.tasks.row_check import check_rows
from flowrt.recipes.tasks.rows import data_path


class CustomTask(Task):
    """The user's prompts and reward; the last ``data.eval_prompts`` rows are held out. Rows are read on demand."""

    scores_truncated = True
    calls_user_code = True

    def __init__(self, data: DataConfig) -> None:
        self._data = data
        self._reward = RewardProcess(data.reward, data.reward_timeout_s)

    def training_problems(self) -> Sequence[Example]:
        return Concatenated([one.training for one in self._sets])

    def training_sets(self) -> Sequence[TrainingSet]:
        return [
            TrainingSet(one.name, one.weight, one.training, one.difficulties[: one.first_held_out])
            for one in self._sets
        ]

    def held_out_problems(self) -> Sequence[Example]:
        return Concatenated([one.held_out for one in self._sets])

    def prompt_blocks(self) -> Iterator[PromptBlock]:
        return chain.from_iterable(one.prompt_blocks() for one in self._sets)

    def reward(self, response: str, answer: str) -> float:
        columns = json.loads(answer)
        return self._reward(response, columns.pop("answer"), columns)

    def check(self, progress: Callable[[str], None]) -> None:
        """Check every row, and call the reward function once, on the first one."""
        check_rows(self._sets, self._data)
        columns = json.loads(self.training_problems()[0].answer)
        check_reward(self._data.reward, self._data.reward_timeout_s, columns.pop("answer"), progress, columns)

    def close(self) -> None:
        self._reward.close()

    def sft_example(self, rng: random.Random, answer_only: bool) -> Example:  # noqa: ARG002
        _no_model()

    def tokenizer(self) -> Tokenizer:
        _no_model()

    @cached_property
    def _sets(self) -> Sequence[ProblemSet]:
        return open_sets(self._data)


def _no_model() -> NoReturn:
    raise ConfigError("recipe custom starts from a model of yours; name its directory with --model")


def _task(config: RunConfig) -> CustomTask:
    if not config.data.sets:
        data_path(config)
    if not config.model or not config.data.reward:
        raise ConfigError("recipe custom needs --model DIRECTORY and --data.reward FILE.py:FUNCTION, too")
    return CustomTask(config.data)


RECIPE = Recipe(
    "your prompts, reward and model: --data FILE.jsonl --data.reward FILE.py:FUNCTION --model DIR",
    RunConfig(
        recipe="custom",
        data=DataConfig(prompt_key="prompt", eval_prompts=64),
        rollout=RolloutConfig(max_new_tokens=256),
        trainer=TrainerConfig(lr=1e-5, warmup_steps=10, micro_batch_tokens=8192),
    ),
    _task,
    takes_reward=True,
)
"""Suited to a pretrained model; the data, the reward and the model have no default."""
