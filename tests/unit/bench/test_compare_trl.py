"""The bound of bench/compare_trl.py on a hand-written timeline: mean busy time per worker of the busier role."""

from pathlib import Path

import pytest
from compare_trl import busiest_s as busiest_s_of

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
