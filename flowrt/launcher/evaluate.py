"""``flowrt eval RUN``: evaluate a checkpoint of a run, or its best weights, without a change to the run."""

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flowrt.errors import EXIT_OK
from flowrt.launcher.absolute_paths import with_absolute_paths
from flowrt.launcher.export_model import saved_weights
from flowrt.launcher.local_run import check_and_run
from flowrt.launcher.resume import read_config
from flowrt.launcher.supervision import read_summary
from flowrt.recipes.config import BuildConfig, CheckpointConfig, RunConfig, SftConfig, changed
from flowrt.recipes.config_io import read_flags
from flowrt.recipes.constraints import check
from flowrt.recipes.data_sets import split_options
from flowrt.recipes.run_dir import model_dir
from flowrt.recipes.tasks.registry import held_out_by_default
from flowrt.recipes.tasks.task_file import digest, is_task_file, split
from flowrt.runtime.files import atomic_write, check_target, private_directory


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What to evaluate; a number that is None is taken from the configuration of the run."""

    step: int | None = None
    """None: the newest checkpoint."""
    best: bool = False
    """The best weights, in place of a checkpoint."""
    data: tuple[str, ...] = ()
    """NAME=PATH, or PATH as data set ``eval``; empty: the data sets of the run."""
    flags: tuple[str, ...] = ()
    """Flags ``--KEY=VALUE`` of how rows become prompts, in place of the values of the run."""
    samples: int | None = None
    temperature: float | None = None
    limit: int | None = None


def evaluate(run_dir: Path, options: EvalOptions, json_path: Path | None, console: Console) -> int:
    """Evaluate, print the results, and write them to ``json_path``, if given; returns the exit code.

    Raises ConfigError for a run or weights that cannot be evaluated.
    """
    run_dir = run_dir.absolute()
    if json_path is not None:
        check_target(json_path)
    config = read_config(run_dir)
    if is_task_file(config.recipe) and config.recipe_sha256 not in ("", digest(config.recipe)):
        text = (
            f"task file {split(config.recipe)[0]} has changed since the run began: the evaluation is by it as it is now"
        )
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        config = dataclasses.replace(config, recipe_sha256="")
    version, weights = saved_weights(run_dir, options.step, best=options.best)
    work = run_dir / f".eval-{os.getpid()}"
    source = weights if options.best else model_dir(config)
    evaluated = evaluated_config(config, options, work / "run", source)
    check(evaluated)
    prepare: tuple[str, ...] = ()
    if not options.best:
        prepare = ("checkpoint_model", "--checkpoint", str(weights), "--source", str(source))
        evaluated = dataclasses.replace(evaluated, model=str(work / "model"))
    private_directory(work)
    try:
        code = check_and_run(evaluated, console, prepare)
        summary = read_summary(Path(evaluated.run_dir))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if summary is None or code != EXIT_OK:
        return code
    results: dict[str, Any] = {name: {**result, "version": version} for name, result in summary["evaluations"].items()}
    for result in results.values():
        del result["evaluations"]
    console.print(f"weights of version {version} of {run_dir}", highlight=False, soft_wrap=True)
    if json_path is not None:
        atomic_write(
            json_path, json.dumps({"run": str(run_dir), "version": version, "results": results}, indent=1) + "\n"
        )
    return code


def evaluated_config(config: RunConfig, options: EvalOptions, run_dir: Path, model: Path) -> RunConfig:
    """The configuration of a run that only evaluates: ``config`` with the changes of ``options``.

    Raises ConfigError for a flag with a value of the wrong type.
    """
    config = read_flags("flowrt eval", options.flags, config)
    changes: dict[str, Any] = {
        "model": str(model),
        "run_dir": str(run_dir),
        "eval.only": True,
        "eval.interval": 0,
        "eval.stop_at": 0.0,
        "eval.overlap": "skip",
        "build": BuildConfig(),
        "sft": SftConfig(),
        "checkpoint": CheckpointConfig(every=0),
        "reference.model": "",
        "reference.refresh": 0,
        "reference.average": 1.0,
        "guard": (),
    }
    if options.data:
        changes["eval.data"] = tuple(
            text if "=" in split_options(text, f"--data {text!r:.80}")[0] else f"eval={text}" for text in options.data
        )
        changes["data.eval_prompts"] = held_out_by_default(config.recipe)  # with eval.data none are held out
    for name in ("samples", "temperature", "limit"):
        if (value := getattr(options, name)) is not None:
            changes[f"eval.{name}"] = value
    if changes.get("eval.samples", 1) > 1 and options.temperature is None and config.eval.temperature == 0:
        changes["eval.temperature"] = None
    return with_absolute_paths(changed(config, changes))
