"""The gradient of a step does not depend on its division into micro-batches or ranks."""

from pathlib import Path

import pytest
import torch

from tests.integration.helpers import gradient_rank
from tests.integration.helpers.forked_flowrt import run_module
from tests.integration.helpers.gradient_rank import SAMPLES


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("size", [1, 5, 11])
def test_gradient_does_not_depend_on_the_micro_batch_size(size: int, double: bool) -> None:
    expected_gradient = gradient_rank.step_gradient([list(range(SAMPLES))], double)
    micro_batches = [list(range(SAMPLES))[i : i + size] for i in range(0, SAMPLES, size)]
    assert relative_error(gradient_rank.step_gradient(micro_batches, double), expected_gradient) < 1e-6
    assert expected_gradient.norm() > 1e-3


def test_mean_of_micro_batch_means_differs_from_the_gradient() -> None:
    expected_gradient = gradient_rank.step_gradient([list(range(SAMPLES))], double=True)
    halves = [gradient_rank.step_gradient([half], double=True) for half in (list(range(5)), list(range(5, SAMPLES)))]
    assert relative_error((halves[0] + halves[1]) / 2, expected_gradient) > 1e-3


@pytest.mark.parametrize("dtype", ["double", pytest.param("single", marks=pytest.mark.long)])
def test_two_ranks_compute_the_gradient_of_one_rank(tmp_path: Path, dtype: str) -> None:
    out = tmp_path / "gradient.pt"
    ended = run_module(gradient_rank.__name__, str(out), dtype, timeout_s=600.0)
    assert ended.returncode == 0, ended.stdout
    expected_gradient = gradient_rank.step_gradient([list(range(SAMPLES))], dtype == "double")
    assert relative_error(torch.load(out, weights_only=True), expected_gradient) < 1e-6
