"""Before its first update a trainer compares its log-probabilities with the rollout's at equal weights."""

from dataclasses import replace

import pytest
import torch

from flowrt.algorithms.objective import Objective
from flowrt.engines.base import TrainingBatch
from flowrt.engines.options import TrainOptions
from flowrt.engines.tiny_model import build_model
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.engines.training.forward import score
from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import parse
from flowrt.roles.engine_setup import initial_mismatch_limit, train_options

LENGTHS = ((3, 5), (7, 2), (4, 9))


def batch_of(model: torch.nn.Module, ages: int, shift: float) -> TrainingBatch:
    """Samples of unequal lengths whose recorded log-probabilities are off by ``shift`` nats in turn up and down."""
    dice = torch.Generator().manual_seed(0)
    prompts, responses = ([torch.randint(2, 32, (pair[part],), generator=dice) for pair in LENGTHS] for part in (0, 1))
    scored = score(model, prompts, responses, 1.0, budget_tokens=1)
    offsets = [shift * (torch.arange(len(logprobs)) % 2 * 2 - 1) for logprobs in scored]
    return TrainingBatch(
        prompts=prompts,
        responses=responses,
        rollout_logprobs=[logprobs - offset for logprobs, offset in zip(scored, offsets, strict=True)],
        reference_logprobs=None,
        advantages_N=torch.tensor([1.0, -1.0, 0.5]),
        weights_N=torch.ones(3),
        groups_N=torch.zeros(3, dtype=torch.int64),
        ages=[torch.full((len(response),), ages) for response in responses],
    )


def trainer(limit: float) -> TorchTrainer:
    torch.manual_seed(0)
    model = build_model(vocab_size=32, hidden_size=32, layers=1, heads=2, intermediate_size=32, max_length=64, seed=0)
    return TorchTrainer(model, TrainOptions(max_initial_mismatch=limit), Objective(), temperature=1.0)


@pytest.mark.parametrize(
    ("limit", "ages", "shift", "is_refused"),
    [
        (0.02, 0, 0.0, False),
        (0.02, 0, 0.1, False),  # k3 of 0.1 nats is 0.005
        (0.02, 0, 0.35, True),
        (0.001, 0, 0.1, True),
        (0.0, 0, 0.9, False),  # no check
        (0.02, 1, 0.35, False),  # generated with older weights
    ],
)
def test_a_trainer_that_disagrees_with_the_rollout_trains_nothing(
    limit: float, ages: int, shift: float, is_refused: bool
) -> None:
    engine = trainer(limit)
    before = {name: tensor.clone() for name, tensor in engine.parameters().items()}
    engine.accumulate(batch_of(engine.model, ages, shift))
    if not is_refused:
        assert engine.step()["grad_norm"] > 0
        return
    with pytest.raises(ConfigError, match=r"model qwen3: rollout and trainer disagree by 0\.0\d+ nats a token"):
        engine.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.parameters().items())


def test_only_the_first_update_is_checked() -> None:
    engine = trainer(0.02)
    engine.accumulate(batch_of(engine.model, 0, 0.0))
    engine.step()
    engine.accumulate(batch_of(engine.model, 0, 1.0))
    assert engine.step()["grad_norm"] > 0


def test_a_divergence_that_is_no_number_is_refused() -> None:
    engine = trainer(0.02)
    engine.accumulate(batch_of(engine.model, 0, 0.0))
    engine._passes._of_age[0, 0] = torch.nan
    with pytest.raises(ConfigError, match="disagree by nan"):
        engine.step()


def test_the_limit_is_a_hundredth_where_both_compute_in_float32() -> None:
    config = parse([])
    assert initial_mismatch_limit(config) == pytest.approx(config.trainer.max_initial_mismatch / 100)
    assert train_options(config).max_initial_mismatch == initial_mismatch_limit(config)
    narrow: RunConfig = replace(config, trainer=replace(config.trainer, dtype="bfloat16"))
    assert initial_mismatch_limit(narrow) == config.trainer.max_initial_mismatch


def unusable(batch: TrainingBatch, *rows: int) -> TrainingBatch:
    """The batch without usable log-probabilities of these rows."""
    logprobs = [own * torch.nan if row in rows else own for row, own in enumerate(batch.rollout_logprobs)]
    return replace(batch, rollout_logprobs=logprobs)


def test_samples_without_usable_log_probabilities_do_not_dilute_the_mismatch() -> None:
    engine, without = trainer(0.0), trainer(0.0)
    batch = batch_of(engine.model, 0, 0.35)
    engine.accumulate(unusable(batch, 0, 2))
    without.accumulate(batch.only([1]))
    measured, expected = engine.step(), without.step()
    for name in ("mismatch_kl_k1", "mismatch_kl_k3", "divergence_0", "effective_sample_fraction"):
        assert measured[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    checked = trainer(0.02)
    checked.accumulate(unusable(batch, 0, 2))
    with pytest.raises(ConfigError, match="rollout and trainer disagree by"):
        checked.step()


def test_a_first_step_without_a_usable_log_probability_trains_nothing() -> None:
    engine = trainer(0.02)
    engine.accumulate(unusable(batch_of(engine.model, 0, 0.0), 0, 1, 2))
    with pytest.raises(ConfigError, match=r"log-probabilities of all samples of the first step .* are unusable"):
        engine.step()


def test_a_later_step_without_a_usable_log_probability_has_no_mismatch() -> None:
    engine = trainer(0.02)
    engine.accumulate(batch_of(engine.model, 0, 0.0))
    assert "mismatch_kl_k3" in engine.step()
    engine.accumulate(unusable(batch_of(engine.model, 0, 0.0), 0, 1, 2))
    metrics = engine.step()
    assert metrics["invalid_samples"] == 3
    assert not any(name.startswith(("mismatch", "divergence", "effective")) for name in metrics)
