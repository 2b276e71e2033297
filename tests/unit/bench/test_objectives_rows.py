"""The rows of `bench/objectives.py` that compare runs, at a small size."""

import random
from pathlib import Path

import pytest
import torch
from objectives import BOUNDS, LOWER_BOUNDS, ROWS, bound_of
from objectives_rows import default_speed, staleness
from objectives_rows.sampling import at, steps_to, training_flags
from objectives_rows.stale_loop import StaleLoop, StaleRun, embedded_model
from objectives_rows.token_budget import lengths_of_step, measure

from flowrt.recipes.config_io import parse


def test_a_budget_makes_steps_even_and_prefers_no_length() -> None:
    found = measure(quick=True)
    assert found["c3po_cv_ratio"] >= LOWER_BOUNDS["c3po_cv_ratio"]
    assert LOWER_BOUNDS["c3po_length_bias"] <= found["c3po_length_bias"] <= BOUNDS["c3po_length_bias"]


def test_drawn_steps_are_uneven() -> None:
    sums = [sum(lengths_of_step(random.Random(seed))) for seed in range(20)]
    assert max(sums) > 1.2 * min(sums)


@pytest.mark.parametrize("lag", staleness.LAGS)
def test_every_sample_is_as_old_as_asked_once_there_are_so_many_versions(lag: int) -> None:
    run = StaleRun((), seed=0, steps=staleness.STEPS, lag=lag)
    ages = [step - run.generating_version(step) for step in range(run.steps)]
    assert ages[lag:] == [lag] * (run.steps - lag)
    assert ages[:lag] == list(range(lag))


def test_one_generation_serves_as_many_updates_as_asked() -> None:
    run = StaleRun((), seed=0, steps=192, refresh=64)
    assert [run.generating_version(step) for step in (0, 63, 64, 127, 128, 191)] == [0, 0, 64, 64, 128, 128]


def test_the_target_is_interpolated_between_checkpoints() -> None:
    assert steps_to(0.8, {0: 0.2, 4: 0.6, 8: 1.0}) == pytest.approx(6.0)
    assert steps_to(0.8, {0: 0.9}) == 0.0
    assert steps_to(0.8, {0: 0.2, 4: 0.7}) == float("inf")
    assert at([0.0, 10.0, 30.0], 1.5) == pytest.approx(20.0)


def test_the_curriculum_is_trained_like_the_default_task() -> None:
    default = parse([])
    custom = parse(["--recipe", "custom", "--data", __file__, "--data.reward", f"{__file__}:reward", *training_flags()])
    assert (custom.trainer.lr, custom.trainer.beta2) == (default.trainer.lr, default.trainer.beta2)
    assert custom.trainer.warmup_steps == default.trainer.warmup_steps


def test_a_tree_to_compare_with_needs_an_interpreter(tmp_path: Path) -> None:
    assert "no checkout" in default_speed.refusal(tmp_path)
    (tmp_path / "flowrt").mkdir()
    (tmp_path / "flowrt" / "cli.py").touch()
    assert "virtual environment" in default_speed.refusal(tmp_path)


def test_every_objective_of_the_curve_is_accepted() -> None:
    for flags in staleness.OBJECTIVES.values():
        assert parse(["--steps", "1", *flags]).algorithm.kl.coef == 0


def test_bounds_are_named_with_their_direction() -> None:
    assert bound_of("c3po_length_bias") == "at least 0.97, at most 1.03"
    assert bound_of("staleness16_best") == "at least 0.95"
    assert bound_of("bandit_runs") == ""
    assert len(set(ROWS)) == len(ROWS)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_samples_are_generated_by_the_version_that_is_held_back(tmp_path: Path) -> None:
    """Their divergence from the trained weights is 0 for the newest version alone."""
    torch.set_num_threads(1)
    model = embedded_model(str(tmp_path / "start"), "--sft.steps", "0")
    flags = ["--model", str(model), "--run-dir", str(tmp_path), "--prompts-per-step", "4", "--group-size", "4"]
    flags += ["--trainer.lr", "1e-3", "--trainer.warmup-steps", "0", "--algorithm.entropy.coef", "0.1"]
    loop = StaleLoop(parse(flags))
    found: list[dict[str, float]] = []
    for step, version in enumerate((0, 0, 2)):
        loop.train_step(step, version)
        found.append(loop.metrics)
    assert found[0]["divergence_0"] == pytest.approx(0.0, abs=1e-6)
    assert found[1]["divergence_1"] > 1e-5
    assert "divergence_0" not in found[1]
    assert found[2]["divergence_0"] == pytest.approx(0.0, abs=1e-6)
