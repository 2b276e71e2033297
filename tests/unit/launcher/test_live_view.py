"""The live view of a run, and its final table."""

import io
import math
import re

import pytest
from rich.console import Console

from flowrt.launcher.views.live import LiveView, bars, summary_table
from flowrt.launcher.views.waits import duration

LATEST = {
    "step": 6,
    "reward": 0.25,
    "response_length": 4.5,
    "staleness_mean": 0.75,
    "staleness_max": 1,
    "samples_per_s": 512.0,
}
STATUS = {
    "step": 7,
    "steps": 120,
    "workers": {"source": "source", "rollout-0": "rollout", "trainer-0": "trainer"},
    "vacancies": {},
    "waits": [["rollout-0", "newer weights: 3 slots ready", 1.5]],
    "guards": {"firing": [], "log": []},
    "latest": LATEST,
}
SUMMARY = {
    "recipe": "arithmetic",
    "seed": 3,
    "steps": 120,
    "wall_s": 39.0,
    "reward_window": 10,
    "reward_first": 0.25,
    "reward_last": 0.97,
    "eval_first": 0.33,
    "eval_last": None,
    "samples": 15360,
    "samples_per_s": 503.0,
    "tokens_per_s": 8692.0,
    "staleness_mean": 0.99,
    "staleness_max": 1,
    "staleness_bound": 1,
    "prompts_lost": 0,
    "prompts_trained_twice": 0,
    "busy_fraction": {"rollout": 0.24, "trainer": 0.93},
    "time": {"rollout": {"busy": 0.24, "gate": 0.7, "samples": 0.001}, "trainer": {"busy": 0.93}},
}
LINE = "step 7/120  reward 0.250  length 4.5  staleness 0.75 (max 1)  512 samples/s"


def test_a_terminal_shows_the_step_and_the_waits_of_workers() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, force_terminal=True, width=100)) as view:
        view.show(STATUS)
    shown = out.getvalue()
    for expected in (LINE, "rollout-0", "1.5 s for", "newer weights: 3 slots ready", "busy", "source, trainer-0"):
        assert expected in shown, expected


def test_other_output_gets_a_line_every_ten_steps() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, width=100)) as view:
        for step in range(25):
            view.show({**STATUS, "step": step + 1, "latest": {**LATEST, "step": step}})
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/120", "11/120", "21/120"]


WARNING = "guard nll above 1 for 1 step (warn): nll is 3, outside its limit for 1 step"


def test_a_firing_guard_is_displayed_and_logged_once() -> None:
    fired = {**STATUS, "guards": {"firing": [WARNING], "log": [[6, WARNING]]}}
    out = io.StringIO()
    with LiveView(Console(file=out, width=100)) as view:
        for _ in range(3):
            view.show(fired)
    assert out.getvalue().splitlines() == [f"step 6: {WARNING}", LINE]
    out = io.StringIO()
    with LiveView(Console(file=out, force_terminal=True, width=100)) as view:
        view.show(fired)
    assert f"step 6: {WARNING}" in out.getvalue()
    assert out.getvalue().count(WARNING) == 2, "above the display, and in it while the guard fires"


def test_the_wait_for_the_first_samples_is_displayed() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, force_terminal=True, width=100)) as view:
        view.show({**STATUS, "step": 0, "latest": {}})
    assert "step 0/120: waiting for the first samples" in out.getvalue()


def test_the_table_has_every_number_of_the_summary() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(summary_table(SUMMARY))
    expected = ("120", "39.0 s", "0.250 → 0.970", "0.330 → -", "15360 (503/s)", "8692", "0.99 (1, 1)", "0, 0")
    for text in (*expected, "gate 70%, busy 24%", "busy 93%"):
        assert text in out.getvalue(), text


@pytest.mark.parametrize(("per_s", "text"), [(503.2, "503"), (3.54, "3.5"), (0.0312, "0.031"), (0.0004, "0.0004")])
def test_no_rate_of_a_slow_run_is_zero(per_s: float, text: str) -> None:
    assert f"{text} samples/s" in shown({**STATUS, "latest": {**LATEST, "samples_per_s": per_s}})
    out = io.StringIO()
    Console(file=out, width=100).print(summary_table({**SUMMARY, "samples_per_s": per_s, "tokens_per_s": per_s}))
    assert f"({text}/s)" in out.getvalue()
    assert out.getvalue().count(text) >= 2


