"""What a run checks of its configuration and its files before it starts anything, in one place: `flowrt data check` and
`flowrt reward check` refuse what these functions refuse, and nothing else.

A user's file may hang, exit or crash, and may import torch, which the launcher and the controller do not: it is loaded
in a separate process.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from flowrt.errors import ConfigError, refuse
from flowrt.launcher.exporters import check_exporters
from flowrt.recipes.algorithms import is_own
from flowrt.recipes.config import RunConfig, changed
from flowrt.recipes.config_io import to_toml
from flowrt.recipes.eval_sets import check_eval_sets
from flowrt.recipes.filter_function import check_filter_function
from flowrt.recipes.guards import guard_mistakes
from flowrt.recipes.model_files import base_model_dir, is_adapter, weight_files
from flowrt.recipes.tasks.registry import check_digest, check_task, task_of
from flowrt.recipes.tasks.task_file import PROCESS, digest, is_task_file, split
from flowrt.recipes.tasks.task_reward import with_task_reward
from flowrt.runtime.file_process import ask

LOAD_S = 120.0
"""Deadline for importing torch and a user's file, in seconds."""


def check_files(config: RunConfig, progress: Callable[[str], None]) -> RunConfig:
    """Check the exporters, data, functions and algorithm of a run: all rows are read, and functions are called.

    Args:
        config: of the run.
        progress: receives notes on long waits.

    Returns:
        The configuration with what was found out.

    Raises ConfigError for the first mistake.
    """
    check_exporters(config)
    config = with_checked_task(config, progress)
    check_filter_function(config, progress)
    return with_own_needs(config)


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
    config = replace(config, recipe_sha256=now)
    limit_s = config.data.check_timeout_s
    answered = ask(PROCESS, ["check"], f"task file {split(config.recipe)[0]}", limit_s, to_toml(config), progress)
    parts = answered.get("parts")
    if not isinstance(parts, list):
        raise ConfigError(f"task file {split(config.recipe)[0]} ended its process without an answer; correct it")
    if not parts:
        return with_task_reward(config)
    return changed(config, {"reward.parts": tuple(map(str, parts))})


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
    refuse(guard_mistakes(config, metrics if isinstance(metrics, list) else []))
    return changed(config, {"algorithm.own_reference": needs.get("reference") is True})


def has_weights(model: Path) -> bool:
    """Whether a directory is a model or an adapter with weights, and not a tokenizer and a configuration alone."""
    return is_adapter(model) or bool(weight_files(base_model_dir(model)))


def check_start(config: RunConfig, *, are_fit: bool = False) -> None:
    """Check the model and all prompts of a run, as its first process does.

    Of a directory without weights the tokenizer and the prompts are checked. An adapter of a large model is not merged
    for it: its base model is checked.

    Args:
        config: of the run.
        are_fit: whether the prompts of the task, but not those of ``eval.data``, are known to fit the model.

    Raises ConfigError for the first mistake.
    """
    from flowrt.launcher.model_check import MAX_LOADED_BYTES, check_model, check_without_weights
    from flowrt.launcher.start_models import merge_starts

    model = Path(config.model)
    with TemporaryDirectory(prefix="flowrt-") as directory:
        own = replace(config, run_dir=directory)
        if not has_weights(model):
            check_without_weights(own, model, are_fit=are_fit)
            return
        given = [Path(path) for path in (config.model, config.reference.model) if path]
        sizes = [file.stat().st_size for path in given for file in weight_files(base_model_dir(path))]
        if sum(sizes) > MAX_LOADED_BYTES:
            reference = replace(config.reference, model=_base(config.reference.model))
            own = replace(own, model=_base(config.model), reference=reference)
        merge_starts(own)
        check_model(own, are_fit=are_fit)


def _base(model: str) -> str:
    return str(base_model_dir(Path(model))) if model else ""
