"""The data sets of evaluations: the held-out rows of the task, or files of their own (``eval.data``)."""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig
from flowrt.recipes.data.files import held_out_split
from flowrt.recipes.data_config import DataConfig, DataSetConfig
from flowrt.recipes.data_sets import has_own_format, set_data
from flowrt.recipes.eval_names import HELD_OUT, MAX_EVAL_ROWS, eval_data_sets
from flowrt.recipes.tasks.base import Example, PromptBlock, Task, blocks
from flowrt.recipes.tasks.problems import Formed, folded
from flowrt.recipes.tasks.registry import takes_reward, task_of


def eval_sets(config: RunConfig, task: Task) -> dict[str, Sequence[Example]]:
    """The prompts of each evaluation data set, at most ``eval.limit`` of each, by its name.

    Raises ConfigError for data that cannot be read.
    """
    limit = config.eval.limit or None
    sets = {name: _problems(config, data_set) for name, data_set in eval_data_sets(config).items()}
    if not sets and config.data.eval_prompts:
        sets = {HELD_OUT: task.held_out_problems()}
    return {name: problems[:limit] for name, problems in sets.items()}


def run_prompts(config: RunConfig, task: Task, *, are_fit: bool = False) -> Iterator[PromptBlock]:
    """The prompts of a run: those of its task, unless they ``are_fit``, then those of ``eval.data``.

    Raises ConfigError for a row that cannot be used, also during iteration.
    """
    own = eval_sets(config, task).values() if config.eval.data else ()
    return chain(() if are_fit else task.prompt_blocks(), blocks(chain.from_iterable(own)))


def check_eval_sets(config: RunConfig, task: Task) -> None:
    """Read the data sets of ``eval.data``, if there are any.

    Raises ConfigError for rows that cannot be used and, in recipes with reward functions and without
    ``data.allow_overlap``, for prompts that are also training prompts, unless nothing is trained (``eval.only``).
    """
    if not config.eval.data:
        return
    sets = eval_sets(config, task)
    evaluated = {
        folded(*problem.as_prompt): (name, problem.where) for name, problems in sets.items() for problem in problems
    }
    if not takes_reward(config.recipe) or config.data.allow_overlap or config.eval.only:
        return
    shared = [problem for problem in task.training_problems() if folded(*problem.as_prompt) in evaluated]
    if shared:
        name, where = evaluated[folded(*shared[0].as_prompt)]
        raise ConfigError(
            f"{where}: prompts of eval.data are training prompts too, {len(shared)} rows, the first one is "
            f"{shared[0].where}; leave them out of data set {name}, or set data.allow_overlap"
        )


def _problems(config: RunConfig, data_set: DataSetConfig) -> Sequence[Example]:
    """All rows of the split of a data set, without the run's selection and order of rows."""
    default = DataConfig()
    data = dataclasses.replace(
        config.data,
        path=data_set.path,
        sets=(),
        eval_prompts=0,
        order=default.order,
        difficulty_key="",
        min_difficulty=default.min_difficulty,
        max_difficulty=default.max_difficulty,
    )
    data = set_data(data, data_set)
    data = dataclasses.replace(data, split=held_out_split(Path(data_set.path), data_set.split or config.eval.split))
    try:
        problems = task_of(dataclasses.replace(config, data=data)).training_problems()
        if len(problems) > MAX_EVAL_ROWS and not 0 < config.eval.limit <= MAX_EVAL_ROWS:
            raise ConfigError(f"it has {len(problems):,} prompts; take at most {MAX_EVAL_ROWS:,} with eval.limit")
        return Formed.of(problems, data.prompt_format if has_own_format(data_set) else None)
    except ConfigError as error:
        raise ConfigError(f"data set {data_set.name} of eval.data: {error}") from error
