"""Learning-rate schedules: warm-up, decay and final rate."""

from itertools import pairwise
from typing import Any

import pytest

from flowrt.engines.options import TrainOptions
from flowrt.engines.training.optimizer import learning_rate
from flowrt.errors import ConfigError
from flowrt.recipes.config_io import parse
from flowrt.roles.engine_setup import train_options


def rates(**options: Any) -> list[float]:
    train_options = TrainOptions(lr=1.0, warmup_steps=4, **options)
    return [learning_rate(train_options, step) for step in range(16)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_every_schedule_warms_up_linearly(schedule: str) -> None:
    assert rates(schedule=schedule, decay_steps=8)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_the_constant_schedule_keeps_the_rate() -> None:
    assert set(rates()[3:]) == {1.0}


def test_the_linear_schedule_falls_in_equal_steps_to_the_minimum() -> None:
    learning_rates = rates(schedule="linear", decay_steps=7, min_lr=0.2)[3:]
    assert learning_rates[:9] == pytest.approx([1.0 - 0.1 * part for part in range(9)])
    assert set(learning_rates[8:]) == {0.2}


def test_the_cosine_schedule_is_at_half_the_rate_in_the_middle() -> None:
    learning_rates = rates(schedule="cosine", decay_steps=7)[3:]
    assert learning_rates[4] == pytest.approx(0.5)
    assert learning_rates[8:] == pytest.approx([0.0] * 5)
    assert all(later < earlier for earlier, later in pairwise(learning_rates[:9]))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 5, 10])
@pytest.mark.parametrize("min_lr", [0.0, 1e-4])
def test_the_rate_reaches_its_minimum_just_after_the_last_step(schedule: str, warmup: int, min_lr: float) -> None:
    flags = ["--trainer.schedule", schedule, "--trainer.warmup-steps", str(warmup), "--trainer.lr", "0.001"]
    config = parse([*flags, "--steps", "10", "--trainer.min-lr", str(min_lr)])
    options = train_options(config)
    learning_rates = [learning_rate(options, step) for step in range(10)]
    peak = max(warmup, 1) - 1
    assert min(learning_rates) > 0
    assert min(learning_rates[peak:]) > min_lr
    assert max(learning_rates) == 0.001
    assert all(later < earlier for earlier, later in pairwise(learning_rates[peak:]))
    if peak < 9:
        assert learning_rate(options, 10) == pytest.approx(min_lr, abs=1e-12)


def test_steps_with_a_rate_decayed_to_0_are_refused() -> None:
    flags = ["--trainer.schedule", "linear", "--trainer.warmup-steps", "2", "--trainer.decay-steps", "5"]
    with pytest.raises(ConfigError, match="the last 3 of 10 steps would train with a learning rate of 0"):
        parse([*flags, "--steps", "10"])
    assert parse([*flags, "--steps", "7"]).trainer.decay_steps == 5
    assert parse([*flags, "--steps", "10", "--trainer.min-lr", "0.0001"]).steps == 10


def test_without_a_warm_up_the_first_step_has_the_full_rate() -> None:
    assert learning_rate(TrainOptions(lr=1.0, warmup_steps=0), 0) == 1.0
