"""Learning rates: the warm-up, what follows it, and where they end."""

from itertools import pairwise
from typing import Any

import pytest

from flowrt.engines.options import TrainOptions
from flowrt.engines.training.optimizer import learning_rate
from flowrt.recipes.config_io import parse
from flowrt.roles.engines import with_decay_steps


def rates(**options: Any) -> list[float]:
    made = TrainOptions(lr=1.0, warmup_steps=4, **options)
    return [learning_rate(made, step) for step in range(16)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_every_schedule_warms_up_linearly(schedule: str) -> None:
    assert rates(schedule=schedule, decay_steps=8)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_constant_stays() -> None:
    assert set(rates()[3:]) == {1.0}


def test_linear_falls_by_equal_parts_and_stays() -> None:
    found = rates(schedule="linear", decay_steps=8, min_lr=0.2)[3:]
    assert found[:9] == pytest.approx([1.0 - 0.1 * part for part in range(9)])
    assert set(found[8:]) == {0.2}


def test_cosine_is_halfway_in_the_middle() -> None:
    found = rates(schedule="cosine", decay_steps=8)[3:]
    assert found[4] == pytest.approx(0.5)
    assert found[8:] == pytest.approx([0.0] * 5)
    assert all(later < earlier for earlier, later in pairwise(found[:9]))


def test_without_a_warm_up_the_first_step_has_the_whole_rate() -> None:
    assert learning_rate(TrainOptions(lr=1.0, warmup_steps=0), 0) == 1.0


@pytest.mark.parametrize("warmup", ["0", "1", "5"])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_by_default_the_last_step_of_a_run_still_trains(schedule: str, warmup: str) -> None:
    config = parse(["--steps", "20", "--trainer.schedule", schedule, "--trainer.warmup-steps", warmup])
    options = with_decay_steps(config)
    found = [learning_rate(options, step) for step in range(21)]
    assert 0.0 < found[19] < found[10]
    assert found[20] == pytest.approx(0.0, abs=1e-9)
