"""The user's own task: prompts from a data set, reward functions by name (`flowrt.rewards`), any model.

`Example.answer` has the arguments that a function may take (`flowrt.rewards.rows`): all columns of the row, of which
those of the prompt and the answer have the names "prompt" and "answer"; without an answer if the row has none.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain

from flowrt.errors import ConfigError
from flowrt.recipes.config import RolloutConfig, RunConfig, TrainerConfig
from flowrt.recipes.data_config import DataConfig
from flowrt.recipes.tasks.base import Example, PromptBlock, Recipe, Task, TrainingSet
from flowrt.recipes.tasks.problems import Concatenated, ProblemSet, check_rows, in_turn, open_sets, shortest_first
from flowrt.recipes.tasks.rows import data_path
from flowrt.rewards.check import MAX_ROWS, check_rewards
from flowrt.rewards.options import RewardOptions


class CustomTask(Task):
    """The user's prompts and reward; the last ``data.eval_prompts`` rows are held out. Rows are read on demand."""

    scores_truncated = True

    def __init__(self, data: DataConfig, reward: RewardOptions, model: str = "") -> None:
        self._data = data
        self._reward = reward
        self._model = model

    def training_problems(self) -> Sequence[Example]:
        return Concatenated([set_.training for set_ in self._sets])

    def training_sets(self) -> Sequence[TrainingSet]:
        return [
            TrainingSet(set_.name, set_.weight, set_.training, set_.difficulties[: set_.first_held_out])
            for set_ in self._sets
        ]

    def held_out_problems(self) -> Sequence[Example]:
        return Concatenated([set_.held_out for set_ in self._sets])

    def prompt_blocks(self) -> Iterator[PromptBlock]:
        return chain.from_iterable(set_.prompt_blocks() for set_ in self._sets)

    def check(self, progress: Callable[[str], None]) -> tuple[str, ...]:
        """Check every row, and call each reward function on rows of each set in turn, see `check_rewards`.

        Raises ConfigError as `check_rows`, and for a reward function that cannot be loaded or fails. Arguments and
        result: `Task.check`.
        """
        check_rows(self._sets, self._data)
        if not self._reward.functions:
            return ()  # of `flowrt data check`
        parts = [set_.training for set_ in self._sets]
        # A row that is left out for the length of its prompt has no reward, so that its function need not work.
        problems = shortest_first(parts, MAX_ROWS) if self._data.overlong == "drop" else in_turn(parts)
        return check_rewards(self._reward, (problem.answer.encode() for problem in problems), progress, self._model)

    @cached_property
    def _sets(self) -> Sequence[ProblemSet]:
        return open_sets(self._data)


def _task(config: RunConfig) -> CustomTask:
    if not config.data.sets:
        data_path(config)
    return CustomTask(config.data, config.reward, config.model)


def check_given(config: RunConfig) -> None:
    """Raise ConfigError if a run has no model or no reward function."""
    needed = (
        ("--model DIRECTORY", config.model),
        ("--reward FUNCTION (FILE.py:FUNCTION, math …)", config.reward.functions),
    )
    if missing := [flag for flag, value in needed if not value]:
        small = "; the small model of a run of recipe arithmetic is RUN/model, and a task in FILE.py may build its own"
        raise ConfigError(f"recipe custom needs {' and '.join(missing)}, too{small if not config.model else ''}")


RECIPE = Recipe(
    "your prompts, reward and model: --data FILE.jsonl --reward FILE.py:FUNCTION --model DIR",
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
