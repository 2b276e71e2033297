"""A user's reward function that does anything wrong: one sentence with the line of the user's file, and exit code 2."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowrt.errors import ConfigError
from flowrt.recipes.tasks.reward_client import RewardProcess, check_reward
from tests.integration.conftest import wait_until

ROWS = 8


def function(*body: str, signature: str = "response, answer") -> str:
    """A reward file whose function has these lines, the first of them at line 2."""
    return "\n".join([f"def reward({signature}):", *(f"    {line}" for line in body), ""])


def flags(tmp_path: Path, model: Path, text: str) -> tuple[Path, list[str]]:
    """The reward file, and the flags of a run with it."""
    data, mine = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": "7"}) + "\n" for n in range(ROWS)))
    mine.write_text(text)
    of_data = ["--data", str(data), "--data.reward", str(mine), "--data.reward-timeout-s", "1"]
    return mine, [
        "--recipe",
        "custom",
        *of_data,
        "--rollout.max-new-tokens",
        "16",
        "--data.eval-prompts",
        "0",
        "--model",
        str(model),
    ]


REFUSED = {
    "exits at import": ("import sys\nsys.exit(0)\n", ":2)", "exit(0), while the file was loaded"),
    "exits at import with a code": ("import sys\nsys.exit(3)\n", ":2)", "exit(3), while the file was loaded"),
    "ends its process at import": ("import os\nos._exit(0)\n", "mine.py)", "with exit code 0, while the file was"),
    "hangs at import": (
        "import time\nwhile True:\n    time.sleep(1)\n",
        ":3)",
        "did not return in 1 s, while the file",
    ),
    "raises at import": ("x = 1\nassert x == 2, 'two'\n", ":2)", "AssertionError: two, while the file was loaded"),
    "is no Python": ("x = 1\ndef reward(:\n", ":2)", "SyntaxError"),
    "has no function": ("x = 1\n", "mine.py)", "has no function 'reward'"),
    "takes other arguments": (
        function("return 1.0", signature="completions, **kwargs"),
        ":1)",
        "reward(completions, **kwargs) cannot be called as reward(response, answer)",
    ),
    "is async": (f"async {function('return 1.0')}", ":1)", "is an async function"),
    "raises": (function("return 1 / 0"), ":2)", "ZeroDivisionError: division by zero, on the response '7'"),
    "raises in a library": ("import json\n" + function("return json.loads('{')"), ":3)", "JSONDecodeError"),
    "gives nothing": (function("pass"), ":1)", "returned None (NoneType), not a number"),
    "gives NaN": (function("return float('nan')"), ":1)", "returned nan, not a finite number"),
    "gives infinity": (function("return float('inf')"), ":1)", "returned inf, not a finite number"),
    "gives text": (function("return '1.5'"), ":1)", "returned '1.5' (str), not a number"),
    "gives a list": (function("return [1.0]"), ":1)", "returned [1.0] (list), not a number"),
    "gives a coroutine": (
        "async def one(): return 1.0\n" + function("return one()"),
        ":2)",
        "(coroutine), not a number",
    ),
    "recurses": (function("return reward(response, answer)"), ":2)", "RecursionError"),
    "raises megabytes": (function("raise ValueError('x' * 5_000_000)"), ":2)", "ValueError: xxxx"),
    "cannot say what it raises": (
        "class Odd(Exception):\n    def __str__(self): raise self\n" + function("raise Odd"),
        ":4)",
        "Odd, on the response",
    ),
    "is interrupted": (function("raise KeyboardInterrupt"), ":2)", "KeyboardInterrupt"),
    "exits": ("import sys\n" + function("sys.exit(0)"), ":3)", "exit(0), on the response '7'"),
    "ends its process": ("import os\n" + function("os._exit(0)"), "mine.py)", "ended its process with exit code 0"),
    "segfaults": ("import ctypes\n" + function("ctypes.string_at(0)"), ":3)", "was killed by SIGSEGV"),
    "hangs": ("import time\n" + function("time.sleep(99)"), ":3)", "did not return in 1 s, on the response '7'"),
    "closes descriptors": ("import os\n" + function("os.closerange(0, 999)", "return 1.0"), "mine.py)", "its process"),
    "kills its parent": (
        "import os, time\n" + function("os.kill(os.getppid(), 9)", "time.sleep(99)"),
        "mine.py)",
        "its process, or killed it",
    ),
}


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize(("text", "place", "what"), REFUSED.values(), ids=REFUSED)
def test_a_reward_function_that_cannot_be_used_is_refused_before_anything_starts(
    refused: Callable[..., Any], tmp_path: Path, untrained_model: Path, text: str, place: str, what: str
) -> None:
    mine, of_run = flags(tmp_path, untrained_model, text)
    # Only those that hang wait for the limit; the others must not meet it while the processor is shared.
    limit_s = "1" if "in 1 s" in what else "10"
    said = refused(*of_run, "--data.reward-timeout-s", limit_s).sentence()
    assert f"flowrt: reward function reward ({mine}" in said
    assert place in said
    assert what in said


@pytest.mark.slow
def test_a_reward_file_that_takes_long_to_load_is_announced_and_can_be_interrupted(
    launch: Callable[..., Any], tmp_path: Path, untrained_model: Path
) -> None:
    mine, of_run = flags(tmp_path, untrained_model, "import time\ntime.sleep(99)\n")
    launched = launch(*of_run, "--data.reward-timeout-s", "60")
    launched.wait_for(lambda: "waiting for" in launched.output, "announcement")
    assert f"waiting for reward function reward ({mine}), while the file was loaded: at most 60 s" in launched.words
    launched.signal(signal.SIGINT)
    assert launched.wait(10.0) == 130
    assert "Traceback" not in launched.output
    launched.assert_gone(10.0)
    assert not launched.run_dir.exists()


INTERRUPTED_ON_ANOTHER_THREAD = """
import os, signal, sys, threading, time
from flowrt.recipes.tasks import reward_client

