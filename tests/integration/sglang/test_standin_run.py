"""A whole run whose rollout worker starts the stand-in as its server."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .playing import STANDIN, fake_python

__all__ = ["fake_python"]  # a fixture

STEPS = 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_samples_from_its_server_and_updates_its_weights(
    launch: Callable[..., Any], fake_python: Callable[[str], Path], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are updated in flight; the server ends with the run; its log, without its key, is in the run directory.

    With a stop string the server is started with a tokenizer; the stand-in refuses it otherwise, as SGLang does.
    """
    monkeypatch.setenv("STANDIN", "0.5.21,")
    python = fake_python(f'echo started; exec {sys.executable} {STANDIN} "$@"')
    run = launch(
        *("--model", str(checkpoint), "--steps", str(STEPS), "--prompts-per-step", "2", "--group-size", "2"),
        *("--rollout.engine", "sglang", "--rollout.sglang.python", str(python), "--rollout.workers", "1"),
        *(
            "--rollout.weight-update",
            "in_flight",
            "--algorithm.kl.coef",
            "0",
            "--trainer.save",
            "False",
            "--data.eval-prompts",
            "2",
        ),
        *("--rollout.stop", "no such text"),
        *("--trainer.max-initial-mismatch", "0"),  # the stand-in makes log-probabilities up
    )
    assert run.wait(280.0) == 0, run.output + run.log("rollout-0")
    run.assert_gone(10.0)
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (STEPS, STEPS * 4)
    assert summary["prompts_lost"] == summary["prompts_trained_twice"] == 0
    assert summary["staleness_max"] <= 1
    assert "started" in run.log("rollout-0-sglang")
    assert "'api_key': 'REDACTED'" in run.log("rollout-0-sglang")
    assert "SGLang 0.5.21" in run.log("rollout-0")
