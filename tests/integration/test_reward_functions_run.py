"""Runs of recipe custom with several reward functions, some of whose calls fail: the metrics and the ledger."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROWS = 48
STEPS = 4
REWARD_FUNCTIONS = """
import os, time

def parts(response, answer, prompt, level):
    return {"sevens": response.count(answer) / 8, "short": 0.1 * (len(response) < 4)}

async def sometimes(completion, **row):
    assert row["answer"] == "7" and row["level"] in (0, 1) and row["prompt"].endswith("+1=")
    if completion == row["answer"]:
        return 0.5  # the check before the run
    match sum(map(ord, completion)) % 8:
        case 0: return None
        case 1: raise ValueError("no such thing")
        case 2: os._exit(1)
        case 3: time.sleep(99)
    return 0.5
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def flags(tmp_path: Path, untrained_model: Path) -> list[str]:
    data, reward_file = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    rows = [{"prompt": f"{n}+1=", "answer": "7", "level": n % 2} for n in range(ROWS)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward_file.write_text(REWARD_FUNCTIONS)
    return [
        *("--recipe", "custom", "--data", str(data), "--model", str(untrained_model)),
        *("--prompts-per-step", "4", "--group-size", "4", "--rollout.max-new-tokens", "8", "--algorithm.kl.coef", "0"),
        *("--rollout.workers", "1", "--trainer.lr", "1e-4", "--trainer.warmup-steps", "1", "--data.eval-prompts", "4"),
        *("--checkpoint.every", "0", "--steps", str(STEPS), "--reward.timeout-s", "1", "--reward.workers", "3"),
        *(
            "--reward.max-failures",
            "1",
            "--reward",
            f"{reward_file}:parts",
            "--reward",
            "sum=" + f"{reward_file}:sometimes:0.5",
        ),
        *("--reward", "digits=0.1*format:[0-9]*", "--reward", "regex:[0-9]", "--reward", "length:4:0.1"),
        *("--reward", "exact:2"),
    ]


def lines(launched: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (launched.run_dir / "metrics.jsonl").read_text().splitlines()]


def test_metrics_have_each_function_part_and_failure_kind(launch: Callable[..., Any], flags: list[str]) -> None:
    launched = launch(*flags, "--guard", "reward_failures/timeout above 1")
    assert launched.wait(180.0) == 0, launched.output
    metrics = lines(launched)
    assert len(metrics) == STEPS
    for line in metrics:
        weighted = (
            line["reward/parts"] + 0.1 * line["reward/digits"] + line["reward/regex"] + 0.1 * line["reward/length"]
        ) + 2 * line["reward/exact"]
        assert line["reward/parts"] == pytest.approx(line["reward/parts/sevens"] + line["reward/parts/short"], abs=1e-5)
        assert -1 <= line["reward/length"] <= 0
        assert line["applies/parts"] == 1
        if line["applies/sum"] == 1:  # else the other weights are scaled up where it does not apply
            assert line["reward"] == pytest.approx(weighted + 0.5 * line["reward/sum"], abs=1e-4)
    for kind in ("timeout", "error", "died"):
        assert sum(line[f"reward_failures/{kind}"] for line in metrics) > 0, kind
    assert all(line["reward_failures/memory"] == line["reward_failures/invalid"] == 0 for line in metrics)
    assert min(line["applies/sum"] for line in metrics) < 1
    assert "ValueError: no such thing, on the response" in launched.log("reward")
    launched.assert_gone(10.0)


@pytest.mark.parametrize(
    "policy",
    ["regenerate", *(pytest.param(policy, marks=pytest.mark.long) for policy in ("drop_group", "train_remaining"))],
)
def test_a_dropped_sample_counts_as_lost(launch: Callable[..., Any], flags: list[str], policy: str) -> None:
    launched = launch(*flags, "--reward.on-failure", "drop", "--on-lost-sample", policy, "--steps", "2")
    assert launched.wait(180.0) == 0, launched.output
    metrics = lines(launched)
    assert len(metrics) == 2
    assert all(line[f"reward_failures/{kind}"] == 0 for line in metrics for kind in ("timeout", "error", "died"))
    summary = json.loads((launched.run_dir / "summary.json").read_text())
    assert {"reward failed: error", "reward failed: died"} & summary["dropped"].keys(), summary
    assert summary["prompts_trained_twice"] == 0
    launched.assert_gone(10.0)


GROUPED = """
def group(group, answer):
    if len(group) == 4 and sum(len(one.response) for one in group) % 3 == 0:
        raise ValueError("no such group")
    return [0.5] * len(group)

def single(response, answer):
    if len(response) == 7:
        raise ValueError("no such sample")
    return len(response) / 8
"""


@pytest.mark.parametrize("policy", ["regenerate", pytest.param("train_remaining", marks=pytest.mark.long)])
def test_a_failure_drops_all_samples_of_a_group_that_is_scored_as_a_whole(
    launch: Callable[..., Any], flags: list[str], tmp_path: Path, policy: str
) -> None:
    (tmp_path / "mine.py").write_text(GROUPED)
    at = flags.index("--reward")
    functions = [f"{tmp_path}/mine.py:group", f"{tmp_path}/mine.py:single"]
    own = [*flags[:at], *(word for function in functions for word in ("--reward", function))]
    launched = launch(*own, "--reward.on-failure", "drop", "--on-lost-sample", policy, "--steps", "2")
    assert launched.wait(180.0) == 0, launched.output
    for line in lines(launched):
        assert line["reward_failures/error"] == 0
        assert line["samples"] == 16, "whole groups"
        assert line["reward/group"] == 0.5
    summary = json.loads((launched.run_dir / "summary.json").read_text())
    assert summary["dropped"]["reward failed: error"] >= 4
    assert summary["prompts_trained_twice"] == 0
    assert "ValueError: no such group" in launched.log("reward")
    launched.assert_gone(10.0)


SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Authorization"] == "Bearer a-secret-key"
        with open(sys.argv[1], "a") as file:
            file.write(self.path + chr(10))
        is_judge = self.path == "/v1/chat/completions"
        text = body["messages"][0]["content"] if is_judge else body["completion"]
        value = len(text) / 100
        answer = {"choices": [{"message": {"content": f"It is {value}"}}]} if is_judge else {"reward": value}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_all_kinds_of_reward_functions_work_in_one_run(
    launch: Callable[..., Any], flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("math_verify")
    monkeypatch.setenv("TEST_OF_JUDGE_KEY", "a-secret-key")
    data, request_log = tmp_path / "rows.jsonl", tmp_path / "asked"
    rows = [{"prompt": f"{n}+1=", "answer": "7", "level": n % 2, "tests": "pass"} for n in range(ROWS)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-c", SERVER, str(request_log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            index_of_sum = next(index for index, word in enumerate(flags) if word.startswith("sum="))
            launched = launch(
                *(
                    *flags[: index_of_sum - 1],
                    *flags[index_of_sum + 1 :],
                    "--reward",
                    "math",
                    "--reward",
                    "code:0.1",
                    "--reward.code-sandbox",
                    "limits",
                ),
                *("--reward", "judge:0.1", "--reward.judge.url", url, "--reward.judge.model", "m"),
                *("--reward.judge.prompt", "{response}", "--reward", f"0.1*http:{url}/score"),
                *("--reward.key-variable", "TEST_OF_JUDGE_KEY", "--reward.timeout-s", "20", "--steps", "3"),
                *("--reward.on-failure", "zero", "--reward.workers", "2"),
            )
            assert launched.wait(240.0) == 0, launched.output
        finally:
            server.kill()
    for line in lines(launched):
        assert {f"reward/{name}" for name in ("math", "code", "judge", "http", "parts", "exact")} <= line.keys()
        assert line["reward/judge"] == pytest.approx(line["reward/http"], abs=1e-5)
        assert line["reward_failures/http"] == 0
    paths = request_log.read_text().split()
    assert {"/v1/chat/completions", "/score"} == set(paths)
    assert (launched.run_dir / "judge.sqlite").is_file()
    texts = [path.read_bytes() for path in launched.run_dir.rglob("*") if path.is_file()]
    assert not any(b"a-secret-key" in text for text in texts)
    launched.assert_gone(10.0)