def interrupt():
    while not os.path.exists(sys.argv[1] + ".begun"):
        time.sleep(0.01)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

process = reward_client.RewardProcess(sys.argv[1], 60.0)
timer = threading.Timer(1.0, interrupt)
timer.start()
try:
    process.load()
except KeyboardInterrupt:
    print("interrupted")
finally:
    process.close()
"""


def test_an_interrupt_that_does_not_end_the_receive_is_handled_after_it(tmp_path: Path) -> None:
    """A handler that runs on another thread leaves the receive blocked, as a signal just before the call does."""
    mine = tmp_path / "mine.py"
    mine.write_text("import time\nopen(__file__ + '.begun', 'w').close()\ntime.sleep(99)\n")
    words = [sys.executable, "-c", INTERRUPTED_ON_ANOTHER_THREAD, str(mine)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=40.0, check=True)
    assert ended.stdout == "interrupted\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "what"),
    [
        ("raise KeyError('no such thing')", ":4): KeyError: 'no such thing', on the response"),
        ("os._exit(0)", "mine.py): it ended its process with exit code 0, on the response"),
        ("time.sleep(99)", ":4): it did not return in 1 s, on the response"),
    ],
    ids=["raises", "ends its process", "hangs"],
)
def test_a_reward_function_that_fails_later_ends_the_run_at_once_with_exit_code_2(
    launch: Callable[..., Any], tmp_path: Path, untrained_model: Path, fails: str, what: str
) -> None:
    text = "import os, time\n" + function("if response != answer:", f"    {fails}", "return 1.0")
    mine, of_run = flags(tmp_path, untrained_model, text)
    small = [
        "--prompts-per-step",
        "2",
        "--group-size",
        "2",
        "--rollout.max-new-tokens",
        "8",
        "--algorithm.kl.coef",
        "0",
    ]
    launched = launch(*of_run, *small, "--rollout.workers", "1", "--checkpoint.every", "0", "--steps", "4")
    assert launched.wait(120.0) == 2, launched.output
    last = launched.output.strip().splitlines()[-1]
    assert last.startswith(f"flowrt: reward function reward ({mine}"), last
    assert what in last
    assert "restarting in" not in launched.words
    assert "Traceback" not in launched.output + launched.log("reward")
    launched.assert_gone(10.0)


def test_a_call_in_which_the_process_dies_is_repeated_once(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    first = "if not os.path.exists(answer): open(answer, 'w').close(); os.kill(os.getpid(), 11)"
    mine.write_text("import os\n" + function(first, "return 0.5"))
    process = RewardProcess(str(mine), 30.0)
    try:
        assert process("some response", str(tmp_path / "called")) == 0.5
        assert process("another", str(tmp_path / "called")) == 0.5
    finally:
        process.close()


def test_texts_of_any_kind_and_output_do_not_disturb_the_answers(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("import os\n" + function("print('{\"reward\": 9}' * 9999)", "return len(response) - len(answer)"))
    process = RewardProcess(str(mine), 30.0, subprocess.DEVNULL)
    try:
        for response, answer in [("", ""), ("a\nb\r\n", "\x00"), ("\ud800 ü 字", "x"), ("y" * 3_000_000, "z")]:
            assert process(response, answer) == len(response) - len(answer)
    finally:
        process.close()


STARTS = "import subprocess\n" + function(
    "for new_session in (False, True):",
    "    subprocess.Popen(['sleep', '77'], start_new_session=new_session)",
    "return 1.0",
)


def sleeping(marker: str) -> list[psutil.Process]:
    """The processes that a reward function has started in a test."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            if process.info["cmdline"] == ["sleep", "77"] and process.environ().get("TEST_OF_REWARD") == marker:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_processes_of_a_reward_function_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(STARTS)
    monkeypatch.setenv("TEST_OF_REWARD", str(tmp_path))
    process = RewardProcess(str(mine), 30.0)
    assert process("response", "answer") == 1.0
    wait_until(lambda: len(sleeping(str(tmp_path))) == 2, 10.0, lambda: "nothing was started")
    process.close()
    assert not sleeping(str(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_processes_of_a_reward_function_end_with_a_killed_caller(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(STARTS)
    calls = f"""
from flowrt.recipes.tasks.reward_client import RewardProcess
process = RewardProcess({str(mine)!r}, 30.0)
process("response", "answer")
print("called", flush=True)
input()
"""
    environment = {**os.environ, "TEST_OF_REWARD": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", calls], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"called\n"
        wait_until(lambda: len(sleeping(str(tmp_path))) == 2, 10.0, lambda: "nothing was started")
        caller.send_signal(signal.SIGKILL)
        caller.wait(10.0)
    wait_until(lambda: not sleeping(str(tmp_path)), 10.0, lambda: f"still there: {sleeping(str(tmp_path))}")


def test_a_long_wait_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, said = tmp_path / "mine.py", list[str]()
    mine.write_text("import time\ntime.sleep(0.5)\n" + function("return 1.0"))
    monkeypatch.setattr("flowrt.recipes.tasks.reward_client.PROGRESS_AFTER_S", 0.01)
    check_reward(str(mine), 30.0, "7", said.append)
    assert len(said) == 1
    assert "while the file was loaded: at most 30 s (data.reward_timeout_s)" in said[0]


def test_closing_ends_a_call_that_another_thread_makes(tmp_path: Path) -> None:
    mine, raised = tmp_path / "mine.py", list[BaseException]()
    mine.write_text(f"import time\n{function('open(answer, chr(119)).close()', 'time.sleep(99)')}")
    process = RewardProcess(str(mine), 60.0)

    def call() -> None:
        try:
            process("response", str(tmp_path / "called"))
        except Exception as error:  # noqa: BLE001 (whatever it is, it is looked at below)
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    wait_until((tmp_path / "called").exists, 20.0, lambda: "not called")
    process.close()
    thread.join(10.0)
    assert not thread.is_alive()
    assert "was closed" in str(raised[0])
    assert not isinstance(raised[0], ConfigError)
