"""A small simulated run of bench/ablation.py with real processes: no prompt is lost, and overlapping is faster."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
STEPS, SAMPLES = 4, 256
LEAST_STEPS = 3  # in modes without overlap between steps
BOUNDS = {"sync": 0, "streaming": 0, "tail": 1}


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The metrics of one round of three modes."""
    path = tmp_path_factory.mktemp("ablation") / "out.json"
    command = [sys.executable, str(BENCH / "ablation.py"), "--parts", "paper", "--modes", *BOUNDS]
    command += ["--rounds", "1", "--steps", str(STEPS), "--real-s", "0.006", "--json", str(path)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "Traceback" not in completed.stderr, completed.stderr
    assert "never retrieved" not in completed.stderr, completed.stderr
    figures: dict[str, float] = json.loads(path.read_text())["metrics"]
    return figures


@pytest.mark.long
@pytest.mark.parametrize("mode", BOUNDS)
def test_a_simulated_run_loses_no_prompt_and_keeps_the_staleness_bound(metrics: dict[str, float], mode: str) -> None:
    steps = LEAST_STEPS if BOUNDS[mode] == 0 else STEPS
    assert metrics[f"samples_{mode}_paper"] == steps * SAMPLES
    assert metrics[f"prompts_lost_{mode}_paper"] == metrics[f"prompts_trained_twice_{mode}_paper"] == 0
    assert metrics[f"dropped_{mode}_paper"] == 0
    assert metrics[f"staleness_max_{mode}_paper"] <= BOUNDS[mode]


@pytest.mark.long
def test_overlapping_tasks_is_faster_than_barriers_and_asynchrony_faster_still(metrics: dict[str, float]) -> None:
    assert metrics["speedup_sync_paper"] == 1.0
    assert metrics["speedup_streaming_paper"] > 1.4
    assert metrics["speedup_tail_paper"] > metrics["speedup_streaming_paper"]
