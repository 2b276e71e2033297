"""GRPO with a real SGLang server on a CPU, which is killed on the way: the whole run, and what it leaves behind."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import NOT_HERE, PYTHON, START_S

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(4 * START_S),
    pytest.mark.skipif(not PYTHON.exists(), reason=NOT_HERE),
]
STEPS, KILLED_AT = 34, 4
ROUNDING = 1e-8


SERVED = [
    *("--rollout.engine", "sglang", "--rollout.sglang.python", str(PYTHON), "--rollout.sglang.device", "cpu"),
    *("--rollout.sglang.dtype", "float32", "--rollout.sglang.arguments=--max-total-tokens 8192"),
    *("--rollout.sglang.start-s", str(START_S), "--controller.no-progress-timeout-s", str(START_S + 100)),
    *("--rollout.workers", "1", "--algorithm.kl.coef", "0", "--seed", "0", "--trainer.save", "False"),
]


@pytest.fixture(scope="module")
def run(launch: Callable[..., Any]) -> Any:
    """The default job, shorter, with its sequences made by SGLang and weights changed while it makes them.

    After some steps the server is killed, with all the sequences that it has.
    """
    launched = launch(
        *SERVED, "--steps", str(STEPS), "--data.eval-prompts", "64", "--rollout.weight-update", "in_flight"
    )
    metrics = launched.run_dir / "metrics.jsonl"
    launched.wait_for(lambda: metrics.is_file() and len(_lines(metrics)) >= KILLED_AT, "some steps", START_S)
    (server,) = launched.find("sglang.launch_server")
    os.killpg(server.pid, signal.SIGKILL)
    assert launched.wait(2 * START_S) == 0, launched.output + launched.log("rollout-0")
    return launched


def _lines(metrics: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.fixture(scope="module")
def summary(run: Any) -> dict[str, Any]:
    return dict(json.loads((run.run_dir / "summary.json").read_text()))


def test_run_learns(summary: dict[str, Any]) -> None:
    assert summary["reward_first"] <= 0.4
    assert summary["reward_last"] >= summary["reward_first"] + 0.25
    assert summary["eval_last"] >= summary["eval_first"] + 0.25


def test_killed_server_restarted_with_its_weights(run: Any) -> None:
    assert "the SGLang server failed" in run.log("rollout-0")
    found = re.findall(r"the SGLang server is back, with version (\d+)", run.log("rollout-0"))
    assert len(found) == 1
    assert int(found[0]) >= KILLED_AT - 1


def test_nothing_is_lost_and_the_bound_holds(summary: dict[str, Any]) -> None:
    assert summary["prompts_lost"] == summary["prompts_trained_twice"] == 0
    assert summary["staleness_max"] <= summary["staleness_bound"] == 1


def test_rollout_logprobs_equal_the_trainers(run: Any, launch: Callable[..., Any]) -> None:
    """What is left between the two is the rounding of float32, whichever version it is.

    With staleness the policy's own steps would be in the difference, so this is seen at bound 0.
    """
    first = _lines(run.run_dir / "metrics.jsonl")[0]
    assert first["mismatch_kl_k3"] < ROUNDING  # all of version 0
    warm = ("--rollout.temperature", "0.7")  # a trainer that forgot to divide by it would be far off
    launched = launch(*SERVED, "--steps", "5", "--max-staleness", "0", "--data.eval-prompts", "0", *warm)
    assert launched.wait(2 * START_S) == 0, launched.output + launched.log("rollout-0")
    lines = _lines(launched.run_dir / "metrics.jsonl")
    assert len(lines) == 5
    assert all(line["mismatch_kl_k3"] < ROUNDING for line in lines), [line["mismatch_kl_k3"] for line in lines]


def test_server_ends_with_the_run(run: Any) -> None:
    run.assert_gone(10.0)


def test_the_servers_log_is_in_the_run_directory(run: Any) -> None:
    assert "server_args" in run.log("rollout-0-sglang")
    assert "SGLang 0.5.21 on cpu" in run.log("rollout-0")
    assert " ERROR " not in run.log("rollout-0")
