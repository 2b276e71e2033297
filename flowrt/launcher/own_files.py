"""The task and the algorithm of a run before it starts; those in files of the user's say what they need.

A file of the user's may hang, exit or crash, so a process of its own loads it. The launcher and the controller do not
import torch.
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
    """Read all data of a run, and call its rewards once.

    Args:
        config: of the run.
        progress: receives notes on long waits.

    Returns:
        The configuration with the digest of the task's file, and the names of the parts of rewards.

    Raises ConfigError for any mistake, and for a task file that is not the one that the run began with.
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
    """The configuration with what the user's algorithm needs; a preset's is returned as it is.

    Raises ConfigError if the file cannot be loaded, does not return in time, or defines no algorithm.
    """
    name = config.algorithm.name
    if not is_own(name):
        return config
    needs = ask("flowrt.roles.algorithm", [name], f"algorithm {name.rpartition(':')[0]}", LOAD_S)
    metrics = needs.get("metrics")
    check_guards(config, metrics if isinstance(metrics, list) else [])
    algorithm = dataclasses.replace(config.algorithm, own_reference=needs.get("reference") is True)
    return dataclasses.replace(config, algorithm=algorithm)
