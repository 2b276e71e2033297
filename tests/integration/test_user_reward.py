"""Faulty reward functions of users: each fault is a named outcome with its line, and no process remains."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowrt.errors import ConfigError, FlowError
from flowrt.rewards.check import check_rewards
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.outcomes import Result, RewardOutcome
from flowrt.rewards.scoring import RewardScorer
from tests.integration.conftest import wait_until

ROWS = 8
LIMIT_S = 60.0
"""Longest total time of the calls of a test."""


def function(*body: str, signature: str = "response, answer") -> str:
    """A reward file whose function has these lines, the first of them at line 2."""
    return "\n".join([f"def reward({signature}):", *(f"    {line}" for line in body), ""])


@pytest.fixture(autouse=True)
def no_process_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every process that a test starts inherits a marker in its environment, and ends with the test."""
    monkeypatch.setenv("TEST_OF_REWARD", str(tmp_path))
    yield
    wait_until(
        lambda: not marked_processes(str(tmp_path)), 10.0, lambda: f"still there: {marked_processes(str(tmp_path))}"
    )


def marked_processes(marker: str) -> list[psutil.Process]:
    """The processes that this test has started, directly or indirectly."""
    marked = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("TEST_OF_REWARD") == marker:
                marked.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return marked


def outcomes(reward_file: Path, responses: list[str], answer: str = "7", **options: Any) -> list[RewardOutcome]:
    """The outcomes of these responses, which are scored concurrently."""

    async def score() -> list[RewardOutcome]:
        scorer = RewardScorer(RewardOptions(functions=(str(reward_file),), **options), output=subprocess.DEVNULL)
        row = json.dumps({"answer": answer}).encode()
        try:
            async with asyncio.timeout(LIMIT_S):
                answers = await asyncio.gather(*(scorer.outcomes(response, row) for response in responses))
            return [function_outcomes[0] for function_outcomes in answers]
        finally:
            await scorer.close()

    return asyncio.run(score())


def run_flags(tmp_path: Path, model: Path, text: str) -> tuple[Path, list[str]]:
    """The reward file, and the flags of a run with it."""
    data, reward_file = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": "7"}) + "\n" for n in range(ROWS)))
    reward_file.write_text(text)
    return reward_file, [
        *("--recipe", "custom", "--data", str(data), "--reward", str(reward_file), "--model", str(model)),
        *("--rollout.max-new-tokens", "16", "--data.eval-prompts", "0"),
    ]


