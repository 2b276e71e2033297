"""A sample that is no number ends the step, not the model."""

import pytest
import torch

from flowrt.algorithms import GrpoLoss
from flowrt.engines.build import build_model
from flowrt.engines.options import TrainOptions
from flowrt.engines.protocols import TrainingBatch
from flowrt.engines.torch_train import TorchTrainer
from flowrt.errors import EngineError


def batch(logprob: float) -> TrainingBatch:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(2, 24, (length,), generator=generator) for length in (4, 6)]
    logprobs = [torch.full((4,), -3.0), torch.full((6,), logprob)]
    return TrainingBatch(tokens, tokens, logprobs, None, torch.tensor([1.0, -1.0]), torch.ones(2))


def test_a_log_probability_that_is_no_number_changes_no_weight() -> None:
    model = build_model(vocab_size=24, hidden_size=32, layers=1, heads=2, intermediate_size=48, max_length=64, seed=1)
    engine = TorchTrainer(
        model, TrainOptions(warmup_steps=0), GrpoLoss(kl_coef=0.0), correction_cap=2.0, temperature=1.0
    )
    engine.accumulate(batch(-3.0))
    assert engine.step()["grad_norm"] > 0
    before = {name: tensor.clone() for name, tensor in engine.parameters().items()}
    engine.accumulate(batch(float("nan")))
    with pytest.raises(EngineError, match="the gradient of step 1 has norm nan: the weights are as they were"):
        engine.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.parameters().items())
