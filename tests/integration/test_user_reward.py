"""A user's reward function that does anything wrong: an outcome with a name, the line, and no process is left."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
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
"""Longest that a test's calls may take together."""


def function(*body: str, signature: str = "response, answer") -> str:
    """A reward file whose function has these lines, the first of them at line 2."""
    return "\n".join([f"def reward({signature}):", *(f"    {line}" for line in body), ""])


@pytest.fixture(autouse=True)
def no_process_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything that a test starts has this in its environment, and is gone at its end."""
    monkeypatch.setenv("TEST_OF_REWARD", str(tmp_path))
    yield
    wait_until(lambda: not marked(str(tmp_path)), 10.0, lambda: f"still there: {marked(str(tmp_path))}")


def marked(marker: str) -> list[psutil.Process]:
    """The processes that this test has started, directly or not."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("TEST_OF_REWARD") == marker:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def outcomes(mine: Path, responses: list[str], answer: str = "7", **options: Any) -> list[RewardOutcome]:
    """What comes of these responses, which are scored at the same time."""

    async def score() -> list[RewardOutcome]:
        scorer = RewardScorer(RewardOptions(functions=(str(mine),), **options), output=subprocess.DEVNULL)
        row = json.dumps({"answer": answer}).encode()
        try:
            async with asyncio.timeout(LIMIT_S):
                found = await asyncio.gather(*(scorer.outcomes(response, row) for response in responses))
            return [one[0] for one in found]
        finally:
            await scorer.close()

    return asyncio.run(score())