FAULTY_FUNCTIONS = {
    "exits at import": ("import sys\nsys.exit(0)\n", ":2)", "exit(0), while the file was loaded"),
    "exits at import with a code": ("import sys\nsys.exit(3)\n", ":2)", "exit(3), while the file was loaded"),
    "ends its process at import": ("import os\nos._exit(0)\n", "mine.py)", "with exit code 0, while the file was"),
    "hangs at import": (
        "import time\nwhile True:\n    time.sleep(1)\n",
        ":3)",
        "did not return in 1 s, while the file",
    ),
    "raises at import": ("x = 1\nassert x == 2, 'two'\n", ":2)", "AssertionError: two, while the file was loaded"),
    "is not Python": ("x = 1\ndef reward(:\n", ":2)", "SyntaxError"),
    "has no function": ("x = 1\n", "mine.py)", "has no function 'reward'"),
    "takes no argument": (function("return 1.0", signature=""), ":1)", "it takes no argument"),
    "takes an unknown column": (
        function("return 1.0", signature="response, answer, level"),
        ":1)",
        "it takes 'level', and the row has no such column; it has prompt",
    ),
    "raises": (function("return 1 / 0"), ":2)", "ZeroDivisionError: division by zero, on the response '7'"),
    "raises in a library": ("import json\n" + function("return json.loads('{')"), ":3)", "JSONDecodeError"),
    "returns None": (function("pass"), "mine.py)", "it returned None for the first 8 rows"),
    "returns NaN": (function("return float('nan')"), ":1)", "returned nan, not a finite number"),
    "returns infinity": (function("return float('inf')"), ":1)", "returned inf, not a finite number"),
    "returns text": (function("return '1.5'"), ":1)", "returned '1.5' (str), not a number"),
    "returns a list": (function("return [1.0]"), ":1)", "returned [1.0] (list), not a number"),
    "returns text as a part": (function("return {'a': 1, 'b': 'x'}"), ":1)", "returned 'b' as 'x' (str), not a number"),
    "returns no part": (function("return {}"), ":1)", "returned no part"),
    "recurses": (function("return reward(response, answer)"), ":2)", "RecursionError"),
    "raises a message of megabytes": (function("raise ValueError('x' * 5_000_000)"), ":2)", "ValueError: xxxx"),
    "raises an exception whose str() raises": (
        "class Odd(Exception):\n    def __str__(self): raise self\n" + function("raise Odd"),
        ":4)",
        "Odd, on the response",
    ),
    "is interrupted": (function("raise KeyboardInterrupt"), ":2)", "KeyboardInterrupt"),
    "exits": ("import sys\n" + function("sys.exit(0)"), ":3)", "exit(0), on the response '7'"),
    "ends its process": ("import os\n" + function("os._exit(0)"), "mine.py)", "ended its process with exit code 0"),
    "segfaults": ("import ctypes\n" + function("ctypes.string_at(0)"), ":3)", "was killed by SIGSEGV"),
    "runs out of memory": (
        function("return len(bytearray(1 << 40))"),
        ":2)",
        "it ran out of memory, on the response '7'",
    ),
    "opens files": (function("return [open(__file__) for _ in range(2000)]"), ":2)", "Too many open files"),
    "hangs": ("import time\n" + function("time.sleep(99)"), ":3)", "did not return in 1 s, on the response '7'"),
    "hangs in a coroutine": (
        "import asyncio\n" + f"async {function('await asyncio.sleep(99)')}",
        "mine.py",
        "did not return in 1 s, on the response '7'",
    ),
    "closes descriptors": ("import os\n" + function("os.closerange(0, 999)", "return 1.0"), "mine.py)", "its process"),
    "kills its parent": (
        "import os, time\n" + function("os.kill(os.getppid(), 9)", "time.sleep(99)"),
        "mine.py)",
        "its process, or killed it",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "place", "reason"), FAULTY_FUNCTIONS.values(), ids=FAULTY_FUNCTIONS)
def test_a_reward_function_that_cannot_be_used_is_refused(tmp_path: Path, text: str, place: str, reason: str) -> None:
    reward_file = tmp_path / "mine.py"
    reward_file.write_text(text)
    # Only hanging functions may reach the limit, the others must not, even on a loaded machine.
    limit_s = 1.0 if "in 1 s" in reason else 20.0
    options = RewardOptions(
        functions=(str(reward_file),), timeout_s=limit_s, load_timeout_s=limit_s if "99" not in text else 30
    )
    rows = [json.dumps({"prompt": f"{n}+1=", "answer": "7"}).encode() for n in range(ROWS)]
    with pytest.raises(ConfigError) as refused:
        check_rewards(options, rows, print)
    message = str(refused.value)
    assert message.startswith(f"reward function reward ({reward_file}"), message
    assert place in message
    assert reason in message
    assert "\n" not in message


def test_a_reward_file_imports_modules_of_its_directory(tmp_path: Path) -> None:
    folder = tmp_path / "rewards"
    folder.mkdir()
    (folder / "of_my_reward.py").write_text("VALUE = 0.5\n")
    (folder / "mine.py").write_text("from of_my_reward import VALUE\n" + function("return VALUE + len(response)"))
    assert [outcome.value for outcome in outcomes(folder / "mine.py", ["", "1"])] == [0.5, 1.5]


def test_a_file_with_the_name_of_a_module_of_python_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "select.py").write_text("raise SystemExit(1)")
    (tmp_path / "mine.py").write_text("import select\n" + function("return float(hasattr(select, 'poll'))"))
    monkeypatch.chdir(tmp_path)
    assert [outcome.value for outcome in outcomes(tmp_path / "mine.py", [""])] == [1.0]


@pytest.mark.slow
@pytest.mark.parametrize("text", [function("return 1 / 0"), "import os\n" + function("os._exit(3)")])
def test_a_run_with_a_faulty_reward_function_is_refused_before_it_starts(
    refused: Callable[..., Any], tmp_path: Path, untrained_model: Path, text: str
) -> None:
    reward_file, arguments = run_flags(tmp_path, untrained_model, text)
    assert f"flowrt: reward function reward ({reward_file}" in refused(*arguments).sentence()


