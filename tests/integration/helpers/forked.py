"""Processes that are forked from one with flowrt and torch imported: imports take seconds.

For commands that end by themselves and start no process, as with bad input, and scripts. And for the fork server of
`forked_flowrt`, which starts other commands.
"""

import contextlib
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import NoReturn
from unittest import mock

from flowrt.cli import main
from flowrt.launcher.fork_server.child import SHARED, serve
from flowrt.launcher.fork_server.parent import ONE_THREAD

ROOT = Path(__file__).parents[3]
UNKNOWN = "--no-such-flag"
TIMEOUT_S = 600.0
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["flowrt.grpo", "flowrt.launcher.local_run", *SHARED, __name__])


def start_fork_server() -> None:
    """Start the process that commands are forked from. It keeps the environment that this process has now."""
    with mock.patch.dict(os.environ, ONE_THREAD):
        forkserver.ensure_running()
    resource_tracker.ensure_running()  # so that later children open no descriptors in this process


def run_flowrt(
    arguments: Sequence[str],
    cwd: Path = ROOT,
    variables: Mapping[str, str] | None = None,
    *,
    loads_model: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``flowrt ARGUMENTS`` without input, in the present environment; returns its exit code and output.

    Args:
        arguments: of the command.
        cwd: its directory.
        variables: further variables of the environment.
        loads_model: it gets so far that its fork server is used.
    """
    call = _flowrt_that_loads_model if loads_model else _flowrt
    return _run(call, ["flowrt", *arguments], cwd, variables or {})


def run_script(
    arguments: Sequence[str], variables: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS``, whose first is the path of a script, in the root directory, like `run_flowrt`."""
    return _run(_script, arguments, ROOT, variables or {}, timeout_s)


def serve_forks(orders: socket.socket) -> NoReturn:
    """Become a fork server of the product, as if it had been started by python in the root directory."""
    os.setsid()
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, orders.fileno()}:
        with contextlib.suppress(OSError):  # that of the listing
            os.close(fd)
    # Under python, the module of a worker would not be imported yet.
    warnings.filterwarnings("ignore", ".*found in sys.modules after import of package", RuntimeWarning)
    os.chdir(ROOT)
    sys.path[:] = [str(ROOT), *(path for path in sys.path if path not in ("", str(ROOT), str(ROOT / "bench")))]
    serve(orders)


def argument_error(arguments: Sequence[str]) -> str:
    """The error of a script with these arguments; empty if it accepts them. An unknown flag keeps it from running.

    With ``--help`` instead, argparse would exit before it checks the other flags.
    """
    ended = run_script([*arguments, UNKNOWN])
    assert ended.returncode == 2, (ended.returncode, ended.stderr)
    error = ended.stderr.strip().splitlines()[-1].split("error: ", 1)[-1]
    return "" if f"unrecognized arguments: {UNKNOWN}" in error else error


def _run(
    call: Callable[[], None],
    arguments: Sequence[str],
    cwd: Path,
    variables: Mapping[str, str],
    timeout_s: float = TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    argv, environment = list(arguments), {**os.environ, **variables}
    start_fork_server()
    with tempfile.TemporaryDirectory(prefix="flowrt-test-") as place:
        out, err = Path(place) / "stdout", Path(place) / "stderr"
        process = CONTEXT.Process(target=_child, args=(call, argv, str(cwd), environment, str(out), str(err)))
        process.start()
        process.join(timeout_s)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        process.close()
        assert code is not None, f"{argv} does not end within {timeout_s:g} s"
        return subprocess.CompletedProcess(argv, code, out.read_text(), err.read_text())


def _child(
    call: Callable[[], None], argv: list[str], cwd: str, environment: dict[str, str], stdout: str, stderr: str
) -> None:
    """Call with these arguments, directory, environment and streams. The exit code is that of SystemExit."""
    for number, path in ((1, stdout), (2, stderr)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv
    call()


def _flowrt() -> None:
    sys.exit(main())


def _flowrt_that_loads_model() -> None:
    from tests.integration.helpers.forked_flowrt import fork_workers_early

    fork_workers_early()
    _flowrt()


def _script() -> None:
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).absolute().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
