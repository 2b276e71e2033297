import math

import pytest
import torch
from torch import Tensor

from flowrt.algorithms import (
    ClipStatistics,
    GrpoLoss,
    cispo_loss_T,
    constant_length_weights_T,
    grpo_token_loss_sum,
    gspo_loss_T,
    policy_loss_T,
    sequence_mean_weights_T,
    token_loss_sum,
    token_mean_weights_T,
    truncated_importance,
)


def clipped(ratio: float, advantage: float, dual_clip: float | None = None) -> tuple[float, float, ClipStatistics]:
    """Loss and d loss / d logprob of one token with clip range [0.8, 1.28]."""
    logprobs = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0], dtype=torch.float64)
    loss_T, statistics = policy_loss_T(
        logprobs,
        old,
        torch.tensor([advantage], dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=dual_clip,
    )
    loss_T.sum().backward()
    assert logprobs.grad is not None
    return loss_T.item(), logprobs.grad.item(), statistics


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "low", "high"),
    [
        (1.0, 2.0, -2.0, -2.0, 0, 0),
        (1.27, 2.0, -2.54, -2.54, 0, 0),  # beyond 1 + clip_low, still inside 1 + clip_high
        (1.29, 2.0, -2.56, 0.0, 0, 1),
        (0.5, 2.0, -1.0, -1.0, 0, 0),  # A > 0 is never clipped from below
        (0.81, -2.0, 1.62, 1.62, 0, 0),
        (0.79, -2.0, 1.6, 0.0, 1, 0),
        (5.0, -2.0, 10.0, 10.0, 0, 0),  # A < 0 is never clipped from above
        (5.0, 0.0, 0.0, 0.0, 0, 0),
        (0.1, 0.0, 0.0, 0.0, 0, 0),
    ],
)
def test_clip_edges(ratio: float, advantage: float, loss: float, slope: float, low: int, high: int) -> None:
    got_loss, got_slope, statistics = clipped(ratio, advantage)
    assert got_loss == pytest.approx(loss, abs=1e-12)
    assert got_slope == pytest.approx(slope, abs=1e-12)
    assert (statistics.clipped_low_sum.item(), statistics.clipped_high_sum.item()) == (low, high)
    assert statistics.ratio_sum.item() == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "dual"),
    [
        (2.9, -2.0, 5.8, 5.8, 0),
        (3.1, -2.0, 6.0, 0.0, 1),
        (0.5, -2.0, 1.6, 0.0, 0),  # the lower clip still applies
        (3.1, 2.0, -2.56, 0.0, 0),
    ],
)
def test_dual_clip_bounds_negative_advantages(
    ratio: float, advantage: float, loss: float, slope: float, dual: int
) -> None:
    got_loss, got_slope, statistics = clipped(ratio, advantage, dual_clip=3.0)
    assert got_loss == pytest.approx(loss, abs=1e-12)
    assert got_slope == pytest.approx(slope, abs=1e-12)
    assert statistics.clipped_dual_sum.item() == dual


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    ratios = torch.tensor([0.01, 1.0, 2.0, 9.0], dtype=torch.float64)
    old = torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64)
    logprobs = (old + ratios.log()).requires_grad_()
    loss_T, statistics = cispo_loss_T(
        logprobs, old, torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=torch.float64), clip_high=3.0
    )
    loss_T.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.01, -1.0, -2.0, 4.0])
    assert statistics.clipped_high_sum == 1
    assert statistics.clipped_low_sum == 0


