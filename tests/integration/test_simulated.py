"""A small simulated run of bench/ablation.py with real processes: no prompt is lost, and overlapping is faster."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
STEPS, SAMPLES = 4, 256
LEAST_STEPS = 3  # in modes without overlap between steps
BOUNDS = {"sync": 0, "streaming": 0, "tail": 1}


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The metrics of one round of three modes."""
    path = tmp_path_factory.mktemp("ablation") / "out.json"
    command = [sys.executable, str(BENCH / "ablation.py"), "--workloads", "paper", "--modes", *BOUNDS]
    command += ["--rounds", "1", "--steps", str(STEPS), "--real-s", "0.006", "--json", str(path)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "Traceback" not in completed.stderr, completed.stderr
    assert "never retrieved" not in completed.stderr, completed.stderr
    found: dict[str, float] = json.loads(path.read_text())["metrics"]
    return found


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


@pytest.mark.long
def test_no_mode_is_faster_than_its_theoretical_step_time(metrics: dict[str, float]) -> None:
    for mode in BOUNDS:
        assert metrics[f"step_s_{mode}_paper"] > 0.97 * metrics[f"theory_step_s_{mode}_paper"]


@pytest.mark.long
def test_busy_and_lost_fractions_add_up_to_one(metrics: dict[str, float]) -> None:
    for mode in BOUNDS:
        for role in ("rollout", "reference", "reward", "trainer"):
            lost = [metrics[f"lost_{loss}_{role}_{mode}_paper"] for loss in ("samples", "weights", "gate", "update")]
            assert min(lost) > -0.02
            assert metrics[f"busy_{role}_{mode}_paper"] + sum(lost) == pytest.approx(1.0)


def test_idle_time_is_attributed_to_its_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from end_to_end.simulated.bubble_attribution import _both, _gaps, _of_rollout

    assert _gaps([(1.0, 2.0), (1.5, 3.0)], 0.0, 4.0) == [(0.0, 1.0), (3.0, 4.0)]
    assert _both([(0.0, 2.0), (3.0, 5.0)], [(1.0, 4.0)]) == [(1.0, 2.0), (3.0, 4.0)]
    spans: list[tuple[str, float, float]] = [("generate", 0.0, 1.0), ("swap", 4.0, 5.0), ("generate", 5.0, 6.0)]
    # The optimiser step ended at 3: until then the gate was closed, after it weights were in transfer.
    idle: Any = [(1.0, 4.0), (6.0, 6.001), (7.0, 9.0)]
    gate, weights = _of_rollout(spans, idle, steps=[3.0])
    assert gate == [(1.0, 3.0), (7.0, 9.0)]
    assert weights == [(3.0, 4.0)]
