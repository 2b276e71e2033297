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
    checkpoint_dir,
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
    trained = None if done else last_step(run_dir / LEDGER)
    if trained is not None and (summary is None or summary["exit_code"] != EXIT_OK):
        _check_start_again(config, trained + 1, is_summary_read=summary is not None)
    if config.steps < done:
        raise ConfigError(f"--steps {config.steps} is less than the {done} steps that {run_dir} has trained; give more")
    if summary is not None and summary["exit_code"] == EXIT_OK:
        last = summary["steps"]
        if config.steps <= max(done, last) or config.steps == before.steps:
            if config.recipe_sha256 != before.recipe_sha256:
                check_digest(config, digest(config.recipe))
            console.print(
                f"run {run_dir} is complete: {last} steps; --steps N continues it", highlight=False, soft_wrap=True
            )
            return EXIT_OK
        if done < last:
            raise ConfigError(
                f"run {run_dir} is complete, and has no checkpoint after its last step (checkpoint.every was 0); "
                f"start a new run with --model {run_dir / 'final'}"
            )
    if trained is not None:
        again = f"run {run_dir} has no checkpoint yet: its steps trained so far ({trained + 1}) are made again"
        console.print(again, highlight=False, markup=False, soft_wrap=True)
    return check_and_run(config, console, page_port=page_port)


def _check_start_again(config: RunConfig, trained: int, *, is_summary_read: bool) -> None:
    """Raises ConfigError for a run without checkpoints that had some, or whose damaged summary.json may say that it is
    complete: it would train its ``trained`` steps again.
    """
    run_dir = Path(config.run_dir)
    if config.checkpoint.every and trained > config.checkpoint.every:
        raise ConfigError(
            f"{run_dir} has none of its checkpoints any more, and flowrt resume would discard all {trained} steps; "
            f"restore {checkpoint_dir(run_dir, 0).parent} from a copy, or start again in another run directory"
        )
    summary = run_dir / "summary.json"
    if summary.exists() and not is_summary_read:
        raise ConfigError(
            f"{summary} is damaged, and without a checkpoint flowrt resume would discard all {trained} steps of "
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