def test_gspo_matches_a_loop_over_sequences() -> None:
    generator = torch.Generator().manual_seed(1)
    sample = torch.tensor([0, 0, 0, 1, 2, 2])
    old = -torch.rand(6, generator=generator, dtype=torch.float64)
    shift = torch.tensor([0.02, -0.01, 0.03, -0.3, 0.2, 0.1], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    logprobs = (old + shift).requires_grad_()
    loss_T, statistics = gspo_loss_T(logprobs, old, advantages, sample, clip_low=0.05, clip_high=0.05)
    (loss_T * sequence_mean_weights_T(sample, 3)).sum().backward()

    naive = (old + shift).requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for index in range(3):
        mine = sample == index
        ratio = ((naive - old)[mine].sum() / int(mine.sum())).exp()
        bounded = ratio.clamp(0.95, 1.05)
        total = total - torch.minimum(ratio * advantages[index], bounded * advantages[index])
    total.backward()
    torch.testing.assert_close(logprobs.grad, naive.grad)
    assert logprobs.grad is not None
    # Mean log ratios 0.013, -0.3 and 0.15: the last two are clipped, with all their tokens.
    assert logprobs.grad[3:].tolist() == [0.0, 0.0, 0.0]
    assert logprobs.grad[0].item() == pytest.approx(-math.exp(0.04 / 3) / 3)
    assert statistics.clipped_low_sum.item() == 1
    assert statistics.clipped_high_sum.item() == 2


def test_aggregation_weights_give_the_means_of_the_literature() -> None:
    sample = torch.tensor([0, 2, 2, 2, 0, 3])  # sample 1 has no tokens
    loss = torch.tensor([1.0, 2.0, 4.0, 9.0, 5.0, 7.0])
    assert (loss * token_mean_weights_T(sample)).sum() / 6 == pytest.approx(28 / 6)
    assert (loss * sequence_mean_weights_T(sample, 4)).sum() / 4 == pytest.approx((3 + 0 + 5 + 7) / 4)
    assert (loss * constant_length_weights_T(sample, 10)).sum() / 4 == pytest.approx(28 / 40)


def test_a_group_without_variance_gives_no_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -0.1, -30.0, -2.0], requires_grad=True)
    old = torch.tensor([-30.0, -0.1, -1.0, -2.0])
    result = grpo_token_loss_sum(
        logprobs, old, torch.zeros(2), torch.tensor([0, 0, 1, 1]), loss=GrpoLoss(kl_coef=0.0, dual_clip=3.0)
    )
    result.loss_sum.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0] * 4
    assert result.loss_sum.item() == 0.0


def naive_grpo(logprobs: Tensor, old: Tensor, weights: Tensor, advantages: list[float], ref: Tensor) -> float:
    total = 0.0
    for i in range(len(advantages)):
        ratio = math.exp(logprobs[i].item() - old[i].item())
        bounded = min(max(ratio, 0.8), 1.28)
        policy = -min(ratio * advantages[i], bounded * advantages[i])
        delta = ref[i].item() - logprobs[i].item()
        total += weights[i].item() * policy + 0.1 * (math.exp(delta) - delta - 1)
    return total


def test_grpo_sum_matches_a_naive_loop() -> None:
    generator = torch.Generator().manual_seed(2)
    logprobs, old, rollout, reference = (-2 * torch.rand(4, 12, generator=generator, dtype=torch.float64)).unbind()
    sample = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 0, 1])
    advantages = torch.tensor([1.5, -0.5, 0.25], dtype=torch.float64)
    weights = truncated_importance(old, rollout, cap=2.0)
    result = grpo_token_loss_sum(
        logprobs.clone().requires_grad_(),
        old,
        advantages,
        sample,
        loss=GrpoLoss(kl_coef=0.1),
        rollout_weights_T=weights,
        reference_T=reference,
        entropy_T=torch.full((12,), 0.5),
    )
    expected = naive_grpo(logprobs, old, weights, [advantages[i].item() for i in sample.tolist()], reference)
    assert result.loss_sum.item() == pytest.approx(expected, rel=1e-12)
    assert result.tokens == 12
    sums = result.metric_sums()
    assert sums["kl_sum"].item() == pytest.approx(
        sum(math.exp(d) - d - 1 for d in (reference - logprobs).tolist()), rel=1e-12
    )
    assert sums["ratio_sum"].item() == pytest.approx(sum((logprobs - old).exp().tolist()), rel=1e-12)
    assert sums["entropy_sum"].item() == 6.0
    assert not any(value.requires_grad for value in sums.values())


