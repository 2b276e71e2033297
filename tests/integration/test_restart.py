"""A run that loses a trainer restarts from its last checkpoint, and trains every prompt exactly once."""

import json
import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowrt.controller.storage.ledger_reader import LedgerReader
from flowrt.recipes.run_dir import checkpoint_steps

pytestmark = pytest.mark.slow
ROWS, PER_STEP, EVERY = 72, 3, 4
STEPS = ROWS // PER_STEP


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory: pytest.TempPathFactory, untrained_model: Path) -> list[str]:
    """Arguments of a run over a small file, in which every prompt is to be trained once."""
    data = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"question": f"{n}+1=", "answer": f"One more.\n#### {n + 1}"} for n in range(ROWS)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *(
            "--recipe",
            "gsm8k",
            "--data",
            str(data),
            "--data.epochs",
            "1",
            "--data.eval-prompts",
            "0",
            "--steps",
            "1000",
        ),
        *("--model", str(untrained_model), "--prompts-per-step", str(PER_STEP), "--group-size", "4"),
        *(
            "--max-staleness",
            "2",
            "--checkpoint.every",
            str(EVERY),
            "--algorithm.kl.coef",
            "0",
            "--rollout.workers",
            "1",
        ),
        *("--rollout.max-new-tokens", "48", "--rollout.max-running-requests", "6"),
    ]


def query(run_dir: Path, statement: str) -> list[tuple[Any, ...]]:
    with LedgerReader(run_dir / "ledger.sqlite") as ledger:
        return ledger.query(statement)


def seeded_order() -> list[int]:
    order = list(range(ROWS))
    random.Random("order 0 0").shuffle(order)
    return order


def assert_each_prompt_once(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["prompts"] == {"trained": ROWS}
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (STEPS, 0, 0)
    trained = query(run_dir, "SELECT prompt, step FROM prompts WHERE state = 'trained' ORDER BY step")
    assert sorted(prompt for prompt, _ in trained) == sorted(seeded_order())
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(STEPS))
    # Prompts were trained approximately in the order of the source.
    expected_step = {prompt: at // PER_STEP for at, prompt in enumerate(seeded_order())}
    assert max(abs(step - expected_step[prompt]) for prompt, step in trained) <= 2 * 2 + 1


def wait_for_checkpoint(run: Any) -> None:
    run.wait_for(lambda: checkpoint_steps(run.run_dir), "checkpoint", 150.0)


def test_a_run_resumed_at_staleness_two_trains_each_prompt_once(
    launch: Callable[..., Any], one_epoch: list[str]
) -> None:
    killed = launch(*one_epoch)
    wait_for_checkpoint(killed)
    killed.kill_all()
    unfinished = query(killed.run_dir, "SELECT COUNT(*) FROM prompts WHERE state NOT IN ('trained', 'dropped')")
    saved = max(checkpoint_steps(killed.run_dir))
    resumed = launch(resume=killed.run_dir)
    assert resumed.wait(120.0) == 0, resumed.output
    resumed.assert_gone(10.0)
    assert_each_prompt_once(resumed.run_dir)
    assert unfinished > [(0,)]
    rolled_back = query(resumed.run_dir, "SELECT DISTINCT step FROM events WHERE reason LIKE 'rolled back: %'")
    assert rolled_back == [(saved,)]


@pytest.mark.long
def test_a_killed_trainer_rank_restarts_the_run_from_its_checkpoint(
    launch: Callable[..., Any], one_epoch: list[str]
) -> None:
    run = launch(*one_epoch, "--trainer.ranks", "2")
    wait_for_checkpoint(run)
    run.signal(signal.SIGKILL, rank_of(run, 1))
    assert run.wait(180.0) == 0, run.output
    assert re.search(r"trainer\b[^.]* restart 1 of 3 in 1 s, from step", run.words), run.words
    assert_each_prompt_once(run.run_dir)
    assert json.loads((run.run_dir / "summary.json").read_text())["resumed_from"] >= EVERY
    assert len(query(run.run_dir, "SELECT * FROM run_attempts")) == 2


def rank_of(run: Any, rank: int) -> psutil.Process:
    [trainer] = [process for process in run.find("flowrt.roles.trainer") if process.environ().get("RANK") == str(rank)]
    assert trainer.pid != os.getpid()
    return trainer
