"""The loop of the rows `staleness` and `retention`: the generating version and its effect on training."""

import math
from pathlib import Path

import pytest
import torch
from objectives_rows.sampling import at, steps_to
from objectives_rows.stale_loop import StaleLoop, StaleRun, train

from flowrt.recipes.config_io import parse

SMALL = ("--prompts-per-step", "4", "--group-size", "8", "--trainer.lr", "0.01", "--trainer.warmup-steps", "1")


@pytest.mark.parametrize(
    ("lag", "refresh", "versions"),
    [(0, 1, [0, 1, 2, 3, 4, 5]), (2, 1, [0, 0, 0, 1, 2, 3]), (0, 4, [0, 0, 0, 0, 4, 4])],
)
def test_the_generating_version_follows_lag_and_refresh(lag: int, refresh: int, versions: list[int]) -> None:
    run = StaleRun((), 0, 6, lag, refresh)
    assert [run.generating_version(step) for step in range(6)] == versions


def test_a_run_is_reproducible_and_staleness_changes_its_rewards(sft_model: Path) -> None:
    torch.set_num_threads(1)
    fresh, again, stale = (train(StaleRun(SMALL, 0, 4, lag), str(sft_model)) for lag in (0, 0, 3))
    assert fresh == again
    assert fresh.before == stale.before
    assert fresh.rewards[0] == stale.rewards[0]
    assert fresh.rewards[1:] != stale.rewards[1:]


def test_a_discarded_version_cannot_generate(sft_model: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    loop = StaleLoop(parse(["--model", str(sft_model), "--run-dir", str(tmp_path), *SMALL]))
    loop.train_step(0, 0)
    loop.train_step(1, 1)
    loop.forget_before(2)
    with pytest.raises(KeyError):
        loop.train_step(2, 1)


def test_the_step_that_reaches_a_target_is_interpolated() -> None:
    assert steps_to(0.8, {0: 0.2, 4: 0.6, 8: 1.0}) == pytest.approx(6.0)
    assert steps_to(0.8, {0: 0.9}) == 0.0
    assert math.isinf(steps_to(0.8, {0: 0.2, 4: 0.7}))
    assert at([0.0, 10.0, 30.0], 1.5) == pytest.approx(20.0)
