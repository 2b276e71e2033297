"""What every worker's command does: find the controller, get the configuration, run the role, leave with a reason."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from flowrt.workers.group import choose_interface
from flowrt.workers.whereabouts import check_reach, find_address, worker_name

from flowrt.client.greeting import connect
from flowrt.client.session import Session
from flowrt.errors import (
    EXIT_BAD_INPUT,
    EXIT_DISMISSED,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_STALLED,
    Drained,
    FlowError,
    Stopped,
    WaitExpired,
)
from flowrt.lifeline import die_with_parent
from flowrt.recipes.config import RunConfig
from flowrt.recipes.load import from_toml
from flowrt.waiting import CONTROLLER, Guard, all_of, first_of, open_waits
from flowrt.wire.keys import KEYS_VARIABLE, worker_keys
from flowrt.wire.loops import run_loop

log = logging.getLogger("flowrt")
Role = Callable[[Session, RunConfig], Coroutine[Any, Any, None]]
JOIN_S = 120.0
LEAVE_S = 2.0
TRAINER = "trainer"
SILENCE = Guard("the silence of the controller")


def main(role: str, run: Role, *, drains: bool = False) -> NoReturn:
    """Run one worker from the command line and exit; with ``drains`` it leaves in order when it is terminated."""
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
        code = run_loop(_live(arguments, name, role, run, drains))
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End the process now: threads may be inside gloo or an engine, which cannot be interrupted, and all would wait."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _say_waits() -> None:
    for wait in open_waits():
        log.info("%s", wait)


async def _live(arguments: argparse.Namespace, name: str, role: str, run: Role, drains: bool) -> int:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _say_waits)
    try:
        keys = worker_keys(Path(arguments.keys), name) if arguments.keys else None
        log.info("%s looks for the controller at %s, for at most %.0f s", name, arguments.controller, arguments.join_s)
        address = await find_address(arguments.controller, arguments.join_s)
        session = await connect(address, name, role, arguments.join_s, keys)
        log.info("%s has joined the run of the controller at %s", name, address)
        if role == TRAINER:
            choose_interface(address, os.environ)
    except FlowError as refused:
        log.error("%s", refused)
        return EXIT_BAD_INPUT
    error, code = "", EXIT_OK
    try:
        config = from_toml(session.welcome.config)
        torch.set_num_threads(config.threads)
        check_reach(config, role == TRAINER)
        if drains and (drain_s := _drain_s(role, config)):
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _drain, session, drain_s)
        await _play(run(session, config), session)
    except (Exception, BaseExceptionGroup) as raised:
        # Of several, the first is what happened; the others are its consequences.
        first = _first(raised)
        if isinstance(first, Stopped):
            log.info("stopped: %s", first.reason)
            code = _code(first, os.environ)
        else:
            error = f"{type(first).__name__}: {first}"
            log.error("%s failed", name, exc_info=None if isinstance(first, FlowError) else raised)
            log.error("%s", error)
    finally:
        await session.close(error)
    _leave(EXIT_FAILED if error else code)


def _code(stopped: Stopped, environment: Mapping[str, str]) -> int:
    """How a worker leaves that was stopped: well, unless whoever started it has to act on it."""
    if stopped.code == EXIT_DISMISSED:
        return EXIT_DISMISSED  # it was not the run that ended
    several = environment.get("GROUP_WORLD_SIZE", "1") != "1"
    # A torchrun whose ranks leave well waits five minutes for the others, whose rank may be why the run has failed.
    return EXIT_FAILED if several and stopped.code in (EXIT_FAILED, EXIT_STALLED) else EXIT_OK


def _look(work: asyncio.Task[None]) -> None:
    """Raises what a role that has come to its end raised, unless it was told to leave."""
    try:
        work.result()
    except (Drained, BaseExceptionGroup) as raised:
        if not isinstance(_first(raised), Drained):
            raise
        log.info("leaving: what is here stays until nobody needs it")


async def _play(role: Coroutine[Any, Any, None], session: Session) -> None:
    """The role, until it fails or the run ends. Raises what it raised, or Stopped."""
    work = asyncio.create_task(role)
    ended = asyncio.create_task(session.wait_stopped())
    await first_of({work, ended}, SILENCE, "the role, or the end of the run", CONTROLLER)
    if not ended.done():
        _look(work)
        await ended
    # The role learns of the end by its next request; what is inside a library then is not waited for long.
    try:
        await all_of({work}, LEAVE_S, "the role to notice that the run has ended", "this worker")
    except WaitExpired:
        for wait in open_waits():
            log.warning("left while %s", wait)
    ended.result()


def _drain_s(role: str, config: RunConfig) -> float:
    """How long a worker that is terminated may stay; 0: it has nothing to stay for."""
    if role == TRAINER:
        return config.checkpoint.drain_s if config.checkpoint.every else 0.0
    return config.controller.drain_s


def _drain(session: Session, deadline_s: float) -> None:
    """The machine is about to be taken away: leave in order if there is time for it, then in any case."""
    session.drain()
    late = Stopped(f"terminated, and what is here was still needed after {deadline_s:.0f} s", EXIT_OK)
    asyncio.get_running_loop().call_later(deadline_s, session.end, late)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
