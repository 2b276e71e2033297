"""The reward function code: programs that solve nothing score 0, programs that solve their task score 1."""

import json
import os
from pathlib import Path

import pytest

from flowrt.errors import ConfigError
from flowrt.rewards.check import check_rewards
from flowrt.rewards.code import check_sandbox
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.outcomes import Result, RewardOutcome
from tests.proofs.programs import CHEATS, DOUBLE, HONEST, LONG, TESTS, Case, outcomes, passing

SHORT = [case for case in HONEST if case.name not in LONG]


def has_bwrap() -> bool:
    try:
        check_sandbox("bwrap")
    except ConfigError:
        return False
    return True


BWRAP = pytest.param("bwrap", marks=pytest.mark.skipif(not has_bwrap(), reason="needs bubblewrap and user namespaces"))
sandboxes = pytest.mark.parametrize("sandbox", [BWRAP, "limits"])


def outcome(
    program: str, tests: object, sandbox: str, *, timeout_s: float = 20.0, memory_mb: int = 256
) -> RewardOutcome:
    return outcomes([Case("it", program, tests)], sandbox, timeout_s, memory_mb)["it"]


@pytest.mark.slow
@sandboxes
def test_programs_that_solve_nothing_score_0(sandbox: str) -> None:
    assert len(CHEATS) >= 40
    results = outcomes(CHEATS, sandbox, 3.0)
    assert {name: scored for name, scored in results.items() if scored.value or scored.result is not Result.OK} == {}


@pytest.mark.slow
@sandboxes
def test_programs_that_solve_their_task_score_1(sandbox: str) -> None:
    assert len(HONEST) >= 40
    assert {case.name for case in SHORT} - passing(SHORT, sandbox, 30.0) == set()


@pytest.mark.slow
@sandboxes
def test_tests_may_have_10_megabytes(sandbox: str) -> None:
    assert LONG - passing([case for case in HONEST if case.name in LONG], sandbox, 120.0) == set()


@pytest.mark.parametrize("length", [126, 127, 128, 129, 1000])
def test_tests_around_the_longest_argument(length: int) -> None:
    """Linux takes arguments of at most 128 KiB."""
    assert outcome(DOUBLE, f"{TESTS}# {'x' * (length << 10)}", "limits").value == 1.0


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open({path!r}, "a").write(f"{{os.getpid()}}\\n")
        {then}
        time.sleep(600)
    os._exit(0)
os.wait()
while not os.path.exists({path!r}):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("then", ["pass", "os.kill({caller}, 9)", "os.kill({caller}, 19)"])
@pytest.mark.parametrize("kind", ["statements", "inputs"])
def test_nothing_that_a_program_starts_survives_its_call(tmp_path: Path, kind: str, then: str) -> None:
    """Also if it kills or stops the process that has started it, and the next program runs."""
    path = tmp_path / "pids"
    program = DAEMON.format(path=str(path), then="pass")
    if then != "pass":
        program += then.format(caller="os.getppid()")
    tests: object = "assert double(4) == 8" if kind == "statements" else [{"input": "", "output": "8"}]
    right = "def double(x): return 2 * x" if kind == "statements" else "print(8)"
    alive: list[int] = []

    def check(case: Case) -> None:
        alive.extend(pid for pid in map(int, path.read_text().split()) if is_alive(pid))

    cases = [Case("daemon", f"{program}\n{right}", tests), Case("next", right, tests)]
    results = outcomes(cases, "limits", 20.0, after=check)
    assert path.read_text()
    assert alive == []
    assert results["next"].value == 1.0
    assert results["daemon"].value == float(then == "pass")


@pytest.mark.skipif(not has_bwrap(), reason="needs bubblewrap and user namespaces")
@pytest.mark.parametrize("place", ["/tmp", "/dev/shm", "/dev", "/", "/var/tmp", "/proc"])
def test_files_of_a_program_count_in_its_memory(place: str) -> None:
    program = f"""
import os
written = 0
try:
    with open({place!r} + "/large", "wb") as file:
        for _ in range(40):
            written += file.write(bytes(1 << 20))
            file.flush()
except OSError:
    pass
def megabytes(): return written >> 20
"""
    assert outcome(program, "assert megabytes() < 33", "bwrap", memory_mb=32).value == 1.0
    if place == "/tmp":
        assert outcome(program, "assert megabytes() > 20", "bwrap", memory_mb=32).value == 1.0


