"""Every preset, as a run builds it, against the formula of its paper, and every metric against its definition."""

import dataclasses

import pytest
import torch

from flowrt.algorithms.algorithm import StepTokens, Tokens
from flowrt.algorithms.losses import Ppo, Sat
from flowrt.algorithms.objective import Correction, Objective
from flowrt.recipes.algorithms import PRESETS
from tests.proofs.comparisons import dice, draw_objective
from tests.proofs.formulas import draw
from tests.proofs.metrics import differing, wrong_metrics
from tests.proofs.papers import LIMIT, PAPERS, draw_step, gradient, wanted_gradient, worst_paper
from tests.proofs.presets import presets

BOUND = 1e-12


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_every_preset_has_a_formula() -> None:
    assert PAPERS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PAPERS)
def test_a_preset_has_the_gradient_of_its_paper(name: str) -> None:
    assert worst_paper(name, 30) <= BOUND


@pytest.mark.parametrize(("preset", "paper"), [("grpo", "sapo"), ("dapo", "m2po"), ("sat", "sapo"), ("opo", "max_rl")])
def test_the_formula_of_another_paper_is_detected(preset: str, paper: str) -> None:
    rng, algorithm, worst = dice("another"), presets(LIMIT)[preset], 0.0
    for _ in range(10):
        step = draw_step(rng, algorithm.plan.anchor)
        pairs = zip(gradient(algorithm, step), wanted_gradient(paper, step), strict=True)
        worst = max(worst, *(abs(a - b) for a, b in pairs))
    assert worst > 1e-3


@pytest.mark.slow
def test_metrics_equal_their_definitions_at_every_setting() -> None:
    """Of every loss, and of every level and mode of the correction, with rejection, masks, KL and entropy."""
    assert wrong_metrics(800) == {}


@pytest.mark.parametrize("level", ["off", "sequence", "geometric"])
def test_truncated_weights_are_those_of_the_level(level: str) -> None:
    """At another level than the token's, a token's own ratio says nothing about its weight."""
    rng = dice("level")
    for _ in range(30):
        objective, loss = draw_objective(rng)
        objective = dataclasses.replace(objective, correction=Correction(level, high=2.0))  # type: ignore[arg-type]
        passes = [draw(rng), draw(rng)]
        assert "importance_truncated" not in differing(objective, loss, passes)


def pass_of(policy: list[float], rollout: list[float], advantage: float) -> Tokens:
    """One sample of these tokens, whose anchor is the rollout policy."""
    rollout_T = torch.tensor(rollout, dtype=torch.float64)
    return Tokens(
        logprobs_T=torch.tensor(policy, dtype=torch.float64, requires_grad=True),
        anchor_T=rollout_T,
        rollout_T=rollout_T,
        sample_T=torch.zeros(len(policy), dtype=torch.int64),
        advantages_N=torch.tensor([advantage], dtype=torch.float64),
        weights_N=torch.ones(1),
        group_N=torch.zeros(1, dtype=torch.int64),
        valid_T=torch.ones(len(policy), dtype=torch.float64),
    )


def slopes(objective: Objective, tokens: Tokens) -> list[float]:
    step = StepTokens(tokens.logprobs_T.detach(), tokens.anchor_T, tokens.rollout_T, tokens.advantages_T)
    tokens = dataclasses.replace(tokens, step=objective.measure(step))
    loss = torch.stack([term.loss_sum for term in objective.terms(tokens)]).sum()
    return list(torch.autograd.grad(loss, tokens.logprobs_T)[0].tolist())


def test_the_clip_range_shrinks_for_the_stalest_tokens_only() -> None:
    policy = [-1.0] * 10
    rollout = [-1.0 - drift for drift in (0.01, 0.02, 0.03, 0.03, 0.04, 0.04, 0.05, 0.05, 0.06, 0.17)]
    sat = Objective(policy=Sat(), correction=Correction("off"))
    plain = dataclasses.replace(sat, policy=Ppo())
    tokens = pass_of(policy, rollout, 1.0)
    assert all(slope != 0 for slope in slopes(plain, tokens))  # a ratio of exp(0.17) is within 1.2
    assert [slope != 0 for slope in slopes(sat, tokens)] == [True] * 9 + [False]
    assert slopes(dataclasses.replace(sat, policy=Sat(quantile=1.0)), tokens) == slopes(plain, tokens)
    fresh = pass_of(policy, policy, 1.0)
    assert slopes(sat, fresh) == slopes(plain, fresh)


def test_a_sample_beyond_the_trust_region_counts_and_has_no_gradient() -> None:
    flash = presets(LIMIT)["flash_reinforce"]
    assert isinstance(flash, Objective)
    near, far = pass_of([-1.0, -2.0], [-1.01, -2.0], -1.0), pass_of([-1.0, -2.0], [-1.5, -2.0], -1.0)
    assert slopes(flash, near)[0] == pytest.approx(torch.tensor(0.01).exp().item() / 2)
    assert slopes(flash, far) == [0.0, 0.0]
    (term,) = flash.terms(far)
    assert term.metrics["rejected"] == 2
    assert term.per == "sample"
