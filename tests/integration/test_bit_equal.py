"""At staleness 0 a deterministic run equals the synchronous loop bit for bit, with any number of rollout workers."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.helpers import sync_loop

STEPS = 20
SETTINGS = [
    *("--steps", str(STEPS), "--max-staleness", "0", "--deterministic", "True"),
    *("--prompts-per-step", "4", "--group-size", "4", "--trainer.micro-batch-tokens", "150"),
    *("--data.eval-prompts", "8"),
]


def weights_hash(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def run_hash(run_dir: Path) -> str:
    model = AutoModelForCausalLM.from_pretrained(run_dir / "final", dtype=torch.float32)
    return weights_hash({name: parameter.detach() for name, parameter in model.named_parameters()})


def start_run(run_dir: Path, model: Path, workers: int, algorithm: str) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "flowrt.cli", "run", "--run-dir", str(run_dir)),
            *SETTINGS,
            *("--model", str(model), "--rollout.workers", str(workers), "--algorithm", algorithm),
        ],
        check=True,
        timeout=150,
        capture_output=True,
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["reinforce", "decoupled"])  # one update per step, and four
def test_one_and_two_rollout_workers_equal_the_synchronous_loop(
    tmp_path: Path, sft_model: Path, algorithm: str
) -> None:
    runs = {workers: tmp_path / f"run{workers}" for workers in (1, 2)}
    for workers, run_dir in runs.items():
        start_run(run_dir, sft_model, workers, algorithm)
    weights = tmp_path / "weights.pt"
    subprocess.run(
        [sys.executable, sync_loop.__file__, str(runs[1]), str(weights)],
        check=True,
        timeout=150,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )
    expected = torch.load(weights, weights_only=True)
    before = AutoModelForCausalLM.from_pretrained(sft_model, dtype=torch.float32)
    untrained = weights_hash({name: parameter.detach() for name, parameter in before.named_parameters()})
    hashes = {workers: run_hash(run_dir) for workers, run_dir in runs.items()}
    assert hashes == dict.fromkeys(runs, weights_hash(expected))
    assert weights_hash(expected) != untrained
