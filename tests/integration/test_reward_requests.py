"""Rewards by HTTP request, programs in responses, and `flowrt reward check`: against real servers and processes."""

import asyncio
import json
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from flowrt.cli import main
from flowrt.errors import ConfigError
from flowrt.rewards import remote
from flowrt.rewards.check import check_rewards
from flowrt.rewards.code import check_sandbox
from flowrt.rewards.options import JudgeOptions, RewardOptions
from flowrt.rewards.outcomes import Result, RewardOutcome
from flowrt.rewards.scoring import RewardScorer

ROW = json.dumps({"answer": "7", "prompt": "6+1=", "level": 2}).encode()
KEY = "a-secret-key"


class Server:
    """A server whose answers are a function of the request's JSON and of the number of requests so far."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.headers: list[str] = []
        self.max_concurrency = 0
        self.port = 0
        self._concurrency = 0
        self.answer: Callable[[Any, int], Any] = lambda body, number: {"reward": 0.5}

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        number = len(self.requests)
        self.headers.append(request.headers.get("Authorization", ""))
        self._concurrency += 1
        self.max_concurrency = max(self.max_concurrency, self._concurrency)
        await asyncio.sleep(0.01)
        answer = self.answer(body, number)
        if answer is None:
            await asyncio.sleep(99)
        self._concurrency -= 1
        if isinstance(answer, int):
            return web.Response(status=answer, text="not now")
        if isinstance(answer, str):
            return web.Response(text=answer)
        return web.json_response(answer)

    def url(self, path: str = "/reward") -> str:
        return f"http://127.0.0.1:{self.port}{path}"


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(remote, "LONGEST_PAUSE_S", 0.1)
    instance = Server()
    application = web.Application()
    application.router.add_post("/{path:.*}", instance.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    instance.port = runner.addresses[0][1]
    yield instance
    await runner.cleanup()


async def outcomes(options: RewardOptions, responses: list[str], cache: Path | None = None) -> list[RewardOutcome]:
    scorer = RewardScorer(options, cache=cache)
    try:
        async with asyncio.timeout(60.0):
            answers = await asyncio.gather(*(scorer.outcomes(response, ROW) for response in responses))
        return [answer[0] for answer in answers]
    finally:
        await scorer.close()


def http_options(server: Server, **options: Any) -> RewardOptions:
    return RewardOptions(functions=(f"http:{server.url()}",), **options)


def judge_options(server: Server, **options: Any) -> RewardOptions:
    judge = JudgeOptions(url=server.url(""), model="judge", prompt="{prompt}|{answer}|{response}")
    return RewardOptions(functions=("judge",), judge=judge, **options)


def judge_reply(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}}]}


async def test_a_request_has_the_row_and_its_answer_is_the_reward(server: Server) -> None:
    server.answer = lambda body, number: {"reward": {"a": 1, "b": len(body["completion"])}}
    (outcome,) = await outcomes(http_options(server), ["xyz"])
    assert (outcome.result, outcome.value, outcome.parts) == (Result.OK, 4.0, {"a": 1.0, "b": 3.0})
    assert server.requests == [{"prompt": "6+1=", "completion": "xyz", "answer": "7", "row": {"level": 2}}]
    server.answer = lambda body, number: {"reward": None}
    assert (await outcomes(http_options(server), ["z"]))[0].result is Result.NOT_APPLICABLE


async def test_requests_take_the_proxy_of_the_environment(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server.answer = lambda body, number: {"reward": 0.25}
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HTTP_PROXY", f"127.0.0.1:{server.port}")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.port}")
    options = RewardOptions(functions=("http:http://far.invalid/reward",), retries=0, timeout_s=5.0)
    assert [outcome.value for outcome in await outcomes(options, ["z"])] == [0.25]
    monkeypatch.setenv("no_proxy", "other.example,far.invalid")
    assert (await outcomes(options, ["z"]))[0].is_failure
    assert len(server.requests) == 1
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", f"localhost:{server.port}")
    assert remote.proxy_of("http://far.invalid/reward") == f"http://localhost:{server.port}"
    assert remote.proxy_of("https://far.invalid/reward") is None


async def test_the_last_number_of_a_judge_reply_is_the_reward(server: Server) -> None:
    server.answer = lambda body, number: judge_reply("From 0 to 1 I say 0.75")
    (outcome,) = await outcomes(judge_options(server), ["{answer} xyz"])
    assert outcome == RewardOutcome(Result.OK, 0.75)
    assert server.requests == [
        {
            "model": "judge",
            "messages": [{"role": "user", "content": "6+1=|7|{answer} xyz"}],
            "temperature": 0,
            "max_tokens": 512,
        }
    ]


@pytest.mark.parametrize(
    ("answer", "result", "detail"),
    [
        (
            judge_reply("it is hard to say"),
            Result.INVALID,
            "gave no number by reward.judge.pattern: 'it is hard to say'",
        ),
        (judge_reply("1e999"), Result.INVALID, "returned inf, not a finite number"),
        ({"choices": []}, Result.INVALID, "gave no message"),
        ("<html>", Result.HTTP, "gave no JSON: '<html>'"),
        (404, Result.HTTP, "answered with status 404: not now"),
        (503, Result.HTTP, "answered with status 503"),
        (None, Result.TIMEOUT, "did not answer in 1 s"),
    ],
)
async def test_every_kind_of_answer_gives_an_outcome(server: Server, answer: Any, result: Result, detail: str) -> None:
    server.answer = lambda body, number: answer
    (outcome,) = await outcomes(judge_options(server, timeout_s=1.0), ["x"])
    assert outcome.result is result
    assert detail in outcome.detail
    # Only a transient failure is retried.
    assert len(server.requests) == (2 if answer == 503 else 1)


@pytest.mark.parametrize(("text", "value"), [("7.5 of 10: 0.75", 0.75), ("Score: -1e-2.", -0.01), ("2.5e1", 25.0)])
async def test_the_last_number_of_the_reply_is_the_reward(server: Server, text: str, value: float) -> None:
    server.answer = lambda body, number: judge_reply(text)
    (outcome,) = await outcomes(judge_options(server), ["x"])
    assert (outcome.result, outcome.value) == (Result.OK, value)


async def test_transient_failures_lose_no_reward(server: Server) -> None:
    server.answer = lambda body, number: {1: 429, 2: 500}.get(number % 4, {"reward": len(body["completion"])})
    results = await outcomes(http_options(server, retries=20, concurrency=8), ["x" * n for n in range(1, 101)])
    assert [outcome.value for outcome in results] == list(range(1, 101))
    assert server.max_concurrency <= 8


async def test_an_unreachable_server_is_an_outcome_and_fails_the_check_before_a_run(server: Server) -> None:
    options = RewardOptions(functions=("http:http://127.0.0.1:1/x",), retries=2)
    (outcome,) = await outcomes(options, ["x"])
    assert outcome.result is Result.HTTP
    assert "http://127.0.0.1:1/x cannot be reached: " in outcome.detail
    with pytest.raises(ConfigError, match=r"reward function http: http://127\.0\.0\.1:1/x cannot be reached"):
        await asyncio.to_thread(check_rewards, options, [ROW], print)


async def test_a_second_run_with_the_same_cache_sends_no_request(server: Server, tmp_path: Path) -> None:
    cache = tmp_path / "judge.sqlite"
    server.answer = lambda body, number: judge_reply(str(number / 100))
    responses = [f"response {n % 20}" for n in range(60)]
    first = await outcomes(judge_options(server), responses, cache)
    assert len(server.requests) == 20  # equal requests are made once
    assert [outcome.value for outcome in await outcomes(judge_options(server), responses, cache)] == [
        outcome.value for outcome in first
    ]
    assert len(server.requests) == 20
    other = judge_options(server)
    judge = JudgeOptions(**{**vars(other.judge), "model": "another"})
    await outcomes(RewardOptions(functions=("judge",), judge=judge), responses[:1], cache)
    assert len(server.requests) == 21


async def test_a_corrupt_answer_cache_only_logs_a_warning(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "judge.sqlite"
    cache.write_bytes(b"no database" * 1000)
    assert (await outcomes(http_options(server), ["x"], cache))[0].value == 0.5
    assert "answers of judges are not kept" in caplog.text


async def test_the_key_is_sent_and_appears_nowhere_else(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = http_options(server, key_variable="TEST_OF_JUDGE_KEY")
    with pytest.raises(ConfigError, match=r"'TEST_OF_JUDGE_KEY', which is not set"):
        await asyncio.to_thread(check_rewards, options, [ROW], print)
    monkeypatch.setenv("TEST_OF_JUDGE_KEY", KEY)
    cache = tmp_path / "judge.sqlite"
    await outcomes(options, ["x"], cache)
    assert server.headers == [f"Bearer {KEY}"]
    with sqlite3.connect(cache) as database:
        assert database.execute("SELECT count(*) FROM answers").fetchone() == (1,)
    assert not any(KEY.encode() in path.read_bytes() for path in tmp_path.iterdir())  # noqa: ASYNC240
    assert KEY not in caplog.text
    reward_file = tmp_path / "mine.py"
    reward_file.write_text("import os\ndef reward(response): return float('TEST_OF_JUDGE_KEY' in os.environ)\n")
    both = RewardOptions(functions=(str(reward_file), *options.functions), key_variable="TEST_OF_JUDGE_KEY")
    assert (await outcomes(both, ["x"]))[0].value == 0.0  # of the first function, in a child


# ---- code

PROGRAM = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\n"
TESTS = "assert double(4) == 8"


def scored(response: str, tests: object, sandbox: str = "limits", **options: Any) -> RewardOutcome:
    async def score() -> RewardOutcome:
        scorer = RewardScorer(RewardOptions(functions=("code",), code_sandbox=sandbox, **options))  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(60.0):
                return (await scorer.outcomes(response, json.dumps({"answer": "", "tests": tests}).encode()))[0]
        finally:
            await scorer.close()

    return asyncio.run(score())


@pytest.mark.parametrize(
    ("response", "tests", "value"),
    [
        (PROGRAM, TESTS, 1.0),
        (PROGRAM, "assert double(4) == 9", 0.0),
        ("def double(x): return x + x", TESTS, 1.0),
        ("no program", TESTS, 0.0),
        ("\0", TESTS, 0.0),
        ("print(int(input()) + 1)", [{"input": "1\n", "output": "2"}, {"input": "5", "output": "6\n"}], 1.0),
        ("print(2)", [{"input": "1\n", "output": "2"}, {"input": "5", "output": "6\n"}], 0.0),
        ("while True: pass", TESTS, 0.0),
        ("import os\nos.kill(os.getppid(), 0)\ndef double(x): return 8", TESTS, 1.0),
    ],
)
def test_a_program_is_run_against_the_tests_of_its_row(response: str, tests: object, value: float) -> None:
    outcome = scored(response, tests, timeout_s=2.0 if "while" in response else 20.0)
    assert (outcome.result, outcome.value) == (Result.OK, value), outcome


def test_a_row_without_tests_fails_with_a_message() -> None:
    outcome = scored(PROGRAM, "")
    assert outcome.result is Result.ERROR
    assert "function code needs the column 'tests'" in outcome.detail
    assert scored(PROGRAM, None).result is Result.NOT_APPLICABLE


def test_code_rewards_are_rejected_without_a_working_bubblewrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"there is no bwrap here; install bubblewrap .* reward\.code_sandbox to limits"
    ):
        check_sandbox("bwrap")
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: no permissions' >&2\nexit 1\n")
    program.chmod(0o700)
    with pytest.raises(ConfigError, match=r"does not work here \(bwrap: no permissions\)"):
        check_sandbox("bwrap")
    check_sandbox("limits")


def has_bwrap() -> bool:
    try:
        check_sandbox("bwrap")
    except ConfigError:
        return False
    return True


@pytest.mark.skipif(not has_bwrap(), reason="needs bubblewrap and user namespaces")
@pytest.mark.parametrize(
    "program",
    [
        "open('/etc/passwd')",
        "open({place!r})",
        "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
        "import os; assert os.environ.get('HOME')",
    ],
)
def test_a_program_in_bubblewrap_cannot_access_the_host(tmp_path: Path, held_port: int, program: str) -> None:
    place = tmp_path / "file"
    place.write_text("x")
    assert scored(PROGRAM, TESTS, "bwrap").value == 1.0
    program = program.format(place=str(place), port=held_port)
    if "HOME" not in program:  # no child has that
        assert scored(program, "pass", "limits").value == 1.0
    assert scored(program, "pass", "bwrap").value == 0.0


# ---- flowrt reward check


def test_reward_check_shows_the_outcomes_of_each_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, reward_file = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) + "\n" for n in range(30)))
    reward_file.write_text(
        "import time\n"
        "def reward(response, answer):\n"
        "    if len(response) == 100_000: time.sleep(1e6)\n"
        "    return float(response == str(answer))\n"
        "def fussy(response):\n"
        "    return 1 / len(response.strip()) if response != '\\x1b' else None\n"
    )
    command = ["reward", "check", "--data", str(data), "--limit", "3", "--reward", str(reward_file)]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "outcomes (3 rows)" in text
    assert "a run would refuse this: data file" in text
    assert "has 30 rows, no more than data.eval_prompts=64 that are held out; set it to fewer" in text
    command += ["--data.eval-prompts", "8"]
    more = ["--reward", f"{reward_file}:fussy", "--reward", "exact", "--reward.timeout-s", "1", "--reward.workers", "2"]
    assert main([*command, *more]) == 0
    text = capsys.readouterr().out
    lines = {tuple(line.split()[:2]): line for line in text.splitlines()}
    assert "outcomes (3 rows)" in text
    assert lines["mine", "its"].split()[3:6] == ["1", "1", "1"]
    assert lines["mine", "empty"].split()[2:5] == ["0", "0", "0"]
    assert lines["mine", "100"].endswith("timeout 3")
    assert lines["fussy", "empty"].endswith("error 3")
    assert f"reward function reward ({reward_file}:3): it did not return in 1 s" in text
    assert f"reward function fussy ({reward_file}:6): ZeroDivisionError: division by zero, on the response ''" in text


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("def reward(response): return 1 / 0\n", [], "ZeroDivisionError"),
        ("def reward(response): return None\n", [], "it returned None for the first"),
        ("def reward(response, answer, level): return 1\n", [], "it takes 'level'"),
        ("x = 1\n", [], "has no function 'reward'"),
        ("def reward(response): return 1\n", ["--limit", "0"], "--limit is '0'"),
        ("def reward(response): return 1\n", ["--reward", "maths"], "did you mean 'math'"),
        ("def reward(response): return 1\n", ["--reward", "nothing.py"], "there is no file 'nothing.py'"),
    ],
)
def test_reward_check_rejects_invalid_functions_and_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, flags: list[str], message: str
) -> None:
    data, reward_file = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) + "\n" for n in range(4)))
    reward_file.write_text(text)
    few = ["--data", str(data), "--data.eval-prompts", "0"]
    assert main(["reward", "check", *few, "--reward", str(reward_file), *flags]) == 2
    written = capsys.readouterr()
    error = written.err.strip()
    assert "the same reward" not in written.out  # no call gave one
    assert error.startswith("flowrt: ")
    assert message in error
    assert "\n" not in error


def test_reward_check_shows_the_outcomes_of_a_task_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reward_file = tmp_path / "mine.py"
    text = (Path(__file__).parents[2] / "examples" / "own_task.py").read_text()
    reward_file.write_text(text)
    assert main(["reward", "check", str(reward_file), "--limit", "3"]) == 0
    out = capsys.readouterr().out
    assert "outcomes (3 rows)" in out
    its, empty = [line.split() for line in out.splitlines() if " its answer " in line or " empty " in line]
    assert its[3:6] == ["1", "1", "1"]
    assert empty[2:5] == ["0", "0", "0"]
    reward_file.write_text(text.replace("/ len(answer)", "/ len(response)"))
    assert main(["reward", "check", str(reward_file), "--limit", "3"]) == 2
    captured = capsys.readouterr()
    assert "error 3" in captured.out
    assert "ZeroDivisionError" in captured.err
    assert f"{reward_file}:" in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("nothing.py", "there is no task file"),
        ("arithmetic", "has a reward of its own"),
        ("broken.py", "broken.py:1: SyntaxError"),
    ],
)
def test_reward_check_rejects_invalid_task_files(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("def\n")
    assert main(["reward", "check", recipe]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


def test_reward_check_rejects_missing_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reward", "chek"]) == 2
    assert "takes the word check" in capsys.readouterr().err
    assert main(["reward", "check"]) == 2
    assert "needs --data PATH and --reward FUNCTION" in capsys.readouterr().err


def test_reward_check_help_lists_its_flags() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "flowrt.cli", "reward", "check", "--help"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0
    assert "--reward.timeout-s" in ended.stdout
    assert "--trainer.lr" not in ended.stdout
