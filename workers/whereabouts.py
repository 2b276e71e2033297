"""Where a worker is: under which name, with which controller, and whether its host has what it needs."""

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from flowrt.errors import ConfigError, WaitExpired
from flowrt.recipes.config import RunConfig
from flowrt.recipes.paths import address_file, model_dir
from flowrt.waiting import CONTROLLER, pause, until

LOOK_S = 0.2
WRITTEN = "metrics.jsonl"
"""What every controller makes in its run directory before it listens."""


def worker_name(role: str, given: str, environment: Mapping[str, str]) -> str:
    """``given`` as it is for a process of its own; with its number where torchrun or one srun starts several."""
    number = environment.get("RANK", "")
    if not number and int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        number = environment["SLURM_PROCID"]
    return given if given and not number else f"{given or role}-{number or 0}"


async def find_address(where: str, deadline_s: float) -> str:
    """The controller's address: ``where`` itself, or what the controller has written into that run directory.

    Raises WaitExpired when nothing is written there by the deadline.
    """
    if "://" in where or os.sep not in where:
        return where
    path = address_file(Path(where))
    try:
        await until(_turns_true(path.is_file), deadline_s, f"{path}", CONTROLLER)
    except WaitExpired:
        raise WaitExpired(f"waited {deadline_s:.0f} s for {path}: does a run go on in that directory?") from None
    return path.read_text().strip()


async def _turns_true(condition: Callable[[], bool]) -> None:
    # A directory on a network file system tells nobody that it has changed.
    while not condition():
        await pause(LOOK_S)


def check_reach(config: RunConfig, checkpoints: bool = False) -> None:
    """Raises ConfigError when this host lacks what the run needs there, under the path that the run has it under.

    That is the model and, where this worker writes ``checkpoints`` and the run wants them, the controller's directory.
    """
    host, path = socket.gethostname(), model_dir(config)
    if not path.is_dir():
        raise ConfigError(
            f"model {path} is not there on host {host!r}: every worker reads it under this path; "
            "put it (or the run directory, for a model that is built) on a file system that all hosts mount"
        )
    if checkpoints and config.checkpoint.every and not Path(config.run_dir, WRITTEN).is_file():
        raise ConfigError(
            f"run directory {config.run_dir} is not that of the controller on host {host!r}: nobody could find a "
            "checkpoint that is written there; put it on a file system that the controller and all trainers mount, "
            "or do without (--checkpoint.every 0)"
        )
