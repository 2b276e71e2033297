"""Short-lived commands in processes that are forked from one with flowrt and torch imported: imports take seconds.

For commands that end by themselves and start no process: bad input, and scripts whose arguments are checked.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from flowrt.cli import main
from flowrt.launcher.fork_server.child import SHARED

ROOT = Path(__file__).parents[3]
UNKNOWN = "--no-such-flag"
TIMEOUT_S = 600.0
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["flowrt.grpo", "flowrt.launcher.local_run", *SHARED, __name__])


def start_fork_server() -> None:
    """Start the process that commands are forked from. It keeps the environment that this process has now."""
    forkserver.ensure_running()
    resource_tracker.ensure_running()  # so that later children open no descriptors in this process


def run_flowrt(arguments: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run ``flowrt ARGUMENTS`` without input, in the present environment; returns its exit code and output."""
    return _run(_flowrt, ["flowrt", *arguments], cwd)


def argument_error(arguments: Sequence[str]) -> str:
    """The error of a script with these arguments; empty if it accepts them. An unknown flag keeps it from running.

    With ``--help`` instead, argparse would exit before it checks the other flags.
    """
    ended = _run(_script, [*arguments, UNKNOWN], ROOT)
    assert ended.returncode == 2, (ended.returncode, ended.stderr)
    error = ended.stderr.strip().splitlines()[-1].split("error: ", 1)[1]
    return "" if error == f"unrecognized arguments: {UNKNOWN}" else error


def _run(call: Callable[[], None], argv: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory(prefix="flowrt-test-") as place:
        out, err = Path(place) / "stdout", Path(place) / "stderr"
        process = CONTEXT.Process(target=_child, args=(call, argv, str(cwd), dict(os.environ), str(out), str(err)))
        process.start()
        process.join(TIMEOUT_S)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        process.close()
        assert code is not None, f"{argv} does not end within {TIMEOUT_S:g} s"
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


def _script() -> None:
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).absolute().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