def test_gradient_flows_through_the_policy_alone() -> None:
    inputs = [torch.tensor([-1.0, -1.5], requires_grad=True) for _ in range(5)]
    logprobs, old, weights, reference, aggregation = inputs
    advantages = torch.tensor([1.0], requires_grad=True)
    result = grpo_token_loss_sum(
        logprobs,
        old,
        advantages,
        torch.tensor([0, 0]),
        loss=GrpoLoss(),
        rollout_weights_T=weights,
        reference_T=reference,
        aggregation_T=aggregation,
    )
    result.loss_sum.backward()
    assert logprobs.grad is not None
    for tensor in (old, weights, reference, aggregation, advantages):
        assert tensor.grad is None


def test_rollout_weights_touch_the_policy_term_only() -> None:
    logprobs, reference = torch.tensor([-1.0]), torch.tensor([-2.0])
    result = grpo_token_loss_sum(
        logprobs,
        logprobs,
        torch.ones(1),
        torch.zeros(1, dtype=torch.long),
        loss=GrpoLoss(kl_coef=1.0),
        rollout_weights_T=torch.zeros(1),
        reference_T=reference,
    )
    assert result.loss_sum.item() == pytest.approx(math.exp(-1))  # exp(-1) + 1 - 1


def test_a_reference_without_coefficient_is_measured_not_trained() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    result = grpo_token_loss_sum(
        logprobs,
        logprobs.detach(),
        torch.zeros(1),
        torch.zeros(1, dtype=torch.long),
        loss=GrpoLoss(kl_coef=0.0),
        reference_T=torch.tensor([-2.0]),
    )
    result.loss_sum.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0
    assert result.kl_sum is not None
    assert result.kl_sum.item() == pytest.approx(math.exp(-1))


def test_a_broken_reference_that_is_only_measured_spoils_nothing() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    result = grpo_token_loss_sum(
        logprobs,
        logprobs.detach(),
        torch.ones(1),
        torch.zeros(1, dtype=torch.long),
        loss=GrpoLoss(kl_coef=0.0),
        reference_T=torch.tensor([math.nan]),
    )
    assert result.loss_sum.item() == -1.0


def test_advantages_are_constants_in_every_policy_loss() -> None:
    sample = torch.tensor([0, 0])
    for variant in ("ppo", "gspo", "cispo"):
        logprobs, advantages = (
            torch.tensor([-1.0, -2.0], requires_grad=True),
            torch.ones(1, requires_grad=True),
        )
        old = torch.tensor([-1.0, -2.0], requires_grad=True)
        if variant == "ppo":
            loss_T, _ = policy_loss_T(logprobs, old, advantages[sample], clip_low=0.2, clip_high=0.2)
        elif variant == "gspo":
            loss_T, _ = gspo_loss_T(logprobs, old, advantages, sample)
        else:
            loss_T, _ = cispo_loss_T(logprobs, old, advantages[sample], clip_high=1.0)
        loss_T.sum().backward()
        assert logprobs.grad is not None, variant
        assert advantages.grad is None, variant
        assert old.grad is None, variant


def test_metrics_that_were_not_measured_are_absent() -> None:
    flat = torch.zeros(1)
    result = grpo_token_loss_sum(flat, flat, flat, torch.zeros(1, dtype=torch.long), loss=GrpoLoss(kl_coef=0.0))
    assert "kl_sum" not in result.metric_sums()
    assert "entropy_sum" not in result.metric_sums()


def test_bad_arguments_are_named() -> None:
    flat, sample = torch.zeros(3), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"kl_coef is 0\.001 but there is no reference"):
        grpo_token_loss_sum(flat, flat, torch.zeros(1), sample, loss=GrpoLoss())
    _, clips = policy_loss_T(flat, flat, flat, clip_low=0.2, clip_high=0.2)
    with pytest.raises(ValueError, match=r"policy_T \[3\], rollout_weights_T \[3, 1\]"):
        token_loss_sum(flat, clips, rollout_weights_T=torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"ratio_T \[3\], advantages_T \[1\]"):
        policy_loss_T(flat, flat, torch.zeros(1), clip_low=0.2, clip_high=0.2)
    for knobs in ({"clip_low": 1.5}, {"clip_high": -0.1}, {"dual_clip": 1.0}, {"kl_coef": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(knobs))):
            GrpoLoss(**knobs)
    with pytest.raises(ValueError, match="max_length is 0"):
        constant_length_weights_T(sample, 0)