@pytest.mark.slow
def test_a_slow_load_of_a_reward_file_is_announced_and_can_be_interrupted(
    launch: Callable[..., Any], tmp_path: Path, untrained_model: Path
) -> None:
    reward_file, arguments = run_flags(tmp_path, untrained_model, "import time\ntime.sleep(99)\n")
    launched = launch(*arguments)
    launched.wait_for(lambda: "waiting for" in launched.output, "announcement")
    assert (
        f"waiting for reward function reward ({reward_file}), while the file was loaded: at most 60 s" in launched.words
    )
    launched.signal(signal.SIGINT)
    assert launched.wait(10.0) == 130
    assert "Traceback" not in launched.output
    launched.assert_gone(10.0)
    assert not launched.run_dir.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("raise KeyError('no such thing')", ":4): KeyError: 'no such thing', on the response"),
        ("time.sleep(99)", ":4): it did not return in 1 s, on the response"),
    ],
    ids=["raises", "hangs"],
)
def test_a_reward_failure_ends_the_run_with_code_2_under_on_failure_stop(
    launch: Callable[..., Any], tmp_path: Path, untrained_model: Path, statement: str, reason: str
) -> None:
    text = "import os, time\n" + function("if response != answer:", f"    {statement}", "return 1.0")
    reward_file, arguments = run_flags(tmp_path, untrained_model, text)
    launched = launch(
        *(*arguments, "--reward.on-failure", "stop", "--reward.timeout-s", "1"),
        *("--prompts-per-step", "2", "--group-size", "2", "--rollout.max-new-tokens", "8", "--algorithm.kl.coef", "0"),
        *("--rollout.workers", "1", "--checkpoint.every", "0", "--steps", "4"),
    )
    assert launched.wait(120.0) == 2, launched.output
    last = launched.output.strip().splitlines()[-1]
    assert last.startswith(f"flowrt: reward function reward ({reward_file}"), last
    assert reason in last
    assert "restarting in" not in launched.words
    assert "Traceback" not in launched.output + launched.log("reward")
    launched.assert_gone(10.0)


FAULTY_REWARD = """
import os, time
def reward(response, answer):
    match response:
        case "hangs": time.sleep(99)
        case "memory": return float(len(bytearray(2 << 30)))
        case "raises": raise KeyError("no such thing")
        case "exits": os._exit(3)
        case "forks":
            for _ in range(20):
                if os.fork() == 0:
                    time.sleep(99)
        case "copies":  # the copies continue as if they were the child
            os.fork()
        case "text": return "1.0"
        case "none": return None
    return float(response)
"""


