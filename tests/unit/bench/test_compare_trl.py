"""bench/compare_trl.py: its bound and its time to a reward on written input; flowrt accepts its model and data."""

import argparse
import math
from pathlib import Path

import pytest
from compare_trl import FLOAT32, config, curve_figures, summary
from compare_trl import busiest_s as busiest_s_of
from end_to_end.task import make_data, make_model

from flowrt.launcher.model_check import check_model

# Both ranks have ended their first step at 2.5 s; the last step ends at 10 s. Between: 3 and 4 seconds of work.
TRAINERS = [
    ("trainer", "trainer-0", "train", 0.0, 1.0),
    ("trainer", "trainer-0", "step", 1.0, 2.0),
    ("trainer", "trainer-1", "step", 1.0, 2.5),
    ("trainer", "trainer-0", "train", 5.0, 7.0),
    ("trainer", "trainer-0", "step", 7.0, 8.0),
    ("trainer", "trainer-1", "train", 6.0, 9.0),
    ("trainer", "trainer-1", "step", 9.0, 10.0),
]
OTHERS = [("reward", "reward-0", "score", 0.0, 20.0)]


@pytest.mark.parametrize(
    ("rollouts", "busiest_s"),
    [
        # 2.5 + 3 seconds of the first worker; 4 of the second, whose two spans overlap for 1 second.
        ([("rollout-0", 0.0, 5.0), ("rollout-0", 7.0, 12.0), ("rollout-1", 2.5, 5.0), ("rollout-1", 4.0, 6.5)], 4.75),
        ([("rollout-0", 0.0, 3.0)], 3.5),
    ],
    ids=["rollouts", "trainers"],
)
def test_the_busier_role_counts_from_the_end_of_the_first_step(
    tmp_path: Path, rollouts: list[tuple[str, float, float]], busiest_s: float
) -> None:
    spans = [*TRAINERS, *OTHERS, *(("rollout", name, "generate", *times) for name, *times in rollouts)]
    names = ("role", "worker", "kind", "start_s", "end_s")
    lines = [dict(zip(names, span, strict=True)) for span in spans]
    assert busiest_s_of(lines) == pytest.approx(busiest_s)


def test_flowrt_accepts_the_model_and_the_data(tmp_path: Path) -> None:
    make_model(tmp_path / "model", 0)
    make_data(tmp_path / "data.jsonl", 0)
    arguments = argparse.Namespace(seed=0, steps=2, staleness=1, new_tokens=64, ranks=2, compile=False)
    check_model(config(tmp_path, arguments, FLOAT32))


def test_the_time_to_a_reward_ends_at_the_first_five_steps_with_that_mean() -> None:
    rewards = [0.0, 0.9, 0.9, 0.1, 0.9, 0.9, 0.9, 0.9]  # the means of five: 0.56, 0.74, 0.74, 0.74
    ends_s = [10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0]
    figures = curve_figures(rewards, ends_s, 70, 0.7)
    assert figures["seconds_to_reward"] == 5.0
    assert figures["samples_per_s"] == 10.0
    assert curve_figures(rewards, ends_s, 70, 0.8)["seconds_to_reward"] == math.inf


def test_a_target_that_few_seeds_reach_has_no_median_time() -> None:
    samples = {"reward": [0.9, 0.7, 0.8], "seconds_to_reward": [3.0, math.inf, math.inf]}
    metrics = summary({**samples, "baseline_seconds_to_reward": [2.0, 4.0, math.inf]})
    assert metrics == {
        "reward": 0.8,
        "reward_min": 0.7,
        "reached": pytest.approx(1 / 3),
        "baseline_seconds_to_reward": 4.0,
        "baseline_reached": pytest.approx(2 / 3),
    }
