"""The process of a worker: finds the controller, joins the run, runs the role, and exits with a code and a reason.

The name of the worker and the address of the controller come from the command line, the environment and the run
directory; all other settings come from the controller.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from flowrt.client.session import Session, connect
from flowrt.errors import (
    EXIT_BAD_INPUT,
    EXIT_DISMISSED,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_STALLED,
    ConfigError,
    Drained,
    FlowError,
    Stopped,
    WaitExpired,
)
from flowrt.ids import TRAINER
from flowrt.net.curve_keys import KEYS_VARIABLE, worker_keys
from flowrt.ranks.process_group import choose_interface
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import from_toml
from flowrt.recipes.run_dir import address_file, model_dir, read_address
from flowrt.runtime.bounds import seconds
from flowrt.runtime.command_line import Parser
from flowrt.runtime.event_loop import run_loop
from flowrt.runtime.parent_death import die_with_parent
from flowrt.runtime.resource_limits import check_descriptor_limit, raise_descriptor_limit
from flowrt.runtime.standard_streams import log_to_stderr
from flowrt.runtime.termination import termination_signals
from flowrt.runtime.time_limits import drain_s
from flowrt.runtime.waits import CONTROLLER, BoundedElsewhere, open_waits, pause, wait_all, wait_any, wait_until

POLL_S = 0.2
CONTROLLER_FILE = "metrics.jsonl"
"""Every controller creates this file in its run directory before it listens."""


def worker_name(role: str, given: str, environment: Mapping[str, str]) -> str:
    """Name of the worker: ``given`` or ``role``, plus the rank if torchrun or srun started several processes."""
    number = environment.get("RANK", "")
    if not number and int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        number = environment["SLURM_PROCID"]
    return given if given and not number else f"{given or role}-{number or 0}"


async def find_address(where: str, deadline_s: float) -> str:
    """The controller's address: ``where`` itself if it is one, else the address file in run directory ``where``.

    Raises WaitExpired if the file does not appear within ``deadline_s`` seconds, ConfigError for a malformed address.
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
    """Check that this host has the run's paths: the model and, with ``checkpoints``, the controller's run directory.

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


# ---- the process

log = logging.getLogger("flowrt")
Role = Callable[[Session, RunConfig], Coroutine[Any, Any, None]]
CONNECT_TIMEOUT_S = 120.0
EXIT_GRACE_S = 2.0
SAVE_S = 30.0
"""Time limit of writing what is not finished when the session ends; the limit of the processes around this one may be
shorter."""
LIVENESS = BoundedElsewhere("the liveness timeout of the controller")


def main(role: str, run: Role, *, drains: bool = False) -> NoReturn:
    """Run one worker from the command line and exit the process.

    Args:
        role: the worker's role in the run.
        run: the coroutine function of the role.
        drains: whether SIGTERM and its kind drain the worker before it leaves.
    """
    parser = Parser(description=f"flowrt {role} worker; all other settings come from the controller")
    parser.add_argument(
        "--controller",
        default=os.environ.get("FLOWRT_CONTROLLER", ""),
        metavar="RUN",
        help="the run directory, or tcp://HOST:PORT",
    )
    parser.add_argument("--name", default="", help=f"unique name of this worker (default: {role}-RANK)")
    parser.add_argument(
        "--connect-timeout-s",
        type=seconds,
        default=CONNECT_TIMEOUT_S,
        help="time limit to find the controller, in seconds",
    )
    parser.add_argument(
        "--keys",
        default=os.environ.get(KEYS_VARIABLE, ""),
        help="directory made by flowrt keys, or a copy of this worker's part",
    )
    try:
        arguments = parser.parse_args()
        if not arguments.controller:
            parser.error("--controller RUN is required: the run directory, or tcp://HOST:PORT, or FLOWRT_CONTROLLER")
    except ConfigError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        sys.exit(EXIT_BAD_INPUT)
    log_to_stderr()
    if "RANK" in os.environ:
        die_with_parent()  # a killed torchrun leaves its ranks running
    raise_descriptor_limit()
    try:
        check_descriptor_limit()
    except ConfigError as error:
        log.error("%s", error)
        _exit(EXIT_BAD_INPUT)
    name = worker_name(role, arguments.name, os.environ)
    try:
        code = run_loop(_run_worker(arguments, name, role, run, drains))
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    _exit(code)


def _exit(code: int) -> NoReturn:
    """Exit without joining threads: one may be inside gloo or an engine, which cannot be interrupted."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _log_waits() -> None:
    for wait in open_waits():
        log.info("%s", wait)


