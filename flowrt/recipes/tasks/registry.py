"""The table of recipes, by the names that ``flowrt run RECIPE`` accepts. A new one is its own file and a row here."""

from collections.abc import Callable
from dataclasses import replace

from flowrt.errors import ConfigError, suggested
from flowrt.recipes.config import RunConfig
from flowrt.recipes.tasks import arithmetic, custom, gsm8k
from flowrt.recipes.tasks.base import Recipe, Task

RECIPES: dict[str, Recipe] = {
    "arithmetic": arithmetic.RECIPE,
    "gsm8k": gsm8k.RECIPE,
    "custom": custom.RECIPE,
}


def recipe(name: str) -> Recipe:
    """Look up a recipe. Raises ConfigError if there is none of this name."""
    try:
        return RECIPES[name]
    except KeyError:
        raise ConfigError(f"there is no recipe {name!r}{suggested(name, RECIPES)}") from None


def task_of(config: RunConfig) -> Task:
    """The prompts and the reward of a run; with ``eval.data`` no rows are held out of the training data.

    Raises ConfigError if its data is missing or malformed.
    """
    if config.eval.data:
        config = replace(config, data=replace(config.data, eval_prompts=0))
    return recipe(config.recipe).task(config)


def check_task(config: RunConfig, progress: Callable[[str], None]) -> RunConfig:
    """Read all data, and call the run's reward functions once.

    Returns the configuration with the names of the parts of rewards. Raises ConfigError for any mistake; ``progress``
    receives notes on long waits.
    """
    parts = task_of(config).check(progress)
    return replace(config, reward=replace(config.reward, parts=parts)) if parts else config
