"""The gradient of a step does not depend on how it was cut: micro-batches or ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.helpers import gradient_rank
from tests.integration.helpers.gradient_rank import SAMPLES


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("size", [1, 5, 11])
def test_one_or_many_micro_batches(size: int, double: bool) -> None:
    whole = gradient_rank.step_gradient([list(range(SAMPLES))], double)
    cuts = [list(range(SAMPLES))[i : i + size] for i in range(0, SAMPLES, size)]
    assert relative(gradient_rank.step_gradient(cuts, double), whole) < 1e-6
    assert whole.norm() > 1e-3


def test_a_mean_of_micro_batch_means_would_be_caught() -> None:
    whole = gradient_rank.step_gradient([list(range(SAMPLES))], double=True)
    halves = [gradient_rank.step_gradient([cut], double=True) for cut in (list(range(5)), list(range(5, SAMPLES)))]
    assert relative((halves[0] + halves[1]) / 2, whole) > 1e-3


@pytest.mark.parametrize("dtype", ["double", "single"])
def test_one_or_two_ranks(tmp_path: Path, dtype: str) -> None:
    out = tmp_path / "gradient.pt"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        gradient_rank.__file__,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    subprocess.run(
        [*command, str(out), dtype],
        check=True,
        timeout=120,
        env=environment,
        capture_output=True,
    )
    whole = gradient_rank.step_gradient([list(range(SAMPLES))], dtype == "double")
    assert relative(torch.load(out, weights_only=True), whole) < 1e-6