async def _run_worker(arguments: argparse.Namespace, name: str, role: str, run: Role, drains: bool) -> int:
    asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, _log_waits)
    try:
        keys = worker_keys(Path(arguments.keys), name) if arguments.keys else None
        log.info(
            "%s is looking for the controller at %s (timeout %.0f s)",
            name,
            arguments.controller,
            arguments.connect_timeout_s,
        )
        address = await find_address(arguments.controller, arguments.connect_timeout_s)
        session = await connect(address, name, role, arguments.connect_timeout_s, keys)
        log.info("%s has joined the run of the controller at %s", name, address)
        if role == TRAINER:
            choose_interface(address, os.environ)
    except FlowError as failure:
        log.error("%s", failure)
        # A timeout may be transient; a rejection is not.
        return EXIT_FAILED if isinstance(failure, WaitExpired) else EXIT_BAD_INPUT
    error = ""
    code = EXIT_OK
    try:
        config = from_toml(session.welcome.config)
        torch.set_num_threads(config.threads)
        check_reach(config, role == TRAINER)
        if drains and (limit_s := _drain_s(role, config)):
            for number in termination_signals():
                asyncio.get_running_loop().add_signal_handler(
                    number, _drain_after_signal, session, limit_s, role == TRAINER
                )
        await _run_role(run(session, config), session)
    except (Exception, BaseExceptionGroup) as raised:
        # The first exception of a group is the cause, the others its consequences.
        first = _first(raised)
        if isinstance(first, Stopped):
            log.info("stopped: %s", first.reason)
            code = _exit_code(first, os.environ)
        else:
            bad_input = isinstance(first, ConfigError)
            error = str(first) if bad_input else f"{type(first).__name__}: {first}"
            code = EXIT_BAD_INPUT if bad_input else EXIT_FAILED
            log.error("%s failed", name, exc_info=None if isinstance(first, FlowError) else raised)
            log.error("%s", error)
    finally:
        await session.close(error, code)
    _exit(code)


def _exit_code(stopped: Stopped, environment: Mapping[str, str]) -> int:
    """The exit code of a stopped worker: 0, unless the process that started it has to act on the end of the run."""
    if stopped.code == EXIT_DISMISSED:
        return EXIT_DISMISSED  # only this worker was stopped, not the run
    multi_node = environment.get("GROUP_WORLD_SIZE", "1") != "1"
    # After exit code 0 torchrun waits five minutes for the other nodes; a failed run must not wait for them.
    return EXIT_FAILED if multi_node and stopped.code in (EXIT_FAILED, EXIT_BAD_INPUT, EXIT_STALLED) else EXIT_OK


def _check_result(work: asyncio.Task[None]) -> None:
    """Raise the exception of a completed role, if any, unless it is Drained."""
    try:
        work.result()
    except (Drained, BaseExceptionGroup) as raised:
        if not isinstance(_first(raised), Drained):
            raise
        log.info("draining: tensors of this worker are served until no other worker needs them")


async def _run_role(role: Coroutine[Any, Any, None], session: Session) -> None:
    """Run the role until it fails or the run ends. Raises the exception of the role, or Stopped."""
    work = asyncio.create_task(role)
    ended = asyncio.create_task(session.wait_stopped())
    await wait_any({work, ended}, LIVENESS, "the role, or the end of the run", CONTROLLER)
    if not ended.done():
        _check_result(work)
        await ended
    # The role notices the end at its next request; a call inside a library may take `EXIT_GRACE_S` at most.
    try:
        await wait_all({work}, EXIT_GRACE_S, "the role to notice that the run has ended", "this worker")
    except WaitExpired:
        if session.is_saving:
            with contextlib.suppress(WaitExpired):
                await wait_all({work}, SAVE_S, "unfinished work to be written", "the disk")
        for wait in () if work.done() else open_waits():
            log.warning("leaving while %s", wait)
    ended.result()


def _drain_s(role: str, config: RunConfig) -> float:
    """Time limit of a drain after SIGTERM, in seconds; 0: the worker does not drain."""
    if role == TRAINER:
        return config.checkpoint.preemption_save_timeout_s if config.checkpoint.every else 0.0
    return config.controller.worker_drain_timeout_s or drain_s(config.longest_response)


def _drain_after_signal(session: Session, deadline_s: float, saves: bool) -> None:
    """Start a drain; end the session after ``deadline_s`` seconds even if the drain is not complete.

    Of a trainer, which saves what it has trained: after that time without progress.
    """
    session.drain()
    expired = Stopped(f"terminated; tensors of this worker were still needed after {deadline_s:.0f} s", EXIT_OK)
    loop = asyncio.get_running_loop()

    def end_if_idle() -> None:
        left_s = deadline_s - session.progress.idle_s if saves else 0.0
        if left_s > 0.0:
            loop.call_later(left_s, end_if_idle)
        else:
            session.end(expired)

    loop.call_later(deadline_s, end_if_idle)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
