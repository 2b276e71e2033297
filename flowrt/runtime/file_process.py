"""Runs a user's file in a process of its own, because the file may hang, exit, crash or print.

`ask` runs ``python -m flowrt.runtime.file_process MODULE WORDS``. That process runs MODULE, which loads the user's file
and calls `answer` with a JSON object; an object with ``error``, a sentence, reports a mistake in the user's file.
"""

import contextlib
import faulthandler
import functools
import json
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from time import monotonic
from typing import IO, NoReturn

from flowrt.errors import EXIT_BAD_INPUT, EXIT_OK, ConfigError
from flowrt.runtime.interpreter import RUN_MODULE
from flowrt.runtime.parent_death import die_with_parent
from flowrt.runtime.waits import blocking

STACK_SIGNAL = signal.SIGQUIT
"""Signal at which the process writes its stack, which shows the line of the user's file at which it hangs."""
STACK_S = 0.5
END_S = 5.0
PROGRESS_AFTER_S = 3.0
"""Time after which a wait is reported as progress."""
MAX_OUTPUT_BYTES = 1 << 16
MAX_OUTPUT_CHARS = 400


def ask(
    module: str,
    words: Sequence[str],
    what: str,
    limit_s: float,
    text: str = "",
    progress: Callable[[str], None] | None = None,
) -> dict[str, object]:
    """Start a process that loads a user's file, and return the object that it passes to `answer`.

    Args:
        module: the module that the process runs; it calls `answer`.
        words: arguments of the module.
        what: name of the file in messages, such as "task file /a/b.py"; ends in its path.
        limit_s: deadline, in seconds.
        text: standard input of the process.
        progress: called with a note if the wait takes longer than `PROGRESS_AFTER_S`.

    Raises ConfigError, with the line of the file where that is known, if the answer has an ``error``, and if the
    process ends without an answer or does not answer in time.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given.write(text.encode())
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, RUN_MODULE, "flowrt.runtime.file_process", module, *words],
            stdin=given,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        begin_s = monotonic()
        try:
            first_s = min(PROGRESS_AFTER_S, limit_s)
            code = _wait(process, first_s)
            if code is None and first_s < limit_s:
                if progress is not None:
                    progress(f"waiting for {what}: at most {limit_s:g} s")
                code = _wait(process, limit_s - (monotonic() - begin_s))
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(STACK_SIGNAL)
                _wait(process, STACK_S)
                at = _line_in(_tail(errors), what)
                raise ConfigError(f"{what}{at} did not return within {limit_s:g} s; correct it")
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also kills processes that the file has started
            _wait(process, END_S)
        content = _last_line(_tail(output))
        if "error" in content:
            raise ConfigError(str(content["error"]))
        if code == EXIT_OK and content:
            return content
        written = _tail(errors) or _tail(output)
        at = _line_in(written, what)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended its process with code {code}"
        last = written.strip().rpartition("\n")[2][:MAX_OUTPUT_CHARS]
        raise ConfigError(f"{what}{at} {how}: {last if last and not at else 'without an answer'}; correct it")


def answer(content: dict[str, object]) -> NoReturn:
    """Answer `ask` with an object that JSON can hold, and end this process. ``error``: a mistake in the user's file."""
    sys.stdout.flush()
    os.write(1, f"\n{json.dumps(content)}\n".encode())
    os._exit(EXIT_BAD_INPUT if "error" in content else EXIT_OK)


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """The exit code; None if the process has not ended in time."""
    try:
        wait = functools.partial(process.wait, max(limit_s, 0.0))
        return blocking(wait, limit_s, "the answer of a process with a user's file", "the file")
    except subprocess.TimeoutExpired:
        return None


def _tail(file: IO[bytes]) -> str:
    """The last `MAX_OUTPUT_BYTES` of a file, as text."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - MAX_OUTPUT_BYTES, 0))
    return file.read().decode(errors="replace")


def _last_line(output: str) -> dict[str, object]:
    """The JSON object in the last line; empty if there is none."""
    try:
        content = json.loads(output.strip().rpartition("\n")[2])
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _line_in(stack: str, what: str) -> str:
    """The innermost line of the user's file in a stack, as ``:LINE``; empty if the file is not in the stack."""
    for match in re.finditer(r'^  File "([^"]*)", line (\d+) in ', stack, re.MULTILINE):
        if what.endswith(match[1]):
            return f":{match[2]}"
    return ""


def main() -> None:
    """Run the module that the first argument names, in this process."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable(all_threads=False)
    faulthandler.register(STACK_SIGNAL, all_threads=False)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
