"""The loss metric of a step, and samples with unusable recorded values: they are masked, and the step continues."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from flowrt.algorithms.objective import Kl, Objective, OnlineDpo
from flowrt.engines.base import TrainingBatch
from flowrt.engines.options import TrainOptions
from flowrt.engines.tiny_model import build_model
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.engines.training.forward import response_logprobs
from flowrt.errors import EngineError


def batch(second: torch.Tensor | None = None, **changes: Any) -> TrainingBatch:
    """Two samples of 4 and 6 tokens; ``second`` are the recorded log-probabilities of the second one."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(2, 24, (length,), generator=generator) for length in (4, 6)]
    whole = TrainingBatch(
        prompts=tokens,
        responses=tokens,
        rollout_logprobs=[torch.full((4,), -3.0), torch.full((6,), -3.0) if second is None else second],
        reference_logprobs=None,
        advantages_N=torch.tensor([1.0, -1.0]),
        weights_N=torch.ones(2),
        groups_N=torch.zeros(2, dtype=torch.int64),
    )
    return dataclasses.replace(whole, **changes)


def engine(objective: Objective | None = None) -> TorchTrainer:
    model = build_model(vocab_size=24, hidden_size=32, layers=1, heads=2, intermediate_size=48, max_length=64, seed=1)
    return TorchTrainer(model, TrainOptions(warmup_steps=0), objective or Objective(), temperature=1.0)


@pytest.mark.parametrize("forward_tokens", [1024, 1])  # one pass, or one for each group
def test_the_margin_of_preference_pairs_is_a_mean_over_groups(forward_tokens: int) -> None:
    model = build_model(vocab_size=24, hidden_size=32, layers=1, heads=2, intermediate_size=48, max_length=64, seed=1)
    options = TrainOptions(warmup_steps=0, forward_tokens=forward_tokens)
    trainer = TorchTrainer(model, options, OnlineDpo(beta=0.5), temperature=1.0)
    first, reference = batch(), [torch.full((4,), -2.0), torch.full((6,), -4.0)]
    twice = dataclasses.replace(
        first,
        prompts=[*first.prompts, *first.prompts],
        responses=[*first.responses, *first.responses],
        rollout_logprobs=[*first.rollout_logprobs, *first.rollout_logprobs],
        reference_logprobs=[*reference, *reference],
        advantages_N=torch.tensor([1.0, -1.0, 1.0, -1.0]),
        weights_N=torch.ones(4),
        groups_N=torch.tensor([0, 0, 1, 1]),
    )
    logprobs_T, _ = response_logprobs(trainer.model, first.prompts, first.responses, 1.0)
    differences = (logprobs_T - torch.cat(reference)).detach().split([4, 6])
    margin = float(differences[0].sum() - differences[1].sum())
    trainer.accumulate(twice)
    assert trainer.step()["margin"] == pytest.approx(margin, rel=1e-5)


def gradient(torch_trainer: TorchTrainer) -> torch.Tensor:
    gradients: list[torch.Tensor] = []
    torch_trainer.on_gradient = lambda whole: gradients.append(whole.clone())
    metrics = torch_trainer.step()
    assert metrics
    return gradients[0]


def test_the_loss_metric_is_the_loss_that_is_minimised() -> None:
    trainer = engine(Objective(kl=Kl(0.5)))
    reference = [torch.full((4,), -2.0), torch.full((6,), -4.0)]
    micro_batch = batch(reference_logprobs=reference)
    logprobs_T, _ = response_logprobs(trainer.model, micro_batch.prompts, micro_batch.responses, 1.0)
    terms = []
    for index, logprob in enumerate(logprobs_T.tolist()):
        advantage, reference_logprob = (1.0, -2.0) if index < 4 else (-1.0, -4.0)
        delta = reference_logprob - logprob
        terms.append(-min(math.exp(logprob + 3.0), 2.0) * advantage + 0.5 * (math.exp(delta) - delta - 1))
    trainer.accumulate(micro_batch)
    assert trainer.step()["loss"] == pytest.approx(sum(terms) / 10, rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e4, 0.5])
def test_a_sample_with_an_unusable_log_probability_is_masked_and_counted(
    value: float, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = torch.full((6,), -3.0)
    recorded[2] = value
    masked, without = engine(), engine()
    masked.accumulate(batch(recorded))
    without.accumulate(batch(weights_N=torch.tensor([1.0, 0.0])))
    assert torch.equal(gradient(masked), gradient(without))
    assert "1 of 2 samples have unusable log-probabilities" in caplog.text
    masked.accumulate(batch(recorded))
    assert masked.step()["invalid_samples"] == 1


def test_misaligned_log_probabilities_are_masked_and_do_not_shift_other_samples() -> None:
    masked, without = engine(), engine()
    masked.accumulate(batch(torch.full((5,), -3.0)))
    without.accumulate(batch(weights_N=torch.tensor([1.0, 0.0])))
    assert torch.equal(gradient(masked), gradient(without))


def test_a_non_finite_reference_masks_its_sample() -> None:
    trainer = engine(Objective(kl=Kl(0.5)))
    trainer.accumulate(batch(reference_logprobs=[torch.full((4,), -2.0), torch.full((6,), math.nan)]))
    metrics = trainer.step()
    assert math.isfinite(metrics["loss"])
    assert math.isfinite(metrics["kl"])
    assert metrics["invalid_samples"] == 1


def test_a_pass_without_tokens_trains_nothing() -> None:
    trainer = engine()
    none = torch.zeros(0, dtype=torch.int64)
    empty = TrainingBatch(
        prompts=[torch.tensor([2, 3])],
        responses=[none],
        rollout_logprobs=[torch.zeros(0)],
        reference_logprobs=None,
        advantages_N=torch.ones(1),
        weights_N=torch.ones(1),
        groups_N=torch.zeros(1, dtype=torch.int64),
    )
    trainer.accumulate(empty)
    trainer.accumulate(batch())
    assert trainer.step()["response_length"] == pytest.approx(10 / 3)


def test_a_non_finite_gradient_changes_no_weight() -> None:
    trainer = engine()
    trainer.accumulate(batch())
    assert trainer.step()["grad_norm"] > 0
    before = {name: tensor.clone() for name, tensor in trainer.parameters().items()}
    trainer.accumulate(batch(advantages_N=torch.tensor([1.0, math.nan])))
    with pytest.raises(EngineError, match="the gradient of step 1 has norm nan: the weights are unchanged"):
        trainer.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.parameters().items())
