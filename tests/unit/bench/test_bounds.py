"""Which missed bounds fail a bench."""

import math

from common.report import beyond

BOUNDS = {"wrong": 0.0, "rounding": 1e-12, "start_s": 5.0}
FLOORS = {"ratio": 0.95}


def test_every_missed_bound_fails_a_full_run() -> None:
    metrics = {"wrong": 1.0, "rounding": 1e-11, "start_s": 6.0, "ratio": 0.9, "other": 7.0}
    assert beyond(metrics, BOUNDS, FLOORS, quick=False) == ["wrong", "rounding", "start_s", "ratio"]
    assert beyond({"wrong": 0.0, "start_s": 5.0, "ratio": 0.95}, BOUNDS, FLOORS, quick=False) == []
    assert beyond({"start_s": math.nan, "ratio": math.nan}, BOUNDS, FLOORS, quick=False) == ["start_s", "ratio"]


def test_only_errors_fail_a_quick_run() -> None:
    metrics = {"wrong": 1.0, "rounding": 1e-11, "start_s": 6.0, "ratio": 0.9}
    assert beyond(metrics, BOUNDS, FLOORS, quick=True) == ["wrong", "rounding"]
