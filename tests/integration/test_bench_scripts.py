"""Every benchmark script runs to its end with ``--quick`` and writes its metrics."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gemma.conftest import MODEL as GEMMA
from tests.integration.sglang.conftest import NOT_HERE, PYTHON

BENCH = Path(__file__).parents[2] / "bench"
TRL_PYTHON = os.environ.get("TRL_PYTHON", "")
TIMEOUT_S = 900
SELF_CONTAINED = (
    "ablation",
    "architectures",
    "core_events",
    "curve",
    "decoding",
    "device_paths",
    "durable",
    "estimate",
    "faults",
    "main_job",
    "metadata",
    "objectives",
    "passes",
    "seeing",
    "sizes",
    "tasks",
    "tensors",
    "weights",
    "wheel",
)
"""Scripts without further requirements; comparisons with TransferQueue are skipped."""
WITH_REQUIREMENTS = ("compare_trl", "gemma", "gpu", "gsm8k", "sglang_updates")


def metrics_of(name: str, folder: Path, *arguments: str) -> dict[str, float]:
    """The metrics that ``bench/NAME.py --quick`` wrote."""
    path = folder / "metrics.json"
    command = [sys.executable, str(BENCH / f"{name}.py"), "--quick", "--json", str(path), *arguments]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder)
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-4000:]
    written: dict[str, dict[str, float]] = json.loads(path.read_text())
    assert written["machine"]["cores"] == os.cpu_count()
    return written["metrics"]


def test_every_script_is_listed_here() -> None:
    assert sorted(path.stem for path in BENCH.glob("*.py")) == sorted((*SELF_CONTAINED, *WITH_REQUIREMENTS))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices here")
def test_gpu_script_without_a_gpu_exits_with_a_message(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "gpu.py"), "--json", str(tmp_path / "metrics.json")]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=tmp_path)
    assert completed.returncode == 2, completed.stderr
    assert completed.stdout.startswith("there is no GPU to measure: ")
    assert len(completed.stdout.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("part", ["weights", "training", "overlap", "job"])
def test_part_of_the_gpu_script_runs_on_a_cpu(part: str, tmp_path: Path) -> None:
    metrics = metrics_of("gpu", tmp_path, "--device", "cpu", "--parts", part)
    assert metrics[f"{part}_exit_code"] == 0
    assert part == "weights" or len(metrics) > 2


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("name", SELF_CONTAINED)
def test_script_writes_finite_metrics(name: str, tmp_path: Path) -> None:
    metrics = metrics_of(name, tmp_path)
    assert metrics
    assert [key for key, value in metrics.items() if not math.isfinite(value)] == []


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_gsm8k_script_trains_prompts(tmp_path: Path) -> None:
    pairs = [(first, second) for first in range(10) for second in range(10)]
    rows = [{"question": f"What is {a} plus {b}?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"} for a, b in pairs]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert metrics_of("gsm8k", tmp_path, "--data", str(data))["prompts_trained"] > 0


@pytest.mark.gemma
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.skipif(not GEMMA.exists(), reason="no pretrained model; scripts/install_gemma writes it")
def test_pretrained_model_script_reports_its_curve(tmp_path: Path) -> None:
    assert metrics_of("gemma", tmp_path)["reward_to_5"] >= 0


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.skipif(not TRL_PYTHON, reason="TRL_PYTHON names no Python with TRL")
def test_trl_comparison_reports_a_ratio(tmp_path: Path) -> None:
    assert metrics_of("compare_trl", tmp_path, "--baseline-python", TRL_PYTHON)["ratio"] > 0


@pytest.mark.sglang
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.skipif(not PYTHON.exists(), reason=NOT_HERE)
def test_sglang_update_script_reports_the_weight_size(tmp_path: Path) -> None:
    assert metrics_of("sglang_updates", tmp_path, "--sglang-python", str(PYTHON))["weight_mb"] > 0
