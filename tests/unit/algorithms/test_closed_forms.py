"""Every part of an objective against its scalar formula, value and gradient, in float64; errors are detected."""

import dataclasses
import random

import pytest
import torch

from flowrt.algorithms.losses import KlEstimator, Ppo
from flowrt.algorithms.objective import Objective
from tests.proofs.comparisons import (
    ESTIMATORS,
    dice,
    draw_objective,
    objective_error,
    parts,
    worst_estimate,
    worst_loss,
    worst_objective,
    worst_preference,
)
from tests.proofs.formulas import LOSSES, draw, error, loss_error, ppo, tokens_of

CASES = 200
BOUND = 1e-12


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", LOSSES)
def test_policy_loss_equals_its_formula(name: str) -> None:
    assert worst_loss(name, CASES) <= BOUND


@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl_estimate_equals_its_formula(name: KlEstimator) -> None:
    assert worst_estimate(name, CASES) <= BOUND


@pytest.mark.slow
def test_composed_objective_equals_its_formula() -> None:
    """Random compositions of loss, correction, rejection, second moment, KL, entropy and aggregation."""
    assert worst_objective(2 * CASES) <= BOUND


def test_online_dpo_equals_its_formula() -> None:
    assert worst_preference(CASES) <= BOUND


def test_every_part_of_an_objective_is_compared() -> None:
    names = parts()
    assert len([name for name in names if name.startswith("loss ")]) == len(LOSSES)
    assert {"objective", "online_dpo", "credit grpo", "kl unbiased"} <= set(names)


def test_a_loss_with_another_clip_bound_is_detected() -> None:
    rng = random.Random(1)
    wrong = max(
        loss_error(Ppo(clip_low=0.2, clip_high=0.28), lambda sample: ppo(sample, high=0.3), draw(rng)) for _ in "12345"
    )
    assert wrong > 1e-3


def test_a_detached_factor_is_detected_by_its_gradient() -> None:
    """The value is unchanged; only the gradient differs."""
    samples = [sample for sample in draw(random.Random(3)) if sample.policy]
    tokens = tokens_of(samples)
    stopped = (tokens.logprobs_T.detach() * tokens.logprobs_T).sum()
    assert (
        error(stopped, tokens, samples, lambda drawn: sum((p * p for sample in drawn for p in sample.policy), 0j))
        > 1e-3
    )


@pytest.mark.slow
def test_leaving_out_any_part_of_an_objective_is_detected() -> None:
    """A part that is left out of the objective but not of the formula causes an error in some case."""
    rng, default = dice("liveness"), Objective()
    worst_errors = dict.fromkeys(("correction", "rejection", "second_moment", "kl", "entropy", "aggregation"), 0.0)
    for _ in range(60):
        objective, loss = draw_objective(rng)
        passes = [draw(rng), draw(rng)]
        if any(sample.policy for drawn in passes for sample in drawn):
            for part, worst in worst_errors.items():
                other = dataclasses.replace(objective, **{part: getattr(default, part)})
                worst_errors[part] = max(worst, objective_error(other, loss, passes, objective))
    assert min(worst_errors.values()) > 1e-3, worst_errors
