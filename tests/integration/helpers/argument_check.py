"""The argument errors of scripts, each run in a process that is forked from one that has imported torch."""

import contextlib
import io
import multiprocessing
import os
import runpy
import sys
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).parents[3]
UNKNOWN = "--no-such-flag"
START_S = 60.0
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["flowrt.grpo", "flowrt.launcher.local_run", "transformers.masking_utils", __name__])


def argument_error(arguments: list[str]) -> str:
    """The error of a script with these arguments; empty if it accepts them. An unknown flag keeps it from running.

    With ``--help`` instead, argparse would exit before it checks the other flags.
    """
    receiving, sending = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_run, args=([*arguments, UNKNOWN], sending))
    process.start()
    sending.close()
    try:
        assert receiving.poll(START_S), f"{arguments} does not end within {START_S:g} s"
        code, printed = receiving.recv()
        process.join(START_S)
    finally:
        process.kill()
        process.join()
        process.close()
        receiving.close()
    assert code == 2, (code, printed)
    error = str(printed).strip().splitlines()[-1].split("error: ", 1)[1]
    return "" if error == f"unrecognized arguments: {UNKNOWN}" else error


def _run(arguments: list[str], result: Connection) -> None:
    """Run a script as the interpreter would, and send its exit code and what it wrote to stderr."""
    os.chdir(ROOT)
    stderr = io.StringIO()
    code: object = 0
    with contextlib.redirect_stderr(stderr):
        try:
            if arguments[0] == "-m":
                sys.argv = arguments[1:]
                runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = arguments
                sys.path.insert(0, str((ROOT / arguments[0]).parent))
                runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as end:
            code = end.code
    result.send((code, stderr.getvalue()))
