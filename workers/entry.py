"""What every worker's command does: find the controller, get the configuration, run the role, leave with a reason."""

import argparse
import asyncio
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NoReturn

import torch

from flowrt.client.greeting import connect
from flowrt.client.session import Session
from flowrt.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ConfigError,
    FlowError,
    Stopped,
    WaitExpired,
)
from flowrt.lifeline import die_with_parent
from flowrt.recipes.config import RunConfig
from flowrt.recipes.load import from_toml
from flowrt.recipes.paths import address_file, model_dir
from flowrt.wire.keys import KEYS_VARIABLE, worker_keys
from flowrt.wire.loops import run_loop

log = logging.getLogger("flowrt")
Role = Callable[[Session, RunConfig], Awaitable[None]]
JOIN_S = 120.0
LOOK_S = 0.2


def main(role: str, run: Role) -> NoReturn:
    """Run one worker from the command line and exit."""
    parser = argparse.ArgumentParser(description=f"flowrt {role} worker; every other setting comes from the controller")
    parser.add_argument(
        "--controller", default=os.environ.get("FLOWRT_CONTROLLER", ""), help="tcp://HOST:PORT, or its run directory"
    )
    parser.add_argument("--name", default="", help=f"a name that no other worker has (default: {role}-RANK)")
    parser.add_argument("--join-s", type=float, default=JOIN_S, help="how long to look for the controller, in seconds")
    parser.add_argument(
        "--keys",
        default=os.environ.get(KEYS_VARIABLE, ""),
        help="directory that flowrt keys made, or a copy of my part",
    )
    arguments = parser.parse_args()
    if not arguments.controller:
        parser.error("--controller tcp://HOST:PORT is needed (or FLOWRT_CONTROLLER in the environment)")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    if "RANK" in os.environ:
        die_with_parent()  # torchrun cannot take its ranks along when it is killed
    name = worker_name(role, arguments.name, os.environ)
    try:
        code = run_loop(_live(arguments, name, role, run))
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    sys.stdout.flush()
    sys.stderr.flush()
    # Lane threads may be inside gloo, which cannot be interrupted; nothing they hold outlives the process.
    os._exit(code)


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
        async with asyncio.timeout(deadline_s):
            # A directory on a network file system tells nobody that it has changed.
            while not path.is_file():  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise WaitExpired(f"waited {deadline_s:.0f} s for {path}: does a run go on in that directory?") from None
    return path.read_text().strip()


async def _live(arguments: argparse.Namespace, name: str, role: str, run: Role) -> int:
    try:
        keys = worker_keys(Path(arguments.keys), name) if arguments.keys else None
        log.info("%s looks for the controller at %s, for at most %.0f s", name, arguments.controller, arguments.join_s)
        address = await find_address(arguments.controller, arguments.join_s)
        session = await connect(address, name, role, arguments.join_s, keys)
        log.info("%s has joined the run of the controller at %s", name, address)
    except FlowError as refused:
        log.error("%s", refused)
        return EXIT_BAD_INPUT
    error = ""
    try:
        config = from_toml(session.welcome.config)
        torch.set_num_threads(config.threads)
        check_reach(config)
        await run(session, config)
        await session.wait_stopped()
    except (Exception, BaseExceptionGroup) as raised:
        # Of several, the first is what happened; the others are its consequences.
        first = _first(raised)
        if isinstance(first, Stopped):
            log.info("stopped: %s", first.reason)
        else:
            error = f"{type(first).__name__}: {first}"
            log.error("%s failed", name, exc_info=None if isinstance(first, FlowError) else raised)
            log.error("%s", error)
    finally:
        await session.close(error)
    return EXIT_FAILED if error else EXIT_OK


def check_reach(config: RunConfig) -> None:
    """Raises ConfigError when this host does not have the model under the path that the run has it under."""
    path = model_dir(config)
    if not path.is_dir():
        raise ConfigError(
            f"model {path} is not there on host {socket.gethostname()!r}: every worker reads it under this path; "
            "put it (or the run directory, for a model that is built) on a file system that all hosts mount"
        )


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