@pytest.mark.skipif(not has_bwrap(), reason="needs bubblewrap and user namespaces")
def test_files_of_a_program_are_gone_for_the_next() -> None:
    leaving = """
import os
os.makedirs("a/b", mode=0o700)
open("a/b/c", "w").write("x")
open("d", "w").write("x")
os.symlink("/", "e")
os.chmod("a/b", 0)
os.chmod("a", 0)
def names(): return sorted(os.listdir("/tmp"))
"""
    seeing = "import os\ndef names(): return sorted(os.listdir('/tmp'))"
    cases = [Case("1", leaving, "assert names() == ['a', 'd', 'e']"), Case("2", seeing, "assert names() == []")]
    assert {name: scored.value for name, scored in outcomes(cases, "bwrap", 20.0).items()} == {"1": 1.0, "2": 1.0}


def test_memory_of_a_program_is_limited() -> None:
    program = "def size(n): return len(bytearray(n << 20))"
    assert outcome(program, "assert size(100) == 100 << 20", "limits", memory_mb=256).value == 1.0
    assert outcome(program, "assert size(300) == 300 << 20", "limits", memory_mb=256).value == 0.0


def test_a_sandbox_that_cannot_be_started_is_an_error_and_no_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: no space left' >&2\nexit 1\n")
    bwrap.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    failure = outcome(DOUBLE, TESTS, "bwrap")
    assert (failure.result, failure.value) == (Result.ERROR, 0.0)
    assert "no process for programs could be started: bwrap: no space left" in failure.detail


@pytest.mark.parametrize("tests", ["assert double(4 == 8", "x = 1\nif x:\n", "x = \0"])
def test_tests_that_are_no_python_are_an_error_of_the_row(tests: str) -> None:
    failure = outcome(DOUBLE, tests, "limits")
    assert failure.result is Result.ERROR
    assert "the tests are no Python in line" in failure.detail
    row = json.dumps({"answer": "", "tests": tests}).encode()
    with pytest.raises(ConfigError, match="the tests are no Python in line"):
        check_rewards(RewardOptions(functions=("code",), code_sandbox="limits"), [row], print)


SAME_PROCESS = {
    "a subclass": ("class Base: pass", "class Derived(Base): pass\nassert Derived()"),
    "an attribute": ("class A:\n    items = []", "A.items.append(1)\nassert A.items == [1]"),
    "an item": ("class A:\n    items = {}", "A.items[1] = 2\nassert A.items == {1: 2}"),
    "vars": ("class A:\n    def __init__(self): self.x = 1", "assert vars(A()) == {'x': 1}"),
    "source": (
        "def double(x): return 2 * x",
        "import inspect\nassert list(inspect.signature(double).parameters) == ['x']",
    ),
}


@pytest.mark.parametrize("name", SAME_PROCESS)
def test_tests_that_reach_into_the_program_run_in_its_process(name: str) -> None:
    program, tests = SAME_PROCESS[name]
    assert outcome(program, tests, "limits").value == 1.0
    for leaving in ("import os\nos._exit(0)", "raise SystemExit(0)", "import sys\nsys.exit()"):
        assert outcome(f"{leaving}\n{program}" if "os" in leaving else leaving, tests, "limits").value == 0.0
    assert outcome(program, f"{tests}\nassert False", "limits").value == 0.0


def test_the_value_is_of_the_whole_call(tmp_path: Path) -> None:
    """A program that is right for the first input only."""
    tests = [{"input": "1", "output": "1"}, {"input": "2", "output": "4"}]
    assert outcome("print(int(input()))", tests, "limits").value == 0.0
    assert outcome("print(int(input()) ** 2)", tests, "limits").value == 1.0
    assert outcome("print(int(input()) ** 2)\nexit(3)", tests, "limits").value == 0.0
