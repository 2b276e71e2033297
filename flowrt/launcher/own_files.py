"""Checks of the task and the algorithm of a run before it starts, and the needs of those in a user's file.

A user's file may hang, exit or crash, and may import torch, which the launcher and the controller do not: it is loaded
in a separate process.
"""

import dataclasses
from collections.abc import Callable

from flowrt.errors import ConfigError
from flowrt.recipes.algorithms import is_own
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import to_toml
from flowrt.recipes.eval_sets import check_eval_sets
from flowrt.recipes.guards import check_guards
from flowrt.recipes.tasks.registry import check_digest, check_task, task_of
from flowrt.recipes.tasks.task_file import PROCESS, digest, is_task_file, split
from flowrt.recipes.tasks.task_reward import with_task_reward
from flowrt.runtime.file_process import ask


def with_checked_task(config: RunConfig, progress: Callable[[str], None]) -> RunConfig:
    """Read all data of a run, and test its reward functions.

    Args:
        config: of the run.
        progress: receives notes on long waits.

    Returns:
        The configuration with the digest of the task's file, and the names of the parts of rewards.

    Raises ConfigError for any mistake, and for a task file that has changed since the start of the run.
    """
    if not is_task_file(config.recipe):
        config = check_task(config, progress)
        check_eval_sets(config, task_of(config))
        return config
    now = digest(config.recipe)
    check_digest(config, now)
    config = dataclasses.replace(config, recipe_sha256=now)
    limit_s = config.data.check_timeout_s
    found = ask(PROCESS, ["check"], f"task file {split(config.recipe)[0]}", limit_s, to_toml(config), progress)
    parts = found.get("parts")
    if not isinstance(parts, list):
        raise ConfigError(f"task file {split(config.recipe)[0]} ended its process without an answer; correct it")
    if not parts:
        return with_task_reward(config)
    return dataclasses.replace(config, reward=dataclasses.replace(config.reward, parts=tuple(map(str, parts))))


LOAD_S = 120.0
"""Deadline for importing torch and the user's file."""


def with_own_needs(config: RunConfig) -> RunConfig:
    """The configuration with the needs of the user's algorithm; unchanged for a preset.

    Raises ConfigError if the file cannot be loaded, does not return in time, or defines no algorithm, and for a guard
    that cannot act.
    """
    name = config.algorithm.name
    if not is_own(name):
        return config
    needs = ask("flowrt.roles.algorithm", [name], f"algorithm {name.rpartition(':')[0]}", LOAD_S)
    metrics = needs.get("metrics")
    check_guards(config, metrics if isinstance(metrics, list) else [])
    algorithm = dataclasses.replace(config.algorithm, own_reference=needs.get("reference") is True)
    return dataclasses.replace(config, algorithm=algorithm)
