"""How a process of flowrt starts another one: ``python -Pm MODULE``, without the current directory on its path.

With ``-m`` a file of the user's in that directory would hide the module of Python that has its name, such as random.py.
A user's file may still import modules of that directory (`flowrt.runtime.user_module.load_module`).
"""

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from flowrt.errors import EXIT_OK, FlowError, WaitExpired
from flowrt.runtime.waits import blocking

RUN_MODULE = "-Pm"


def last_line(module: str, words: Sequence[str], limit_s: float, what: str) -> str:
    """Run a module in a process of its own and return the last line that it prints, which is empty if it prints none.

    Args:
        module: a module of flowrt.
        words: its arguments.
        limit_s: time limit, in seconds.
        what: the process, in messages.

    Raises WaitExpired after the limit, FlowError with the last line of its errors if it fails, and FileNotFoundError if
    the working directory, in which it would start, has been deleted.
    """
    Path.cwd()
    command = [sys.executable, RUN_MODULE, module, *words]
    call = partial(subprocess.run, command, capture_output=True, text=True, timeout=limit_s, check=False)
    try:
        ended = blocking(call, limit_s, f"the answer of {what}", what)
    except subprocess.TimeoutExpired:
        raise WaitExpired(f"{what} did not end within {limit_s:.0f} s") from None
    failed = ended.returncode != EXIT_OK
    lines = (ended.stderr if failed else ended.stdout).strip().splitlines()
    if failed:
        raise FlowError(lines[-1] if lines else f"exit code {ended.returncode}")
    return lines[-1] if lines else ""
