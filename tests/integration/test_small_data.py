"""A file with fewer prompts than the steps would take: one epoch, a smaller last step, a clean end."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROWS, HELD_OUT, PER_STEP = 20, 2, 8


@pytest.mark.long
@pytest.mark.slow
def test_one_epoch_trains_every_prompt_once_and_ends(launch: Callable[..., Any], tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{"question": f"What is {n} plus 1?", "answer": f"One more.\n#### {n + 1}"} for n in range(ROWS)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = launch(
        *("--recipe", "gsm8k", "--data", str(data), "--data.epochs", "1", "--data.eval-prompts", str(HELD_OUT)),
        *("--steps", "100", "--prompts-per-step", str(PER_STEP), "--group-size", "2", "--algorithm.kl.coef", "0"),
        *("--sft.steps", "4", "--rollout.max-new-tokens", "12", "--build.vocab-size", "280"),
    )
    assert run.wait(120.0) == 0, run.output
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["samples"] == 2 * (ROWS - HELD_OUT)
    assert summary["prompts"] == {"trained": ROWS - HELD_OUT}
    assert summary["prompts_lost"] == summary["prompts_trained_twice"] == 0
    with sqlite3.connect(run.run_dir / "ledger.sqlite") as ledger:
        trained = ledger.execute("SELECT prompt FROM events WHERE state = 'trained' ORDER BY prompt").fetchall()
    assert [prompt for (prompt,) in trained] == list(range(ROWS - HELD_OUT))
    groups = [json.loads(line)["groups"] for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert groups == [8, 8, 2]
    # Without a KL coefficient there is no reference worker.
    assert not (run.run_dir / "logs" / "reference.log").exists()
    assert "reference" not in summary["busy_fraction"]
