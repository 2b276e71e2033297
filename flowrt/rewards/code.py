"""The reward function ``code``: 1 if the program in the response passes the tests of its row, else 0.

The program is the last fenced code block of the response, or the whole response if it has none. The column ``tests``
has Python statements that use the program's names, or a list of objects with ``input`` and ``output``: the standard
input of the program, and the words that it must print.

The value is 1 only if all tests have run. Statements run in a process of their own, see `programs.process`; expected
outputs stay in this one. A program that cannot be started is an error of the call, not a 0.

In bubblewrap the program has no network, no files except those of the system, no environment variables except PATH, and
it ends with its caller.
"""

import json
import re
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic

from flowrt.errors import ConfigError
from flowrt.rewards.outcomes import RewardOutcome
from flowrt.rewards.programs.sandbox import Ended, NotStarted, Sandbox, encoded, words
from flowrt.rewards.user_file import outcome_of
from flowrt.runtime.user_module import Unusable
from flowrt.runtime.waits import blocking

TESTS = "tests"
PROGRAM_SHARE = 0.8
"""Share of the deadline of a call that all programs of the call may take together."""
CHECK_S = 20.0
CHECK_BYTES = 1 << 24
MORE_OUTPUT_BYTES = 1 << 20
"""Output that a program may write in addition to four times the expected one, in bytes."""
FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
FIX = "install bubblewrap 0.7 or newer and allow user namespaces, or set reward.code_sandbox to limits"


def check_sandbox(sandbox: str) -> None:
    """Raise ConfigError if programs cannot be run in the sandbox."""
    if sandbox != "bwrap":
        return
    if shutil.which("bwrap") is None:
        raise ConfigError(f"reward function code runs programs in bubblewrap, and there is no bwrap here; {FIX}")
    command = [*words("bwrap", CHECK_BYTES), "-c", "pass"]
    try:
        run = partial(subprocess.run, command, capture_output=True, timeout=CHECK_S, encoding="utf-8", errors="replace")
        ended = blocking(run, CHECK_S, "a program in bubblewrap", "bwrap")
        what = ended.stderr.strip().partition("\n")[0]
        code = ended.returncode
    except subprocess.TimeoutExpired:
        code, what = 1, f"it did not end in {CHECK_S:.0f} s"
    if code:
        raise ConfigError(f"reward function code runs programs in bubblewrap, which does not work here ({what}); {FIX}")


def sandboxed(
    response: str,
    answer: object,  # noqa: ARG001
    columns: Mapping[str, object],
    *,
    sandbox: Sandbox,
    timeout_s: float,
) -> RewardOutcome:
    """Run the program of a response against the tests of its row; the value is 1 or 0.

    Args:
        response: the response.
        answer: not used.
        columns: the columns of the row.
        sandbox: where the program runs.
        timeout_s: the deadline of the call in seconds.

    Raises Unusable if the row has no valid tests, or if the program cannot be started.
    """
    tests = columns.get(TESTS)
    program = ([response] if not FENCE.search(response) else FENCE.findall(response))[-1]
    end_s = monotonic() + PROGRAM_SHARE * timeout_s
    if isinstance(tests, str) or not isinstance(tests, Sequence):
        inputs = []
    else:
        inputs = [test for test in tests if isinstance(test, Mapping)]
        inputs = inputs if len(inputs) == len(tests) else []
    if not inputs and not (isinstance(tests, str) and tests):
        raise Unusable(f"function code needs the column {TESTS!r}: Python statements, or a list of input and output")
    try:
        with sandbox.call("statements" if isinstance(tests, str) else "inputs", program, end_s):
            passed = _passes(sandbox, tests) if isinstance(tests, str) else _prints(sandbox, inputs)
    except Ended:
        passed = False
    except NotStarted as error:
        raise Unusable(str(error)) from None
    return outcome_of(float(passed), 0)


def _passes(sandbox: Sandbox, tests: str) -> bool:
    """Whether a program passes statements. Raises Unusable if they are no Python, and Ended."""
    secret = secrets.token_hex(16)
    sandbox.send(secret.encode())
    sandbox.send(encoded(tests))
    verdict = json.loads(sandbox.receive())
    if verdict["secret"] != secret:
        raise Ended
    if verdict["wrong"]:
        raise Unusable(f"column {TESTS!r}: {verdict['wrong']}")
    return verdict["passed"] is True


def _prints(sandbox: Sandbox, tests: Sequence[Mapping[str, object]]) -> bool:
    """Whether a program prints the words that are expected for each input. Raises Ended."""
    passed = True
    for test in tests:
        expected = str(test.get("output", ""))
        sandbox.send(str(4 * len(encoded(expected)) + MORE_OUTPUT_BYTES).encode())
        sandbox.send(encoded(str(test.get("input", ""))))
        exit_code, printed = json.loads(sandbox.receive()), sandbox.receive()
        passed = exit_code == 0 and printed.decode(errors="replace").split() == expected.split()
        if not passed:
            break
    sandbox.send(b"0")
    return passed