def test_each_call_has_its_own_outcome(tmp_path: Path) -> None:
    reward_file = tmp_path / "mine.py"
    reward_file.write_text(
        FAULTY_REWARD.replace("return float(response)", "return float(response) if response.isdigit() else 0.5")
    )
    kinds = ["hangs", "memory", "raises", "exits", "forks", "copies", "text", "none"]
    responses = [kinds[n // 4 % len(kinds)] if n % 4 == 1 else str(n) for n in range(4 * len(kinds))]
    expected = {
        "hangs": Result.TIMEOUT,
        "memory": Result.MEMORY,
        "raises": Result.ERROR,
        "exits": Result.DIED,
        "text": Result.INVALID,
        "none": Result.NOT_APPLICABLE,
    }
    results = outcomes(reward_file, responses, workers=2, timeout_s=3.0, memory_mb=512)
    for response, outcome in zip(responses, results, strict=True):
        assert outcome.result == expected.get(response, Result.OK), (response, outcome)
        if response.isdigit():
            assert outcome.value == float(response)
    assert next(outcome for outcome in results if outcome.result is Result.TIMEOUT).line == 5
    assert next(outcome for outcome in results if outcome.result is Result.ERROR).detail == "KeyError: 'no such thing'"


def test_the_deadline_applies_to_a_call_and_not_to_a_message(tmp_path: Path) -> None:
    """A message of 32 calls of 0.1 s takes 3.2 s, but each call stays below its limit of 1 s."""
    reward_file = tmp_path / "mine.py"
    reward_file.write_text("import time\n" + function("time.sleep(0.1)", "return 1.0"))
    results = outcomes(reward_file, ["x"] * 64, timeout_s=1.0)
    assert [outcome.result for outcome in results] == [Result.OK] * 64


def test_a_hung_call_ends_at_its_deadline(tmp_path: Path) -> None:
    reward_file = tmp_path / "mine.py"
    reward_file.write_text("import time\n" + function("while response == 'hangs': pass", "return 1.0"))
    results = outcomes(reward_file, ["ok", "hangs", "ok"], timeout_s=1.0)
    assert [outcome.result for outcome in results] == [Result.OK, Result.TIMEOUT, Result.OK]
    assert results[1].seconds >= 1.0, results[1]


@pytest.mark.parametrize(("retries", "result"), [(0, Result.DIED), (1, Result.OK)])
def test_a_call_whose_process_dies_is_retried(tmp_path: Path, retries: int, result: Result) -> None:
    reward_file = tmp_path / "mine.py"
    first = "if not os.path.exists(answer): open(answer, 'w').close(); os.kill(os.getpid(), 11)"
    reward_file.write_text("import os\n" + function(first, "return 0.5"))
    results = outcomes(reward_file, ["some response", "another"], str(tmp_path / "called"), retries=retries)
    assert [outcome.result for outcome in results] == [result, Result.OK]


def test_a_hung_call_is_not_retried(tmp_path: Path) -> None:
    reward_file, calls = tmp_path / "mine.py", tmp_path / "calls"
    reward_file.write_text("import time\n" + function("open(answer, 'a').write('.')", "time.sleep(99)"))
    assert outcomes(reward_file, ["x"], str(calls), timeout_s=1.0, retries=3)[0].result is Result.TIMEOUT
    assert calls.read_text() == "."


def test_unusual_texts_and_printed_output_do_not_change_the_rewards(tmp_path: Path) -> None:
    reward_file = tmp_path / "mine.py"
    reward_file.write_text(
        "import os\n" + function("print('{\"reward\": 9}' * 9999)", "return len(response) - len(answer)")
    )
    responses = ["", "a\nb\r\n", "\ud800 ü 字", "y" * 3_000_000, "\x00"]
    assert [outcome.value for outcome in outcomes(reward_file, responses, "x")] == [
        len(response) - 1 for response in responses
    ]


def test_output_reaches_the_log_up_to_a_limit(tmp_path: Path) -> None:
    reward_file = tmp_path / "mine.py"
    reward_file.write_text("import os\n" + function("print('begin'); os.write(1, b'x' * 1_000_000)", "return 1.0"))
    with (tmp_path / "log").open("wb") as log:

        async def score() -> None:
            scorer = RewardScorer(RewardOptions(functions=(str(reward_file),)), output=log.fileno())
            try:
                async with asyncio.timeout(LIMIT_S):
                    for _ in range(3):
                        await scorer.score("7", b'{"answer": "7"}')
            finally:
                await scorer.close()

        asyncio.run(score())
    text = (tmp_path / "log").read_bytes()
    assert text.startswith(b"begin\nxxx")
    assert len(text) < (1 << 16) + 200
    assert text.count(b"is left out") == 1


STARTS_PROCESSES = "import subprocess\n" + function(
    "for new_session in (False, True):",
    "    subprocess.Popen(['sleep', '77'], start_new_session=new_session)",
    "return 1.0",
)


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_processes_of_a_reward_function_end_with_the_scorer(tmp_path: Path) -> None:
    reward_file = tmp_path / "mine.py"
    reward_file.write_text(STARTS_PROCESSES)

    async def score() -> None:
        scorer = RewardScorer(RewardOptions(functions=(str(reward_file),)))
        try:
            assert (await scorer.score("response", b'{"answer": "7"}')).reward == 1.0
            # A reaper, its child, and the two processes that the child has started.
            await asyncio.to_thread(
                wait_until, lambda: len(marked_processes(str(tmp_path))) == 4, 10.0, lambda: "not started"
            )
        finally:
            await scorer.close()
        assert not marked_processes(str(tmp_path))

    asyncio.run(score())


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_processes_of_a_reward_function_end_with_a_killed_caller(tmp_path: Path) -> None:
    reward_file = tmp_path / "mine.py"
    reward_file.write_text(STARTS_PROCESSES)
    program = f"""
import asyncio
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.scoring import RewardScorer

async def main():
    scorer = RewardScorer(RewardOptions(functions=({str(reward_file)!r},)))
    await scorer.score("response", b'{{"answer": "7"}}')
    print("called", flush=True)
    await asyncio.to_thread(input)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"called\n"
        wait_until(lambda: len(marked_processes(str(tmp_path))) == 5, 10.0, lambda: "not started")
        caller.send_signal(signal.SIGKILL)
        caller.wait(10.0)
    wait_until(
        lambda: not marked_processes(str(tmp_path)), 10.0, lambda: f"still there: {marked_processes(str(tmp_path))}"
    )


def test_close_ends_a_running_call(tmp_path: Path) -> None:
    reward_file = tmp_path / "mine.py"
    reward_file.write_text(f"import time\n{function('open(answer, chr(119)).close()', 'time.sleep(99)')}")

    async def close() -> None:
        scorer = RewardScorer(RewardOptions(functions=(str(reward_file),)))
        row = json.dumps({"answer": str(tmp_path / "called")}).encode()
        scoring = asyncio.create_task(scorer.score("response", row))
        await asyncio.to_thread(wait_until, (tmp_path / "called").exists, 20.0, lambda: "not called")
        await scorer.close()
        with pytest.raises(FlowError, match="were closed during a call"):
            await scoring

    asyncio.run(close())


def test_too_many_failures_end_the_run_and_name_the_first(tmp_path: Path) -> None:
    reward_file = tmp_path / "mine.py"
    reward_file.write_text(function("return 1.0 if int(response) % 5 < 2 else 1 / 0"))

    async def score(options: RewardOptions, responses: int) -> None:
        scorer = RewardScorer(options)
        try:
            for number in range(responses):
                await scorer.score(str(number), b'{"answer": "7"}')
        finally:
            await scorer.close()

    options = RewardOptions(functions=(str(reward_file),))
    asyncio.run(score(options, 199))
    first = r"120 of the last 200 calls .* failed, .*:2\): ZeroDivisionError: division by zero, on the response '2' to"
    with pytest.raises(ConfigError, match=first):
        asyncio.run(score(options, 200))
    asyncio.run(score(RewardOptions(functions=(str(reward_file),), max_failures=0.6), 400))


def test_a_timeout_but_not_an_exception_ends_a_deterministic_run(tmp_path: Path) -> None:
    reward_file = tmp_path / "mine.py"
    reward_file.write_text("import time\n" + function("time.sleep(99) if response == 'hangs' else 1 / 0"))

    async def score() -> None:
        scorer = RewardScorer(RewardOptions(functions=(str(reward_file),), timeout_s=1.0), is_deterministic=True)
        try:
            assert (await scorer.score("raises", b'{"answer": "7"}')).reward == 0.0
            with pytest.raises(ConfigError, match="did not return in 1 s, on the response 'hangs'"):
                await scorer.score("hangs", b'{"answer": "7"}')
        finally:
            await scorer.close()

    asyncio.run(score())


def test_a_long_load_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward_file, messages = tmp_path / "mine.py", list[str]()
    reward_file.write_text("import time\ntime.sleep(0.5)\n" + function("return 1.0"))
    monkeypatch.setattr("flowrt.rewards.children.PROGRESS_AFTER_S", 0.01)
    check_rewards(RewardOptions(functions=(str(reward_file),)), [b'{"answer": "7"}'], messages.append)
    assert len(messages) == 1
    assert "while the file was loaded: at most 60 s (reward.load_timeout_s)" in messages[0]


def test_a_child_is_replaced_after_many_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward_file = tmp_path / "mine.py"
    reward_file.write_text("import os\n" + function("return float(os.getpid())"))
    monkeypatch.setattr("flowrt.rewards.children.MAX_CALLS", 50)
    pids = [outcome.value for outcome in outcomes(reward_file, ["x"] * 200)]
    assert 2 <= len(set(pids)) <= 4
