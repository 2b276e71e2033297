"""What a training engine captures of stored samples: log-probabilities before the step, and advantages."""

from collections.abc import Sequence

import pytest
import torch

from flowrt.algorithms.algorithm import Groups
from flowrt.engines.base import Capture, TrainingBatch
from flowrt.engines.options import TrainOptions
from flowrt.engines.tiny_model import build_model
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.engines.training.forward import response_logprobs
from flowrt.recipes.config_io import parse
from flowrt.roles.algorithm import algorithm

LENGTHS = (4, 6, 3, 5)
REWARDS = torch.tensor([0.0, 1.0, 0.5, 2.0])
PRESETS = ("reinforce", "grpo", "decoupled", "lite_ppo", "reinforce++", "m2po", "gspo")
"""One update and several, advantages of a group and of the step, statistics of all tokens."""


def trainer(preset: str) -> TorchTrainer:
    model = build_model(vocab_size=24, hidden_size=32, layers=1, heads=2, intermediate_size=48, max_length=64, seed=1)
    options = TrainOptions(warmup_steps=0, lr=1e-2)
    config = parse(["arithmetic", "--algorithm", preset, "--algorithm.kl.coef", "0"])
    return TorchTrainer(model, options, algorithm(config), temperature=1.0)


def batch(engine: TorchTrainer, rows: Sequence[int], captures: list[Capture | None] | None) -> TrainingBatch:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(2, 24, (length,), generator=generator) for length in LENGTHS]
    groups_N = torch.tensor([0, 0, 1, 1])[list(rows)]
    is_of_step = engine._passes.algorithm.needs.scope == "step"
    lengths_N = torch.tensor(LENGTHS)[list(rows)]
    groups = Groups(
        REWARDS[list(rows)], groups_N, lengths_N, torch.zeros(len(rows)).bool(), torch.zeros(len(rows)).long()
    )
    return TrainingBatch(
        prompts=[tokens[row] for row in rows],
        responses=[tokens[row] for row in rows],
        rollout_logprobs=[torch.full((LENGTHS[row],), -3.0) for row in rows],
        reference_logprobs=None,
        advantages_N=torch.zeros(len(rows)) if is_of_step else torch.tensor([1.0, -1.0, -0.5, 0.5])[list(rows)],
        weights_N=torch.ones(len(rows)),
        groups_N=groups_N,
        credit=groups if is_of_step else None,
        captures=captures,
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_captured_log_probabilities_are_those_before_the_step(preset: str) -> None:
    engine = trainer(preset)
    whole = batch(engine, range(4), None)
    expected_T, _ = response_logprobs(engine.model, whole.prompts, whole.responses, 1.0)
    expected = expected_T.detach().split(list(LENGTHS))
    captures: list[Capture | None] = [Capture(0.0), None, Capture(7.0), Capture(7.0)]
    engine.accumulate(batch(engine, (0, 1), captures[:2]))
    engine.accumulate(batch(engine, (2, 3), captures[2:]))
    assert engine.step()
    updates = engine._passes.algorithm.plan.optimizer_steps
    for row in (0, 2, 3):
        capture = captures[row]
        assert capture is not None
        assert capture.logprobs_T is not None
        if updates == 1 or engine._passes.needs_forward or row == 0:  # else some are only computed after an update
            torch.testing.assert_close(capture.logprobs_T, expected[row], atol=1e-5, rtol=1e-5)
    if engine._passes.algorithm.needs.scope == "step" and whole.credit is not None:
        credit = engine._passes.algorithm.credit(whole.credit)
        assert [capture.advantage for capture in captures if capture] == pytest.approx(
            credit.advantages_N[[0, 2, 3]].tolist()
        )
    else:
        assert [capture.advantage for capture in captures if capture] == [0.0, 7.0, 7.0]


@pytest.mark.parametrize("preset", PRESETS)
def test_captures_change_no_weight(preset: str) -> None:
    weights = []
    for captures in (None, [Capture(0.0), None, Capture(0.0), Capture(0.0)]):
        engine = trainer(preset)
        engine.accumulate(batch(engine, range(4), captures))
        assert engine.step()
        weights.append([parameter.clone() for parameter in engine.parameters().values()])
    assert all(torch.equal(first, second) for first, second in zip(*weights, strict=True))