def flags(tmp_path: Path, model: Path, text: str) -> tuple[Path, list[str]]:
    """The reward file, and the flags of a run with it."""
    data, mine = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": "7"}) + "\n" for n in range(ROWS)))
    mine.write_text(text)
    return mine, [
        *("--recipe", "custom", "--data", str(data), "--reward", str(mine), "--model", str(model)),
        *("--rollout.max-new-tokens", "16", "--data.eval-prompts", "0"),
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
    "takes no argument": (function("return 1.0", signature=""), ":1)", "it takes no argument"),
    "takes another column": (
        function("return 1.0", signature="response, answer, level"),
        ":1)",
        "it takes 'level', and the row has no such column; it has prompt",
    ),
    "raises": (function("return 1 / 0"), ":2)", "ZeroDivisionError: division by zero, on the response '7'"),
    "raises in a library": ("import json\n" + function("return json.loads('{')"), ":3)", "JSONDecodeError"),
    "gives nothing": (function("pass"), "mine.py)", "it returned None for the first 8 rows"),
    "gives NaN": (function("return float('nan')"), ":1)", "returned nan, not a finite number"),
    "gives infinity": (function("return float('inf')"), ":1)", "returned inf, not a finite number"),
    "gives text": (function("return '1.5'"), ":1)", "returned '1.5' (str), not a number"),
    "gives a list": (function("return [1.0]"), ":1)", "returned [1.0] (list), not a number"),
    "gives a text as a part": (function("return {'a': 1, 'b': 'x'}"), ":1)", "returned 'b' as 'x' (str), not a number"),
    "gives no part": (function("return {}"), ":1)", "returned no part"),
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
    "takes memory": (function("return len(bytearray(1 << 40))"), ":2)", "it ran out of memory, on the response '7'"),
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
@pytest.mark.parallel
@pytest.mark.parallel
@pytest.mark.parametrize(("text", "place", "what"), REFUSED.values(), ids=REFUSED)
def test_a_reward_function_that_cannot_be_used_is_refused(tmp_path: Path, text: str, place: str, what: str) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(text)
    # Only those that hang wait for the limit; the others must not meet it while the processor is shared.
    limit_s = 1.0 if "in 1 s" in what else 20.0
    options = RewardOptions(
        functions=(str(mine),), timeout_s=limit_s, load_timeout_s=limit_s if "99" not in text else 30
    )
    rows = [json.dumps({"prompt": f"{n}+1=", "answer": "7"}).encode() for n in range(ROWS)]
    with pytest.raises(ConfigError) as refused:
        check_rewards(options, rows, print)
    said = str(refused.value)
    assert said.startswith(f"reward function reward ({mine}"), said
    assert place in said
    assert what in said
    assert "\n" not in said


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize("text", [function("return 1 / 0"), "import os\n" + function("os._exit(3)")])
def test_a_run_with_such_a_function_ends_before_anything_starts(
    refused: Callable[..., Any], tmp_path: Path, untrained_model: Path, text: str
) -> None:
    mine, of_run = flags(tmp_path, untrained_model, text)
    assert f"flowrt: reward function reward ({mine}" in refused(*of_run).sentence()


@pytest.mark.slow
@pytest.mark.parallel
def test_a_reward_file_that_takes_long_to_load_is_announced_and_can_be_interrupted(
    launch: Callable[..., Any], tmp_path: Path, untrained_model: Path
) -> None:
    mine, of_run = flags(tmp_path, untrained_model, "import time\ntime.sleep(99)\n")
    launched = launch(*of_run)
    launched.wait_for(lambda: "waiting for" in launched.output, "announcement")
    assert f"waiting for reward function reward ({mine}), while the file was loaded: at most 60 s" in launched.words
    launched.signal(signal.SIGINT)
    assert launched.wait(10.0) == 130
    assert "Traceback" not in launched.output
    launched.assert_gone(10.0)
    assert not launched.run_dir.exists()


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize(
    ("fails", "what"),
    [
        ("raise KeyError('no such thing')", ":4): KeyError: 'no such thing', on the response"),
        ("time.sleep(99)", ":4): it did not return in 1 s, on the response"),
    ],
    ids=["raises", "hangs"],
)
def test_with_policy_stop_a_later_failure_ends_the_run_with_exit_code_2(
    launch: Callable[..., Any], tmp_path: Path, untrained_model: Path, fails: str, what: str
) -> None:
    text = "import os, time\n" + function("if response != answer:", f"    {fails}", "return 1.0")
    mine, of_run = flags(tmp_path, untrained_model, text)
    launched = launch(
        *(*of_run, "--reward.on-failure", "stop", "--reward.timeout-s", "1"),
        *("--prompts-per-step", "2", "--group-size", "2", "--rollout.max-new-tokens", "8", "--algorithm.kl.coef", "0"),
        *("--rollout.workers", "1", "--checkpoint.every", "0", "--steps", "4"),
    )
    assert launched.wait(120.0) == 2, launched.output
    last = launched.output.strip().splitlines()[-1]
    assert last.startswith(f"flowrt: reward function reward ({mine}"), last
    assert what in last
    assert "restarting in" not in launched.words
    assert "Traceback" not in launched.output + launched.log("reward")
    launched.assert_gone(10.0)


HOSTILE = """
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
        case "copies":  # the copies go on as if they were the child
            os.fork()
        case "text": return "1.0"
        case "none": return None
    return float(response)
"""


def test_each_call_has_its_own_outcome(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(HOSTILE.replace("return float(response)", "return float(response) if response.isdigit() else 0.5"))
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
    found = outcomes(mine, responses, workers=2, timeout_s=3.0, memory_mb=512)
    for response, outcome in zip(responses, found, strict=True):
        assert outcome.result == expected.get(response, Result.OK), (response, outcome)
        if response.isdigit():
            assert outcome.value == float(response)
    assert next(one for one in found if one.result is Result.TIMEOUT).line == 5
    assert next(one for one in found if one.result is Result.ERROR).detail == "KeyError: 'no such thing'"


def test_a_deadline_is_of_a_call_and_not_of_a_message(tmp_path: Path) -> None:
    """32 calls of 0.1 s take 3.2 s one after the other, and none of them its second."""
    mine = tmp_path / "mine.py"
    mine.write_text("import time\n" + function("time.sleep(0.1)", "return 1.0"))
    found = outcomes(mine, ["x"] * 64, timeout_s=1.0)
    assert [one.result for one in found] == [Result.OK] * 64


def test_a_hung_call_ends_at_its_deadline(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("import time\n" + function("while response == 'hangs': pass", "return 1.0"))
    begin_s = monotonic()
    found = outcomes(mine, ["ok", "hangs", "ok"], timeout_s=1.0)
    assert [one.result for one in found] == [Result.OK, Result.TIMEOUT, Result.OK]
    assert 1.0 <= found[1].seconds < 1.5, found[1]
    assert monotonic() - begin_s < 20.0


@pytest.mark.parametrize(("retries", "result"), [(0, Result.DIED), (1, Result.OK)])
def test_a_call_in_which_the_process_dies_is_repeated(tmp_path: Path, retries: int, result: Result) -> None:
    mine = tmp_path / "mine.py"
    first = "if not os.path.exists(answer): open(answer, 'w').close(); os.kill(os.getpid(), 11)"
    mine.write_text("import os\n" + function(first, "return 0.5"))
    found = outcomes(mine, ["some response", "another"], str(tmp_path / "called"), retries=retries)
    assert [one.result for one in found] == [result, Result.OK]


def test_a_hung_call_is_not_repeated(tmp_path: Path) -> None:
    mine, calls = tmp_path / "mine.py", tmp_path / "calls"
    mine.write_text("import time\n" + function("open(answer, 'a').write('.')", "time.sleep(99)"))
    assert outcomes(mine, ["x"], str(calls), timeout_s=1.0, retries=3)[0].result is Result.TIMEOUT
    assert calls.read_text() == "."


def test_texts_of_any_kind_and_output_do_not_disturb_the_answers(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("import os\n" + function("print('{\"reward\": 9}' * 9999)", "return len(response) - len(answer)"))
    responses = ["", "a\nb\r\n", "\ud800 ü 字", "y" * 3_000_000, "\x00"]
    assert [one.value for one in outcomes(mine, responses, "x")] == [len(one) - 1 for one in responses]


def test_output_reaches_the_log_up_to_a_limit(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("import os\n" + function("print('begin'); os.write(1, b'x' * 1_000_000)", "return 1.0"))
    with (tmp_path / "log").open("wb") as log:

        async def score() -> None:
            scorer = RewardScorer(RewardOptions(functions=(str(mine),)), output=log.fileno())
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


STARTS = "import subprocess\n" + function(
    "for new_session in (False, True):",
    "    subprocess.Popen(['sleep', '77'], start_new_session=new_session)",
    "return 1.0",
)


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_processes_of_a_reward_function_end_with_it(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(STARTS)

    async def score() -> None:
        scorer = RewardScorer(RewardOptions(functions=(str(mine),)))
        try:
            assert (await scorer.score("response", b'{"answer": "7"}')).reward == 1.0
            # A guard, its child, and two that this has started.
            await asyncio.to_thread(wait_until, lambda: len(marked(str(tmp_path))) == 4, 10.0, lambda: "not started")
        finally:
            await scorer.close()
        assert not marked(str(tmp_path))

    asyncio.run(score())


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_processes_of_a_reward_function_end_with_a_killed_caller(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(STARTS)
    calls = f"""
import asyncio
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.scoring import RewardScorer

async def main():
    scorer = RewardScorer(RewardOptions(functions=({str(mine)!r},)))
    await scorer.score("response", b'{{"answer": "7"}}')
    print("called", flush=True)
    await asyncio.to_thread(input)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", calls], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"called\n"
        wait_until(lambda: len(marked(str(tmp_path))) == 5, 10.0, lambda: "not started")
        caller.send_signal(signal.SIGKILL)
        caller.wait(10.0)
    wait_until(lambda: not marked(str(tmp_path)), 10.0, lambda: f"still there: {marked(str(tmp_path))}")


def test_closing_ends_a_call(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(f"import time\n{function('open(answer, chr(119)).close()', 'time.sleep(99)')}")

    async def close() -> None:
        scorer = RewardScorer(RewardOptions(functions=(str(mine),)))
        row = json.dumps({"answer": str(tmp_path / "called")}).encode()
        scoring = asyncio.create_task(scorer.score("response", row))
        await asyncio.to_thread(wait_until, (tmp_path / "called").exists, 20.0, lambda: "not called")
        await scorer.close()
        with pytest.raises(FlowError, match="were closed during a call"):
            await scoring

    asyncio.run(close())


def test_too_many_failures_end_the_run_and_name_the_first(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(function("return 1.0 if int(response) % 5 < 2 else 1 / 0"))

    async def score(options: RewardOptions, responses: int) -> None:
        scorer = RewardScorer(options)
        try:
            for number in range(responses):
                await scorer.score(str(number), b'{"answer": "7"}')
        finally:
            await scorer.close()

    options = RewardOptions(functions=(str(mine),))
    asyncio.run(score(options, 199))
    first = r"120 of the last 200 calls .* failed, .*:2\): ZeroDivisionError: division by zero, on the response '2' to"
    with pytest.raises(ConfigError, match=first):
        asyncio.run(score(options, 200))
    asyncio.run(score(RewardOptions(functions=(str(mine),), max_failures=0.6), 400))


def test_with_deterministic_a_timeout_ends_the_run_and_an_exception_does_not(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("import time\n" + function("time.sleep(99) if response == 'hangs' else 1 / 0"))

    async def score() -> None:
        scorer = RewardScorer(RewardOptions(functions=(str(mine),), timeout_s=1.0), is_deterministic=True)
        try:
            assert (await scorer.score("raises", b'{"answer": "7"}')).reward == 0.0
            with pytest.raises(ConfigError, match="did not return in 1 s, on the response 'hangs'"):
                await scorer.score("hangs", b'{"answer": "7"}')
        finally:
            await scorer.close()

    asyncio.run(score())


def test_a_long_wait_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, said = tmp_path / "mine.py", list[str]()
    mine.write_text("import time\ntime.sleep(0.5)\n" + function("return 1.0"))
    monkeypatch.setattr("flowrt.rewards.pool.PROGRESS_AFTER_S", 0.01)
    check_rewards(RewardOptions(functions=(str(mine),)), [b'{"answer": "7"}'], said.append)
    assert len(said) == 1
    assert "while the file was loaded: at most 60 s (reward.load_timeout_s)" in said[0]


def test_a_child_is_replaced_after_many_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("import os\n" + function("return float(os.getpid())"))
    monkeypatch.setattr("flowrt.rewards.pool.MAX_CALLS", 50)
    found = [one.value for one in outcomes(mine, ["x"] * 200)]
    assert 2 <= len(set(found)) <= 4
