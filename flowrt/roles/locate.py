"""Worker identity and location: its name, the controller's address, and the paths its host must have."""

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from flowrt.errors import ConfigError, WaitExpired
from flowrt.recipes.config import RunConfig
from flowrt.recipes.run_dir import address_file, model_dir, read_address
from flowrt.runtime.waits import CONTROLLER, pause, wait_until

POLL_S = 0.2
CONTROLLER_FILE = "metrics.jsonl"
"""Every controller creates this file in its run directory before it listens."""


def worker_name(role: str, given: str, environment: Mapping[str, str]) -> str:
    """The worker's name: ``given`` or ``role``, plus the rank if torchrun or srun started several processes."""
    number = environment.get("RANK", "")
    if not number and int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        number = environment["SLURM_PROCID"]
    return given if given and not number else f"{given or role}-{number or 0}"


async def find_address(where: str, deadline_s: float) -> str:
    """The controller's address: ``where`` itself if it is one, else the address file in run directory ``where``.

    Raises WaitExpired if the file does not appear within ``deadline_s``, ConfigError for a malformed address.
    """
    if "://" in where:
        return where
    if ":" in where and os.sep not in where:
        raise ConfigError(f"controller address {where!r} is invalid; write tcp://HOST:PORT, or the run directory")
    path = address_file(Path(where))
    try:
        await wait_until(_poll(path.is_file), deadline_s, f"{path}", CONTROLLER)
    except WaitExpired:
        raise WaitExpired(f"waited {deadline_s:.0f} s for {path}: is a run active in that directory?") from None
    return read_address(path.parent)


async def _poll(condition: Callable[[], bool]) -> None:
    # Network file systems have no change notification.
    while not condition():
        await pause(POLL_S)


def check_reach(config: RunConfig, checkpoints: bool = False) -> None:
    """Check that this host sees the run's paths: the model and, with ``checkpoints``, the controller's run directory.

    Raises ConfigError naming the host and the path.
    """
    host, path = socket.gethostname(), model_dir(config)
    if not path.is_dir():
        raise ConfigError(
            f"model {path} does not exist on host {host!r}: every worker reads it under this path; "
            "put it (or the run directory, for a built model) on a file system that all hosts mount"
        )
    if checkpoints and config.checkpoint.every and not Path(config.run_dir, CONTROLLER_FILE).is_file():
        raise ConfigError(
            f"run directory {config.run_dir} is not the controller's on host {host!r}: checkpoints written there "
            "would be lost; put it on a file system that the controller and all trainers mount, "
            "or disable checkpoints (--checkpoint.every 0)"
        )
