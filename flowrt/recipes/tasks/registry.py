"""Recipes by name, as in ``flowrt run RECIPE``: a table of the built-in ones, and task files of the user's."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from flowrt.errors import ConfigError, suggested
from flowrt.recipes.config import RunConfig, changed
from flowrt.recipes.tasks import arithmetic, custom, gsm8k
from flowrt.recipes.tasks.base import Recipe, Task
from flowrt.recipes.tasks.task_file import called, described, digest, is_task_file, load, split

RECIPES: dict[str, Recipe] = {
    "arithmetic": arithmetic.RECIPE,
    "gsm8k": gsm8k.RECIPE,
    "custom": custom.RECIPE,
}


NEED_MODELS = ("custom",)
"""Recipes without an embedded model."""


def recipe(name: str) -> Recipe:
    """Look up a built-in recipe. Raises ConfigError if there is none of this name."""
    try:
        return RECIPES[name]
    except KeyError:
        near = suggested(name, RECIPES)
        raise ConfigError(f"there is no recipe {name!r} (a task of your own is FILE.py){near}") from None


def takes_reward(name: str) -> bool:
    """Whether ``reward.functions`` score the responses of a recipe. Raises ConfigError if it cannot be loaded."""
    return described(name).takes_reward if is_task_file(name) else recipe(name).takes_reward


def held_out_by_default(name: str) -> int:
    """The default of ``data.eval_prompts`` in a recipe. Raises ConfigError if it cannot be loaded."""
    return int(default_of(name, "data.eval_prompts"))


def default_of(name: str, key: str) -> Any:
    """The default of a key, by its dotted name, in a recipe. Raises ConfigError if the recipe cannot be loaded."""
    if not is_task_file(name):
        return attrgetter(key)(recipe(name).defaults)
    value: Any = described(name).defaults
    for part in key.split("."):
        value = value.get(part)  # TOML has no null
    return tuple(value) if isinstance(value, list) else value


def task_of(config: RunConfig) -> Task:
    """The task of a run; with ``eval.data`` no rows are held out of the training data.

    A task file of the user's is executed in this process. Raises ConfigError if that fails, if the digest of the file
    is not ``recipe_sha256``, or if data is missing or malformed.
    """
    if config.eval.data:
        config = changed(config, {"data.eval_prompts": 0})
    if is_task_file(config.recipe):
        return _own_task(config)
    return recipe(config.recipe).task(config)


def _own_task(config: RunConfig) -> Task:
    path = split(config.recipe)[0]
    check_digest(config, digest(config.recipe))
    name, recipe = load(config.recipe)
    task: object = called(path, f"while {name} made the task", lambda: recipe.task(config))
    if not isinstance(task, Task):
        raise ConfigError(f"task file {path}: {name}.task gives {type(task).__name__}, and no flowrt.tasks.Task")
    return task


def check_digest(config: RunConfig, now: str) -> None:
    """Raise ConfigError if a task file has changed since the run began.

    Args:
        config: the configuration, with the digest at the beginning of the run (``recipe_sha256``) unless that is empty.
        now: SHA-256 of the file, in hexadecimal.
    """
    if config.recipe_sha256 not in ("", now):
        raise ConfigError(
            f"task file {split(config.recipe)[0]} has changed since the run began (its SHA-256 was "
            f"{config.recipe_sha256[:16]}…): restore it, or, if prompts and rewards are as they were, flowrt resume "
            f"{config.run_dir or 'RUN'} --recipe-sha256 {now}"
        )


def check_task(config: RunConfig, progress: Callable[[str], None]) -> RunConfig:
    """Make the task of a run and check it (`Task.check`): recipe custom reads all rows and calls the reward functions.

    Args:
        config: the configuration of the run.
        progress: receives notes on long waits.

    Returns:
        The configuration with the names of the parts of reward functions.

    Raises ConfigError for any error.
    """
    parts = task_of(config).check(progress)
    return changed(config, {"reward.parts": parts}) if parts else config
