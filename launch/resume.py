"""``flowrt resume RUN``: go on with a run from its newest checkpoint, with nothing but its directory."""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from flowrt.launch.commands import check_programs
from flowrt.launch.local import LocalRun
from flowrt.launch.restarts import read_summary
from rich.console import Console

from flowrt.errors import EXIT_OK, ConfigError
from flowrt.lock import RunLock
from flowrt.recipes.config import RunConfig
from flowrt.recipes.load import check, from_file
from flowrt.recipes.moved import moved
from flowrt.recipes.paths import checkpoint_steps, kept_model_dir
from flowrt.recipes.subjects import subject
from flowrt.wire.keys import controller_keys
from flowrt.wire.sockets import check_free


def resume(run_dir: Path, flags: Sequence[str], console: Console) -> int:
    """Go on to the end, where and as the flags say; returns the exit code.

    A run that is complete says so, which is a success. Raises ConfigError, with nothing changed, on bad input.
    """
    run_dir = run_dir.absolute()
    before = revive(run_dir)
    config = moved(before, flags)
    done, summary = max(checkpoint_steps(run_dir), default=0), read_summary(run_dir)
    if config.steps < done:
        raise ConfigError(f"--steps {config.steps} is less than the {done} steps that {run_dir} has trained; give more")
    if summary is not None and summary["exit_code"] == EXIT_OK:
        trained = summary["steps"]
        if config.steps <= max(done, trained) or config.steps == before.steps:
            console.print(
                f"run {run_dir} is complete: {trained} steps; --steps N goes on", highlight=False, soft_wrap=True
            )
            return EXIT_OK
        if done < trained:
            raise ConfigError(
                f"run {run_dir} is complete, and has no checkpoint after its last step (checkpoint.every was 0); "
                f"start another one with --model {run_dir / 'final'}"
            )
    if config.controller.keys:
        controller_keys(Path(config.controller.keys))
    check_free(config.controller.bind, bool(config.controller.keys))
    check_programs(config)
    subject(config)  # reads and checks the data before anything is written
    code: int = asyncio.run(LocalRun(config, console).run())
    return code


def revive(run_dir: Path) -> RunConfig:
    """The configuration of a run that has ended, wherever it lies now. Raises ConfigError when there is none."""
    path = run_dir / "config.toml"
    if not path.is_file():
        raise ConfigError(f"{run_dir} is no run directory: it has no config.toml")
    RunLock(run_dir).release()
    config = dataclasses.replace(from_file(path), run_dir=str(run_dir))
    kept = kept_model_dir(run_dir)
    if config.model and kept.is_dir():
        config = dataclasses.replace(config, model=str(kept))
    check(config)
    return config
