"""The gradient of a step does not depend on how it was cut into micro-batches."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrt.algorithms import (
    GrpoLoss,
    TokenLossSum,
    cispo_loss_T,
    constant_length_weights_T,
    cut_by_tokens,
    grpo_token_loss_sum,
    gspo_loss_T,
    kl_k2_T,
    kl_k3_T,
    pad_samples,
    selected_logprobs,
    sequence_mean_weights_T,
    sequence_truncated_importance,
    token_loss_sum,
    token_mean_weights_T,
    truncated_importance,
)

VOCABULARY = 6


@dataclass(frozen=True)
class Step:
    """Samples with their stored log-probabilities, and a bigram model [V, V] that they train."""

    prompts: list[Tensor]
    responses: list[Tensor]
    old: list[Tensor]
    rollout: list[Tensor]
    reference: list[Tensor]
    advantages: Tensor
    weights_VV: Tensor


def make_step(lengths: list[int], seed: int, dtype: torch.dtype) -> Step:
    generator = torch.Generator().manual_seed(seed)

    def stored() -> list[Tensor]:
        return [-3 * torch.rand(length, generator=generator, dtype=torch.float64).to(dtype) for length in lengths]

    return Step(
        prompts=[torch.randint(VOCABULARY, (1 + n % 3,), generator=generator) for n in lengths],
        responses=[torch.randint(VOCABULARY, (n,), generator=generator) for n in lengths],
        old=stored(),
        rollout=stored(),
        reference=stored(),
        advantages=torch.randn(len(lengths), generator=generator, dtype=torch.float64).to(dtype),
        weights_VV=torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64).to(dtype),
    )


Loss = Callable[[Tensor, list[Tensor], Tensor, Tensor], TokenLossSum]


def grpo(logprobs: Tensor, columns: list[Tensor], adv: Tensor, sample: Tensor) -> TokenLossSum:
    old, rollout, ref = columns
    return grpo_token_loss_sum(
        logprobs,
        old,
        adv,
        sample,
        loss=GrpoLoss(kl_coef=0.1, dual_clip=3.0),
        rollout_weights_T=truncated_importance(old, rollout, cap=2.0),
        reference_T=ref,
        aggregation_T=token_mean_weights_T(sample),
    )


def gspo(logprobs: Tensor, columns: list[Tensor], adv: Tensor, sample: Tensor) -> TokenLossSum:
    old, rollout, ref = columns
    policy_T, clips = gspo_loss_T(logprobs, old, adv, sample, clip_low=0.3, clip_high=0.3)
    return token_loss_sum(
        policy_T,
        clips,
        rollout_weights_T=sequence_truncated_importance(old, rollout, sample, len(adv), cap=2.0),
        kl_T=kl_k3_T(logprobs, ref),
        kl_coef=0.1,
        aggregation_T=sequence_mean_weights_T(sample, len(adv)),
    )


def cispo(logprobs: Tensor, columns: list[Tensor], adv: Tensor, sample: Tensor) -> TokenLossSum:
    old, _, ref = columns
    policy_T, clips = cispo_loss_T(logprobs, old, adv[sample], clip_high=1.0)
    return token_loss_sum(
        policy_T,
        clips,
        kl_T=kl_k2_T(logprobs, ref),
        kl_coef=0.1,
        aggregation_T=constant_length_weights_T(sample, 16),
    )


def run(step: Step, cuts: list[list[int]], loss: Loss, *, mean: bool = False) -> tuple[Tensor, dict[str, float]]:
    """Gradient and metrics of the step, each divided once at its end by the global token count."""
    model = step.weights_VV.clone().requires_grad_()
    sums: dict[str, float] = {}
    tokens = 0
    for cut in cuts:
        padded = pad_samples([step.prompts[i] for i in cut], [step.responses[i] for i in cut], pad_id=0)
        logprobs = padded.response_T(selected_logprobs(model[padded.tokens_BL], padded.tokens_BL, 0.8))
        columns = [torch.cat([column[i] for i in cut]) for column in (step.old, step.rollout, step.reference)]
        result = loss(logprobs, columns, step.advantages[cut], padded.sample_T)
        (result.loss_sum / result.tokens if mean else result.loss_sum).backward()
        tokens += result.tokens
        for name, value in result.metric_sums().items():
            sums[name] = sums.get(name, 0.0) + value.item()
    assert model.grad is not None
    divisor = len(cuts) if mean else tokens
    return model.grad / divisor, {name: value / tokens for name, value in sums.items()}


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@pytest.mark.parametrize("loss", [grpo, gspo, cispo])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@given(data=st.data(), lengths=LENGTHS, seed=st.integers(0, 2**31))
def test_one_or_many_micro_batches_give_the_same_gradient(
    loss: Loss, dtype: torch.dtype, data: st.DataObject, lengths: list[int], seed: int
) -> None:
    step = make_step(lengths, seed, dtype)
    samples = range(len(lengths))
    ends = sorted(data.draw(st.sets(st.sampled_from(samples)))) if len(lengths) > 1 else []
    bounds = sorted({0, *ends, len(lengths)})
    cuts = [list(samples[a:b]) for a, b in pairwise(bounds)]
    whole, whole_metrics = run(step, [list(samples)], loss)
    pieces, piece_metrics = run(step, cuts, loss)
    # Rounding is relative to what was added up: gradients of samples may cancel in the sum.
    scale = sum(run(step, [[i]], loss)[0].norm().item() * lengths[i] for i in samples) / sum(lengths)
    assert (whole - pieces).norm().item() <= 1e-6 * scale
    assert piece_metrics == pytest.approx(whole_metrics, rel=1e-5, abs=1e-5)


@given(lengths=LENGTHS, budget=st.integers(1, 40), padded=st.booleans(), seed=st.integers(0, 2**31))
def test_the_token_budget_does_not_change_the_gradient(
    lengths: list[int], budget: int, padded: bool, seed: int
) -> None:
    step = make_step(lengths, seed, torch.float64)
    totals = [len(prompt) + n for prompt, n in zip(step.prompts, lengths, strict=True)]
    whole, _ = run(step, [list(range(len(lengths)))], grpo)
    pieces, _ = run(step, cut_by_tokens(totals, budget, padded=padded), grpo)
    torch.testing.assert_close(pieces, whole, rtol=1e-6, atol=1e-12)


def test_means_of_micro_batches_would_have_been_caught() -> None:
    step = make_step([1, 9], seed=0, dtype=torch.float64)
    whole, _ = run(step, [[0, 1]], grpo, mean=True)
    pieces, _ = run(step, [[0], [1]], grpo, mean=True)
    assert (whole - pieces).norm() > 0.01 * whole.norm()


@given(lengths=LENGTHS, seed=st.integers(0, 2**31), order_seed=st.integers(0, 2**31))
def test_the_order_of_samples_does_not_matter(lengths: list[int], seed: int, order_seed: int) -> None:
    step = make_step(lengths, seed, torch.float64)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(order_seed)).tolist()
    for loss in (grpo, gspo, cispo):
        straight, _ = run(step, [list(range(len(lengths)))], loss)
        mixed, _ = run(step, [order], loss)
        torch.testing.assert_close(mixed, straight, rtol=1e-6, atol=1e-12)
