"""The gradient of a whole model does not depend on passes, packing, ranks or engine (`tests/proofs`)."""

import pytest
import torch

from flowrt.engines.training.forward import enable_packing
from tests.proofs.invariance import QUICK, WAYS, distances, measure_all, torch_engine
from tests.proofs.presets import NAMES, presets
from tests.proofs.steps import LIMIT, make_model, plain_gradient

BOUND = 1e-11


# All of them take half a minute: `make test` has each third.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if at % 3 else []) for at, name in enumerate(NAMES)]
)
def test_one_rank_computes_the_gradient_of_a_plain_loop(name: str) -> None:
    torch.set_num_threads(1)
    algorithm = presets(LIMIT)[name]
    differences = distances(algorithm, {way: torch_engine(algorithm, way) for way in WAYS})
    assert max(differences.values()) <= BOUND, differences
    assert plain_gradient(algorithm)[0].norm() > 1e-4


def test_the_model_supports_packing() -> None:
    assert enable_packing(make_model())


def test_another_algorithm_has_another_gradient() -> None:
    """Otherwise the comparison would not distinguish algorithms."""
    algorithms = presets(LIMIT)
    differences = distances(algorithms["grpo"], {"padded": torch_engine(algorithms["dr_grpo"], "padded")})
    assert differences["padded"] > 1e-3


@pytest.mark.long
@pytest.mark.slow
def test_two_ranks_of_both_engines_compute_the_gradient_of_a_plain_loop() -> None:
    torch.set_num_threads(1)
    differences = measure_all(QUICK[:3])
    assert all(len(ways) == len(WAYS) + 4 for ways in differences.values())
    assert max(value for ways in differences.values() for value in ways.values()) <= BOUND, differences
