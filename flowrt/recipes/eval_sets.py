"""The data sets of evaluations: the held-out rows of the task, or files of their own (``eval.data``)."""

import dataclasses
from collections.abc import Sequence

from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig
from flowrt.recipes.eval_names import HELD_OUT, eval_paths
from flowrt.recipes.tasks.base import Example, Task
from flowrt.recipes.tasks.problems import folded
from flowrt.recipes.tasks.registry import recipe, task_of


def eval_sets(config: RunConfig, task: Task) -> dict[str, Sequence[Example]]:
    """The prompts of each data set by its name. Raises ConfigError for data that cannot be read."""
    limit = config.eval.limit or None
    sets = {name: _problems(config, path) for name, path in eval_paths(config).items()}
    if not sets and config.data.eval_prompts:
        sets = {HELD_OUT: task.held_out_problems()}
    return {name: problems[:limit] for name, problems in sets.items()}


def check_eval_sets(config: RunConfig, task: Task) -> None:
    """Read the data sets of ``eval.data``. Raises ConfigError for mistakes in them, and prompts that are trained."""
    if not config.eval.data:
        return
    trained: dict[str, str] | None = None
    for name, problems in eval_sets(config, task).items():
        if not recipe(config.recipe).takes_reward or config.data.allow_overlap:
            _ = [problem.answer for problem in problems]
            continue
        if trained is None:
            trained = {folded(one.prompt, one.messages): one.where for one in task.training_problems()}
        shared = [one for one in problems if folded(one.prompt, one.messages) in trained]
        if shared:
            where = trained[folded(shared[0].prompt, shared[0].messages)]
            raise ConfigError(
                f"{shared[0].where}: {len(shared)} prompts of eval.data {name} are training prompts too, the first one "
                f"is {where}; leave them out, or set data.allow_overlap"
            )


def _problems(config: RunConfig, path: str) -> Sequence[Example]:
    data = dataclasses.replace(config.data, path=path, eval_prompts=0)
    return task_of(dataclasses.replace(config, data=data)).training_problems()
