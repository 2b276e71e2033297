"""The rows of `bench/objectives.py` that compare runs, at a small size."""

from pathlib import Path

import pytest
import torch
from objectives import BENCH
from objectives_rows import default_speed, runs, staleness
from objectives_rows.sampling import CURRICULUM, generated_tokens, training_flags
from objectives_rows.stale_loop import StaleLoop, StaleRun, embedded_model

from flowrt.recipes.config_io import parse


@pytest.mark.parametrize("lag", staleness.LAGS)
def test_every_sample_has_the_given_lag_once_enough_versions_exist(lag: int) -> None:
    run = StaleRun((), seed=0, steps=staleness.STEPS, lag=lag)
    ages = [step - run.generating_version(step) for step in range(run.steps)]
    assert ages[lag:] == [lag] * (run.steps - lag)
    assert ages[:lag] == list(range(lag))


def test_the_curriculum_row_uses_the_optimiser_settings_of_the_default_task() -> None:
    default = parse([])
    custom = parse(["--recipe", "custom", "--data", __file__, "--reward", f"{__file__}:reward", *training_flags()])
    assert (custom.trainer.lr, custom.trainer.beta2) == (default.trainer.lr, default.trainer.beta2)
    assert custom.trainer.warmup_steps == default.trainer.warmup_steps


def test_curriculum_flags_are_accepted_and_filtered_groups_cost_tokens() -> None:
    for side, flags in CURRICULUM.items():
        config = parse(["--group-size", "8", *flags])
        assert config.curriculum.type == side
    assert generated_tokens({"tokens": 100, "groups": 2, "filtered_groups": 3}) == 250.0


def test_a_tree_to_compare_with_needs_a_checkout_and_an_interpreter(tmp_path: Path) -> None:
    assert "no checkout" in default_speed.refusal(str(tmp_path))
    (tmp_path / "flowrt").mkdir()
    (tmp_path / "flowrt" / "cli.py").touch()
    assert "virtual environment" in default_speed.refusal(str(tmp_path))


def test_a_commit_to_compare_with_is_unpacked_into_the_given_directory(tmp_path: Path) -> None:
    assert "neither a directory nor a commit" in default_speed.refusal("no such commit")
    if not default_speed.commit_of("HEAD"):
        pytest.skip("these files are in no repository")
    assert default_speed.refusal("HEAD") == ""
    with default_speed.other_tree("HEAD", tmp_path) as tree:
        assert (tree.path / "flowrt" / "cli.py").is_file()
        assert tree.path.is_relative_to(tmp_path)


def test_every_objective_of_the_staleness_row_is_accepted() -> None:
    for flags in staleness.OBJECTIVES.values():
        assert parse(["--steps", "1", *flags]).algorithm.kl.coef == 0


def test_a_preset_fails_at_either_bound() -> None:
    figures = runs.figures({("one", 0): 0.95, ("one", 4): 0.95, ("other", 0): 1.0, ("other", 4): 0.89})
    assert figures["presets_failed"] == 1
    assert figures["bound4_over_bound0_min"] == pytest.approx(0.89)
    assert figures["reward_other_bound_4"] == 0.89


def test_bounds_are_named_with_their_direction() -> None:
    assert BENCH.bound_of("c3po_length_bias") == ">= 0.97, <= 1.03"
    assert BENCH.bound_of("staleness16_best") == ">= 0.95"
    assert BENCH.bound_of("bandit_runs") == ""


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_samples_are_generated_by_the_given_older_version(tmp_path: Path) -> None:
    """Their divergence from the trained weights is 0 only for the newest version."""
    torch.set_num_threads(1)
    model = embedded_model(str(tmp_path / "start"), "--sft.steps", "0")
    flags = ["--model", str(model), "--run-dir", str(tmp_path), "--prompts-per-step", "4", "--group-size", "4"]
    flags += ["--trainer.lr", "1e-3", "--trainer.warmup-steps", "0", "--algorithm.entropy.coef", "0.1"]
    loop = StaleLoop(parse(flags))
    metrics: list[dict[str, float]] = []
    for step, version in enumerate((0, 0, 2)):
        loop.train_step(step, version)
        metrics.append(loop.metrics)
    assert metrics[0]["divergence_0"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[1]["divergence_1"] > 1e-5
    assert "divergence_0" not in metrics[1]
    assert metrics[2]["divergence_0"] == pytest.approx(0.0, abs=1e-6)
