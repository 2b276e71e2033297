"""Ranges of steps for `flowrt export`: one without a step is refused, and nothing is written."""

from pathlib import Path

import pytest

from tests.integration.helpers.forked import run_flowrt
from tests.unit.observability.exporters.written_run import write_run

FORMATS = {
    "tensorboard": ("--tensorboard", "tb"),
    "wandb": ("--wandb", "--wandb-dir", "wb"),
    "perfetto": ("--perfetto", "trace.json"),
    "own": ("--exporter", "own.py:Exporter"),
    "two": ("--html", "run.html", "--prometheus", "text", "--tensorboard", "tb"),
}
OWN = """
open("made", "w").close()
class Exporter:
    def step(self, line): pass
    def samples(self, rows): pass
    def close(self): pass
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return write_run(tmp_path / "run", 5)


def refusal(run_dir: Path, *arguments: str) -> str:
    """The sentence with which an export is refused; asserts that no file is written."""
    before = sorted(run_dir.parent.rglob("*"))
    completed = run_flowrt(["export", str(run_dir), *arguments], run_dir.parent)
    assert completed.returncode == 2, completed.stdout
    [sentence] = completed.stderr.splitlines()
    assert sorted(run_dir.parent.rglob("*")) == before
    return sentence


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("steps", ["5:9", "100:", "7"])
def test_a_range_without_a_step_is_refused(run_dir: Path, name: str, steps: str) -> None:
    expected = f"--steps {steps}: run {run_dir} has no such step; its steps are 0 to 4"
    assert refusal(run_dir, *FORMATS[name], "--steps", steps).endswith(expected)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "own"])
def test_a_run_without_a_step_is_refused(run_dir: Path, name: str) -> None:
    (run_dir / "metrics.jsonl").write_text("")
    assert "has no such step; it has no step yet" in refusal(run_dir, *FORMATS[name], "--steps", "0:9")
    assert "it has no step yet; --follow waits for its steps" in refusal(run_dir, *FORMATS[name])


@pytest.mark.parametrize(
    ("steps", "expected"),
    [("9:5", "the last step is before the first"), ("a:b", "takes A:B"), ("-1:2", "takes A:B"), ("1:2:3", "takes A:B")],
)
def test_a_malformed_range_is_refused(run_dir: Path, steps: str, expected: str) -> None:
    assert expected in refusal(run_dir, "--tensorboard", "tb", f"--steps={steps}")


def test_a_finished_run_is_not_followed_for_steps_that_will_not_come(run_dir: Path) -> None:
    assert "has no such step" in refusal(run_dir, "--tensorboard", "tb", "--steps", "5:9", "--follow")


def test_steps_between_those_of_the_run_are_refused(run_dir: Path) -> None:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text(lines[0] + lines[4])
    assert "has no such step" in refusal(run_dir, "--tensorboard", "tb", "--steps", "1:3")


@pytest.mark.parametrize("steps", ["4:9", "2:", ":2", "0"])
def test_a_range_with_a_step_is_exported(run_dir: Path, steps: str) -> None:
    completed = run_flowrt(["export", str(run_dir), "--tensorboard", "tb", "--steps", steps], run_dir.parent)
    assert completed.returncode == 0, completed.stderr
