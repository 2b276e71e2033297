"""The reward function ``code``: 1 if the program in the response passes the tests of its row, else 0.

The program is the last fenced code block of the response, or the whole response if it has none. The column ``tests``
has Python statements that run after the program, or a list of objects with ``input`` and ``output``: the standard input
of the program, and the words that it must print.

In bubblewrap the program has no network, no files except those of the system, no environment variables except PATH, and
it ends with its caller.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic

from flowrt.errors import ConfigError
from flowrt.rewards.outcomes import RewardOutcome
from flowrt.rewards.user_file import Unusable, outcome_of
from flowrt.runtime.waits import blocking

TESTS = "tests"
PROGRAM_SHARE = 0.8
"""Share of the deadline of a call that all programs of the call may take together."""
CHECK_S = 20.0
FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
FIX = "install bubblewrap and allow user namespaces, or set reward.code_sandbox to limits"


def check_sandbox(sandbox: str) -> None:
    """Raise ConfigError if programs cannot be run in the sandbox."""
    if sandbox != "bwrap":
        return
    if shutil.which("bwrap") is None:
        raise ConfigError(f"reward function code runs programs in bubblewrap, and there is no bwrap here; {FIX}")
    words = [*bwrap_words(), "-c", "pass"]
    try:
        run = partial(subprocess.run, words, capture_output=True, timeout=CHECK_S, encoding="utf-8", errors="replace")
        ended = blocking(run, CHECK_S, "a program in bubblewrap", "bwrap")
        what = ended.stderr.strip().partition("\n")[0]
        code = ended.returncode
    except subprocess.TimeoutExpired:
        code, what = 1, f"it did not end in {CHECK_S:.0f} s"
    if code:
        raise ConfigError(f"reward function code runs programs in bubblewrap, which does not work here ({what}); {FIX}")


def bwrap_words() -> list[str]:
    """The command that runs Python in bubblewrap; the arguments of Python are to be appended."""
    python = Path(sys.executable).resolve()
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    for place in dict.fromkeys(["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", sys.base_prefix]):
        words += ["--ro-bind-try", place, place]
    words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--chdir", "/tmp"]  # noqa: S108 (its own)
    return [*words, "--setenv", "PATH", "/usr/bin:/bin", str(python), "-I"]


def sandboxed(
    response: str,
    answer: object,  # noqa: ARG001
    columns: Mapping[str, object],
    *,
    sandbox: str,
    timeout_s: float,
) -> RewardOutcome:
    """Run the program of a response against the tests of its row; the value is 1 or 0.

    ``sandbox`` is bwrap or limits, ``timeout_s`` the deadline of the call in seconds. Raises Unusable if the row has no
    valid tests.
    """
    tests = columns.get(TESTS)
    program = ([response] if not FENCE.search(response) else FENCE.findall(response))[-1]
    end_s = monotonic() + PROGRAM_SHARE * timeout_s
    if isinstance(tests, str) and tests:
        return outcome_of(float(_run(f"{program}\n\n{tests}\n", "", sandbox, end_s) is not None), 0)
    if isinstance(tests, Sequence) and tests and all(isinstance(one, Mapping) for one in tests):
        for one in tests:
            printed = _run(program, str(one.get("input", "")), sandbox, end_s)
            if printed is None or printed.split() != str(one.get("output", "")).split():
                return outcome_of(0.0, 0)
        return outcome_of(1.0, 0)
    raise Unusable(f"function code needs the column {TESTS!r}: Python statements, or a list of input and output")


def _run(program: str, standard_input: str, sandbox: str, end_s: float) -> str | None:
    """The standard output of a program; None if it fails or does not end before ``end_s`` (monotonic, seconds)."""
    python = bwrap_words() if sandbox == "bwrap" else [sys.executable, "-I"]
    left_s = max(end_s - monotonic(), 0.01)
    with tempfile.TemporaryDirectory() as place:
        run = partial(
            subprocess.run,
            [*python, "-c", program],
            input=standard_input,
            capture_output=True,
            timeout=left_s,
            cwd=place,
            env={"PATH": "/usr/bin:/bin"},
            encoding="utf-8",
            errors="replace",
        )
        try:
            ended = blocking(run, left_s, "a program", "the response")
        except (subprocess.TimeoutExpired, ValueError, OSError):  # a NUL in the program; an argument that is too long
            return None
    return ended.stdout if ended.returncode == 0 else None