def shown(status: dict[str, object], height: int = 24) -> str:
    """The display of a terminal for this status."""
    out = io.StringIO()
    with LiveView(Console(file=out, force_terminal=True, width=120, height=height, color_system=None)) as view:
        view.show(status)
    return out.getvalue()


def test_equal_waits_share_a_line_so_that_busy_workers_fit() -> None:
    admission = [["source", "admission: 32 groups live, step 5 in training", 0.5 + at] for at in range(16)]
    slots = [[f"rollout-{at}", "slots ready for rollout", 2.0] for at in range(64)]
    display = shown({**STATUS, "waits": admission + slots})
    words = " ".join(display.split())
    assert "source x16 waits 15.5 s for admission: 32 groups live, step 5 in training" in words
    assert "rollout-0, rollout-1, rollout-2 and 61 more waits 2.0 s for slots ready for rollout" in words
    assert display.count("admission") == 1
    assert "busy trainer-0" in words
    assert re.search(r"^reward ", display, re.MULTILINE)  # below the progress bar, not after it


def test_the_time_left_and_the_last_evaluation_are_shown() -> None:
    evaluated = {"held_out": {"evaluations": 2, "version": 40, "avg@4": 0.5, "avg@4_error": 0.125}}
    display = shown({**STATUS, "eta_s": 754.0, "evaluated": evaluated})
    assert f"{LINE}  13 min left" in display
    assert "evaluation held_out of version 40: avg@4 0.500 ± 0.125" in display


@pytest.mark.parametrize(
    ("rewards", "text"),
    [
        ([0.0, 0.5, 1.0], "▁▅█  0 to 1"),
        ([-3.0, -2.0, -1.0], "▁▅█  -3 to -1"),
        ([0.0, 100.0, 40.0], "▁█▄  0 to 100"),
        ([0.98, 0.981, 0.982], "▁▅█  0.98 to 0.982"),
        ([7.0, 7.0], "▅▅  7"),
        ([0.0], "▅  0"),
        ([1.0, math.nan, 2.0, math.inf, -math.inf], "▁ █    1 to 2"),
        ([5.0, math.nan, math.inf], "▅    5"),
        ([math.nan], ""),
        ([], ""),
        ([-1.7e308, 0.0, 1.7e308], "▁▅█  -1.7e+308 to 1.7e+308"),
    ],
)
def test_bars_of_rewards_of_any_range(rewards: list[float], text: str) -> None:
    assert bars(rewards) == text


def test_the_display_has_the_range_of_rewards() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, force_terminal=True, width=80, color_system=None)) as view:
        for step in range(120):
            view.show({**STATUS, "step": step + 1, "latest": {**LATEST, "step": step, "reward": -40.0 * step}})
    assert "reward █" in out.getvalue()
    assert "▁  -4.76e+03 to -2.8e+03" in out.getvalue()


def test_a_step_without_a_reward_is_a_gap() -> None:
    out = io.StringIO()
    without = {name: value for name, value in LATEST.items() if name != "reward"}
    with LiveView(Console(file=out, force_terminal=True, width=80, color_system=None)) as view:
        for step, latest in enumerate((LATEST, without, LATEST)):
            view.show({**STATUS, "latest": {**latest, "step": step}})
    assert "reward ▅ ▅  0.25" in out.getvalue()


def test_durations_are_rounded_to_readable_units() -> None:
    assert [duration(seconds) for seconds in (0.4, 99, 100, 5_000, 11_100)] == [
        "0 s",
        "99 s",
        "2 min",
        "83 min",
        "3 h 05 min",
    ]


def test_the_preparation_of_a_run_shows_its_progress_and_duration() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, force_terminal=True, width=100)) as view:
        view.prepare("warm start, step 46: mean reward \x1b0.297")
    assert "warm start, step 46: mean reward \\x1b0.297" in out.getvalue()
    table = Console(file=io.StringIO(), width=120)
    table.print(summary_table(SUMMARY, 508.04))
    assert isinstance(table.file, io.StringIO)
    assert "39.0 s, after 508.0 s of preparation" in table.file.getvalue()
