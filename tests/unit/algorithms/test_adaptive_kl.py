"""The adaptive KL coefficient: its formula, its value at each step, and its state across a resume."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrt.algorithms.losses import AdaptiveKl
from flowrt.algorithms.objective import Kl, Objective
from flowrt.engines.base import TrainingBatch
from flowrt.engines.options import TrainOptions
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.errors import ConfigError
from flowrt.recipes.config_io import parse
from flowrt.roles.algorithm import algorithm
from tests.unit.recipes.test_algorithms import small_model, step_batch

COEF = 0.5
FLAGS = ["--algorithm.kl.coef", str(COEF), "--algorithm.kl.target", "0.2", "--algorithm.kl.horizon", "128"]
SMALL_STEP = ["--group-size", "4", "--prompts-per-step", "4", "--rollout.max-new-tokens", "12"]


@given(st.floats(1e-6, 1e3), st.floats(-10, 10), st.floats(1e-3, 10), st.integers(1, 512), st.integers(512, 10_000))
def test_the_next_coefficient_equals_the_formula_of_the_paper(
    coef: float, kl: float, target: float, samples: int, horizon: int
) -> None:
    """Ziegler et al., section 2.2, written independently."""
    next_coef = AdaptiveKl(target, horizon).next_coef(coef, kl, samples)
    relative = (kl - target) / target
    error = relative if abs(relative) <= 0.2 else math.copysign(0.2, relative)
    assert next_coef == pytest.approx(coef + coef * error * samples / horizon, rel=1e-9)
    assert coef * 0.8 <= next_coef <= coef * 1.2 * (1 + 1e-12)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_non_finite_divergence_keeps_the_coefficient(kl: float) -> None:
    assert AdaptiveKl(0.1, 100).next_coef(0.3, kl, 10) == 0.3


def new_trainer(flags: list[str]) -> TorchTrainer:
    objective = algorithm(parse([*SMALL_STEP, *flags]))
    return TorchTrainer(small_model(), TrainOptions(lr=1e-2, warmup_steps=1), objective, temperature=1.0)


def batches(flags: list[str]) -> TrainingBatch:
    config = parse([*SMALL_STEP, *flags])
    return step_batch(config, algorithm(config))


def train(trainer: TorchTrainer, flags: list[str], steps: int) -> list[dict[str, float]]:
    batch, metrics = batches(flags), []
    for _ in range(steps):
        trainer.accumulate(batch)
        metrics.append(trainer.step())
    return metrics


def test_a_step_uses_the_coefficient_that_it_reports() -> None:
    """The metric follows the formula; the first step equals one with a fixed coefficient of that value."""
    trainer = new_trainer(FLAGS)
    adaptive = AdaptiveKl(0.2, 128)
    expected = COEF
    for metrics in train(trainer, FLAGS, 5):
        assert metrics["kl_coef"] == expected
        expected = adaptive.next_coef(expected, metrics["kl"], 16)
    assert expected != COEF
    first = train(new_trainer(FLAGS), FLAGS, 1)[0]
    fixed = train(new_trainer(FLAGS[:2]), FLAGS[:2], 1)[0]
    assert "kl_coef" not in fixed
    assert (first["loss"], first["grad_norm"]) == (fixed["loss"], fixed["grad_norm"])


def test_the_gradient_of_a_step_uses_the_coefficient_of_that_step() -> None:
    trainer = new_trainer(FLAGS)
    train(trainer, FLAGS, 2)
    coef = trainer._passes.numbers["kl_coef"]
    objective = Objective(kl=Kl(coef))
    fixed = TorchTrainer(trainer.model, TrainOptions(lr=1e-2, warmup_steps=1), objective, temperature=1.0)
    gradients: list[torch.Tensor] = []
    record: Callable[[torch.Tensor], None] = lambda gradient: gradients.append(gradient.clone())  # noqa: E731
    batch = batches(FLAGS)
    for engine in (fixed, trainer):
        weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        engine.on_gradient = record
        engine.accumulate(batch)
        engine.step()
        with torch.no_grad():
            for parameter, before in zip(trainer.model.parameters(), weights, strict=True):
                parameter.copy_(before)
    assert torch.equal(gradients[0], gradients[1])


def test_a_resumed_coefficient_continues_bit_for_bit(tmp_path: Path) -> None:
    uninterrupted = train(new_trainer(FLAGS), FLAGS, 6)
    first = new_trainer(FLAGS)
    train(first, FLAGS, 3)
    first.save(tmp_path)
    resumed = new_trainer(FLAGS)
    resumed.load(tmp_path)
    assert train(resumed, FLAGS, 3) == uninterrupted[3:]
    assert len({metrics["kl_coef"] for metrics in uninterrupted}) > 1


def test_a_discarded_step_leaves_the_coefficient_unchanged() -> None:
    trainer = new_trainer(FLAGS)
    trainer.accumulate(batches(FLAGS))
    trainer.discard()
    assert train(trainer, FLAGS, 1)[0]["kl_coef"] == COEF


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--algorithm.kl.coef", "0", "--algorithm.kl.target", "0.1"], "changes nothing with algorithm.kl.coef 0.0"),
        (["--algorithm", "rloo", "--algorithm.kl.target", "0.1"], "changes nothing with algorithm.kl.where reward"),
        (["--algorithm", "dpo_online", "--algorithm.kl.target", "0.1"], "changes nothing with algorithm.loss.type dpo"),
        (["--algorithm.kl.horizon", "500"], "changes nothing with algorithm.kl.target 0.0"),
        (["--algorithm.kl.target", "0.1", "--algorithm.kl.horizon", "100"], "fewer than the 128 samples"),
        (["--algorithm.kl.target", "nan"], "algorithm.kl.target"),
    ],
)
def test_invalid_or_unused_adaptive_kl_options_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(flags)
