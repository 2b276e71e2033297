"""A user's filter function in its process: its arguments, failures that filter a group, files refused before a run."""

import logging
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from flowrt.controller.policies.group_filter import ENDED, HUNG, KEPT, RAISED, REFUSED, WRONG
from flowrt.errors import ConfigError
from flowrt.recipes.algorithm_config import FilterConfig
from flowrt.recipes.config_io import parse
from flowrt.recipes.filter_function import FilterFunction, FunctionFailed, GroupFacts, check_filter_function
from tests.integration.conftest import wait_until

FACTS = GroupFacts(prompt=7, epoch=1, lengths=[3, 5], version=4)
LONG_S = 60.0
"""Timeout of calls that return, also on a loaded machine."""


@pytest.fixture
async def created() -> AsyncIterator[list[FilterFunction]]:
    functions: list[FilterFunction] = []
    yield functions
    for user_filter in functions:
        await user_filter.close()


def function(created: list[FilterFunction], path: Path, text: str, timeout_s: float = LONG_S) -> FilterFunction:
    path.write_text(text)
    created.append(FilterFunction(FilterConfig(function=str(path), function_timeout_s=timeout_s), subprocess.DEVNULL))
    return created[-1]


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    "text",
    [
        "def keep(rewards):\n    return rewards == [0.0, 1.0]\n",
        "def keep(rewards, *, lengths):\n    return (rewards, lengths) == ([0.0, 1.0], [3, 5])\n",
        "def keep(r, prompt, epoch, version=9):\n    return (prompt, epoch, version) == (7, 1, 4)\n",
        "def keep(r, **more):\n    return more == dict(prompt=7, epoch=1, lengths=[3, 5], version=4)\n",
        "import numpy\ndef keep(rewards):\n    print('{\"kept\": false}')\n    return numpy.mean(rewards) > 0.4\n",
        "keep = all\ndef keep(rewards, other=None):\n    return other is None\n",
    ],
)
async def test_the_function_receives_the_rewards_and_the_facts_that_it_names(
    created: list[FilterFunction], tmp_path: Path, text: str
) -> None:
    user_filter = function(created, tmp_path / "mine.py", text)
    assert await user_filter.decide([0.0, 1.0], FACTS) == KEPT
    assert not (tmp_path / "__pycache__").exists()


async def test_a_refused_group_is_not_logged_as_a_failure(
    created: list[FilterFunction], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    user_filter = function(created, tmp_path / "mine.py", "def keep(rewards):\n    return max(rewards) > 0\n")
    assert [await user_filter.decide([0.0, reward], FACTS) for reward in (0.0, 1.0, 0.0)] == [REFUSED, KEPT, REFUSED]
    assert not caplog.records


@pytest.mark.parametrize(
    ("body", "decision", "message"),
    [
        ("return 1 / 0", RAISED, ":5): ZeroDivisionError: division by zero, on the rewards [0.5, 0.5] of prompt 7"),
        ("raise KeyboardInterrupt", RAISED, ":5): KeyboardInterrupt"),
        ("sys.exit(3)", RAISED, ":5): it ended the program with exit(3)"),
        ("os._exit(3)", ENDED, "mine.py): it ended its process with exit code 3"),
        ("os.kill(os.getpid(), 9)", ENDED, "mine.py): its process was killed by SIGKILL"),
        ("os.closerange(3, 65_536)", ENDED, "mine.py): it "),
        ("return None", WRONG, ":3): it returned None (NoneType), not True or False"),
        ("return 1", WRONG, ":3): it returned 1 (int), not True or False"),
        ("return 'False'", WRONG, ":3): it returned 'False' (str), not True or False"),
    ],
)
async def test_a_failed_call_filters_its_group_and_the_next_call_succeeds(
    created: list[FilterFunction],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    body: str,
    decision: float,
    message: str,
) -> None:
    text = f"import os, sys\n\ndef keep(rewards):\n    if rewards[0] == 0.5:\n        {body}\n    return True\n"
    user_filter = function(created, tmp_path / "mine.py", text)
    with caplog.at_level(logging.WARNING):
        assert [await user_filter.decide([reward, 0.5], FACTS) for reward in (0.0, 0.5, 1.0)] == [KEPT, decision, KEPT]
    [record] = caplog.records
    assert message in record.getMessage()
    assert "the group is filtered (failure 1 of the function)" in record.getMessage()


@pytest.mark.slow
async def test_a_hanging_call_is_killed_with_its_child_processes(created: list[FilterFunction], tmp_path: Path) -> None:
    text = """
import subprocess, time
def keep(rewards):
    if rewards[0]:
        started = subprocess.Popen(["sleep", "77"])
        open(__file__ + ".pid", "w").write(str(started.pid))
        time.sleep(99)
    return True
"""
    user_filter = function(created, tmp_path / "mine.py", text, timeout_s=2.0)
    with pytest.raises(FunctionFailed, match=r":7\): it did not return in 2 s, on the rewards") as failed:
        await user_filter.call([1.0], FACTS)
    assert failed.value.decision == HUNG
    pid = int((tmp_path / "mine.py.pid").read_text())
    wait_until(lambda: not is_running(pid), 10.0, lambda: "its child process still runs")
    assert await user_filter.decide([0.0], FACTS) == KEPT


async def test_failures_are_logged_at_powers_of_two(
    created: list[FilterFunction], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    user_filter = function(created, tmp_path / "mine.py", "def keep(rewards):\n    raise ValueError\n")
    with caplog.at_level(logging.WARNING):
        assert {await user_filter.decide([0.0], FACTS) for _ in range(20)} == {RAISED}
    assert len(caplog.records) == 5, "the failures 1, 2, 4, 8 and 16"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nassert x == 2, 'two'\n", r":2\): AssertionError: two, while the file was loaded; correct it"),
        ("def keep(rewards:\n", r":1\): SyntaxError"),
        ("x = 1\n", "it has no function 'keep'; name the function as FILE.py:FUNCTION"),
        ("def keep(rewards, answer):\n    return True\n", r":1\): keep\(rewards, answer\) cannot be called as keep"),
        ("async def keep(rewards):\n    return True\n", r":1\): keep is an async function"),
        ("def keep(rewards):\n    return sum(rewards)\n", r":1\): it returned 2.0 \(float\), not True or False"),
        ("def keep(rewards):\n    return rewards[99] > 0\n", r":2\): IndexError"),
        ("import os\nos._exit(0)\n", "it ended its process with exit code 0, while the file was loaded"),
    ],
)
def test_a_mistake_in_the_file_is_refused_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    options = ["--group-size", "4", "--algorithm.filter.function-timeout-s", str(LONG_S)]
    config = parse([*options, "--algorithm.filter.function", str(path)])
    with pytest.raises(ConfigError, match=message) as refused:
        check_filter_function(config, lambda _: None)
    assert str(refused.value).startswith(f"filter function keep ({path}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["no_such.py", "no_such.py:keep", "."])
def test_a_missing_file_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.filter\.function is .* there is no file"):
        check_filter_function(parse(["--algorithm.filter.function", name]), lambda _: None)
