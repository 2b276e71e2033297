"""``flowrt resume RUN``: continue a run from its newest checkpoint; needs only the run directory."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from flowrt.controller.storage.integrity import LEDGER, last_step
from flowrt.errors import EXIT_OK, ConfigError
from flowrt.launcher.local_run import check_and_run
from flowrt.launcher.supervision import read_summary
from flowrt.recipes.checkpoint_checksums import check_newest
from flowrt.recipes.config import RunConfig, changed
from flowrt.recipes.config_io import from_file
from flowrt.recipes.constraints import check
from flowrt.recipes.resume_overrides import apply_overrides
from flowrt.recipes.run_dir import (
    CONFIG,
    built_model_dir,
    built_reference_dir,
    check_summary_file,
    checkpoint_steps,
    kept_model_dir,
    kept_reference_dir,
)
from flowrt.recipes.tasks.registry import check_digest
from flowrt.recipes.tasks.task_file import digest
from flowrt.runtime.files import RunLock


def resume(run_dir: Path, flags: Sequence[str], console: Console, page_port: int | None = None) -> int:
    """Continue the run to its end, with the changes of ``flags`` to its configuration; returns the exit code.

    For a run that is complete, prints a line and returns 0. Raises ConfigError, with nothing changed, on bad input.
    """
    run_dir = run_dir.absolute()
    before = read_config(run_dir)
    check_summary_file(run_dir)
    config = apply_overrides(before, flags)
    summary = read_summary(run_dir)
    if summary is None or summary["exit_code"] != EXIT_OK or config.steps != before.steps:
        check_newest(run_dir)
    done = max(checkpoint_steps(run_dir), default=0)
    if summary is None and not done:
        _check_unfinished(run_dir)
    if config.steps < done:
        raise ConfigError(f"--steps {config.steps} is less than the {done} steps that {run_dir} has trained; give more")
    if summary is not None and summary["exit_code"] == EXIT_OK:
        trained = summary["steps"]
        if config.steps <= max(done, trained) or config.steps == before.steps:
            if config.recipe_sha256 != before.recipe_sha256:
                check_digest(config, digest(config.recipe))
            console.print(
                f"run {run_dir} is complete: {trained} steps; --steps N continues it", highlight=False, soft_wrap=True
            )
            return EXIT_OK
        if done < trained:
            raise ConfigError(
                f"run {run_dir} is complete, and has no checkpoint after its last step (checkpoint.every was 0); "
                f"start a new run with --model {run_dir / 'final'}"
            )
    return check_and_run(config, console, page_port=page_port)


def _check_unfinished(run_dir: Path) -> None:
    """Raises ConfigError for a run without checkpoints that may be complete, because its summary.json is damaged."""
    summary, trained = run_dir / "summary.json", last_step(run_dir / LEDGER)
    if summary.exists() and trained is not None:
        raise ConfigError(
            f"{summary} is damaged, and without a checkpoint flowrt resume would discard all {trained + 1} steps of "
            f"{run_dir}; remove summary.json to start again at step 0"
        )


def read_config(run_dir: Path) -> RunConfig:
    """The configuration of a run that has ended, whose directory may have been moved.

    Raises ConfigError for a directory that is no run directory, and for a configuration that is not valid.
    """
    config = stored_config(run_dir)
    RunLock(run_dir).release()
    config = with_own_models(config, run_dir)
    check(config)
    return config


def stored_config(run_dir: Path) -> RunConfig:
    """The configuration in a run directory. Raises ConfigError if there is none, or it is not valid."""
    path = run_dir / CONFIG
    if not path.is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no {CONFIG}")
    return from_file(path)


def with_own_models(config: RunConfig, run_dir: Path) -> RunConfig:
    """The configuration with this run directory, and with its models where it has some in place of the user's.

    The copy of the user's model comes before one with ``model_overrides``, which is written again from it.
    """
    config = dataclasses.replace(config, run_dir=str(run_dir))
    if config.model:
        for own in (built_model_dir(run_dir), kept_model_dir(run_dir)):
            config = dataclasses.replace(config, model=str(own)) if own.is_dir() else config
    if config.reference.model:
        for own in (built_reference_dir(run_dir), kept_reference_dir(run_dir)):
            config = changed(config, {"reference.model": str(own)}) if own.is_dir() else config
    return config
