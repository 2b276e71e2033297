import math

import pytest
import torch

from flowrt.algorithms import (
    masked_importance,
    mismatch_statistics,
    sequence_truncated_importance,
    truncated_importance,
)

# trainer / rollout = 1/4, 1, 3/2, 8
ROLLOUT = torch.tensor([0.8, 0.3, 0.4, 0.1]).log()
TRAINER = torch.tensor([0.2, 0.3, 0.6, 0.8]).log()


def test_truncation_caps_the_upper_tail_only() -> None:
    torch.testing.assert_close(truncated_importance(TRAINER, ROLLOUT, cap=2.0), torch.tensor([0.25, 1.0, 1.5, 2.0]))
    torch.testing.assert_close(
        truncated_importance(TRAINER, ROLLOUT, cap=math.inf), torch.tensor([0.25, 1.0, 1.5, 8.0])
    )


def test_masking_drops_both_tails() -> None:
    torch.testing.assert_close(
        masked_importance(TRAINER, ROLLOUT, low=0.5, high=5.0), torch.tensor([0.0, 1.0, 1.5, 0.0])
    )
    torch.testing.assert_close(
        masked_importance(TRAINER, ROLLOUT, low=0.0, high=1.0), torch.tensor([0.25, 1.0, 0.0, 0.0])
    )


def test_sequence_weight_is_the_capped_product_over_the_sample() -> None:
    sample = torch.tensor([0, 2, 2, 0])  # sample 0: 1/4 x 8 = 2, sample 1 has no tokens, sample 2: 1 x 3/2
    weights = sequence_truncated_importance(TRAINER, ROLLOUT, sample, 3, cap=5.0)
    torch.testing.assert_close(weights, torch.tensor([2.0, 1.5, 1.5, 2.0]))
    capped = sequence_truncated_importance(TRAINER, ROLLOUT, sample, 3, cap=1.75)
    torch.testing.assert_close(capped, torch.tensor([1.75, 1.5, 1.5, 1.75]))


def test_agreement_gives_exactly_one() -> None:
    logprobs = torch.linspace(-30, 0, 97)
    sample = torch.arange(97) % 5
    ones = [1.0] * 97
    assert truncated_importance(logprobs, logprobs.clone(), cap=1.0).tolist() == ones
    assert masked_importance(logprobs, logprobs.clone(), low=1.0, high=1.0).tolist() == ones
    assert sequence_truncated_importance(logprobs, logprobs.clone(), sample, 5, cap=1.0).tolist() == ones


def test_weights_carry_no_gradient() -> None:
    trainer = TRAINER.clone().requires_grad_()
    sample = torch.zeros(4, dtype=torch.long)
    for weights in (
        truncated_importance(trainer, ROLLOUT, cap=2.0),
        masked_importance(trainer, ROLLOUT, low=0.5, high=5.0),
        sequence_truncated_importance(trainer, ROLLOUT, sample, 1, cap=2.0),
    ):
        assert not weights.requires_grad


def test_wild_log_ratios_stay_finite() -> None:
    trainer, rollout = torch.tensor([0.0, -500.0, -torch.inf]), torch.tensor([-500.0, 0.0, -1.0])
    weights = truncated_importance(trainer, rollout, cap=math.inf)
    torch.testing.assert_close(weights, torch.tensor([20.0, -20.0, -20.0]).exp())
    sample = torch.zeros(500, dtype=torch.long)
    long = sequence_truncated_importance(torch.zeros(500), torch.full((500,), -1.0), sample, 1, cap=math.inf)
    assert long[0].item() == pytest.approx(math.exp(20), rel=1e-6)


def test_statistics_of_a_hand_computed_case() -> None:
    statistics = mismatch_statistics(TRAINER, ROLLOUT, truncated_importance(TRAINER, ROLLOUT, cap=2.0))
    ratios = [0.25, 1.0, 1.5, 8.0]
    assert statistics["kl_k1"] == pytest.approx(-sum(math.log(r) for r in ratios) / 4, rel=1e-5)
    assert statistics["kl_k3"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 4, rel=1e-5)
    assert statistics["max_abs_delta"] == pytest.approx(math.log(8), rel=1e-5)
    # Weights 1/4, 1, 3/2, 2: sum 4.75, squares 7.3125.
    assert statistics["effective_sample_fraction"] == pytest.approx(4.75**2 / (4 * 7.3125), rel=1e-5)
    assert statistics["capped_fraction"] == 0.25
    assert statistics["masked_fraction"] == 0.0


def test_statistics_tell_masked_from_capped() -> None:
    masked = mismatch_statistics(TRAINER, ROLLOUT, masked_importance(TRAINER, ROLLOUT, low=0.5, high=5.0))
    assert (masked["capped_fraction"], masked["masked_fraction"]) == (0.0, 0.5)
    nothing_left = mismatch_statistics(TRAINER, ROLLOUT, torch.zeros(4))
    assert nothing_left["effective_sample_fraction"] == 0.0
    assert nothing_left["masked_fraction"] == 1.0


def test_max_abs_delta_is_not_clamped() -> None:
    statistics = mismatch_statistics(torch.tensor([-90.0]), torch.tensor([0.0]), torch.ones(1))
    assert statistics["max_abs_delta"] == 90.0
    assert math.isfinite(statistics["kl_k3"])


def test_kl_estimates_converge_to_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    rollout, trainer = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.25, 0.35])
    drawn = torch.multinomial(rollout, 200_000, replacement=True, generator=generator)
    statistics = mismatch_statistics(trainer.log()[drawn], rollout.log()[drawn], torch.ones(200_000))
    divergence = (rollout * (rollout / trainer).log()).sum().item()  # rollout || trainer, not the reverse
    assert statistics["kl_k1"] == pytest.approx(divergence, rel=0.05)
    assert statistics["kl_k3"] == pytest.approx(divergence, rel=0.05)
    assert (trainer * (trainer / rollout).log()).sum().item() != pytest.approx(divergence, rel=0.07)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"cap is 0\.5; it must be at least 1"):
        truncated_importance(TRAINER, ROLLOUT, cap=0.5)
    with pytest.raises(ValueError, match="cap is nan"):
        sequence_truncated_importance(TRAINER, ROLLOUT, torch.zeros(4, dtype=torch.long), 1, cap=math.nan)
    with pytest.raises(ValueError, match=r"band is \[1.5, 3.0\]"):
        masked_importance(TRAINER, ROLLOUT, low=1.5, high=3.0)
    with pytest.raises(ValueError, match=r"numerator_T \[4\], denominator_T \[4, 1\]"):
        truncated_importance(TRAINER, ROLLOUT.unsqueeze(1), cap=2.0)
    with pytest.raises(ValueError, match="0 tokens"):
        mismatch_statistics(torch.zeros(0), torch.zeros(0), torch.zeros(0))
