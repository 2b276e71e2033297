"""Every exporter has the numbers of metrics.jsonl, as the tool that reads them sees them."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from common.exported_numbers import (
    Numbers,
    metrics_numbers,
    prometheus_numbers,
    tensorboard_numbers,
    wandb_numbers,
)

from flowrt.observability.exporters.exported_names import exported_name, prometheus_name
from flowrt.observability.exporters.feed import Feed
from flowrt.observability.exporters.prometheus import prometheus_text
from flowrt.observability.exporters.tensorboard_files import TensorBoardFiles
from flowrt.observability.run_reader import RunReader
from tests.unit.observability.exporters.written_run import metrics, write_lines, write_run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
STEPS = 12


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", STEPS)


def export(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "flowrt.cli", "export", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)


def assert_equal(numbers: Numbers, run_dir: Path, *, exact: bool) -> None:
    """Every number of metrics.jsonl is there; ``exact``: in double precision, otherwise in single precision."""
    known = metrics_numbers(run_dir)
    assert len(known) == STEPS
    for step, line in known.items():
        for name, value in line.items():
            if name != "step":
                number = numbers[step][exported_name(name)]
                assert number == value if exact else number == pytest.approx(value, rel=2**-23)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Numbers]:
    """A run, and what `flowrt export` has written of it for TensorBoard."""
    place = tmp_path_factory.mktemp("exported")
    run_dir = write_run(place / "run", STEPS)
    done = export(run_dir, "--tensorboard", place / "tb")
    assert done.returncode == 0, done.stderr
    assert "illegal" not in done.stderr
    return run_dir, tensorboard_numbers(place / "tb")


@pytest.mark.slow
def test_tensorboard_has_all_numbers_in_single_precision(exported: tuple[Path, Numbers]) -> None:
    run_dir, numbers = exported
    assert_equal(numbers, run_dir, exact=False)
    assert numbers[3]["time/rollout/gate"] == pytest.approx(0.3)


def test_tensorboard_is_purged_after_a_rewind_and_a_repeated_export(run_dir: Path, tmp_path: Path) -> None:
    write_lines(run_dir / "metrics.jsonl", metrics(range(9)))
    files = TensorBoardFiles(tmp_path / "tb")
    feed = Feed(run_dir, files)
    feed.read_new()
    rewound = run_dir / "metrics.jsonl.new"
    write_lines(rewound, [*metrics(range(5)), *metrics(range(5, STEPS), seed=7)])
    rewound.rename(run_dir / "metrics.jsonl")
    feed.read_new(is_last=True)
    files.close()
    assert_equal(tensorboard_numbers(tmp_path / "tb"), run_dir, exact=False)
    for _ in range(2):  # the same directory again
        other = TensorBoardFiles(tmp_path / "tb")
        Feed(run_dir, other).read_new(is_last=True)
        other.close()
    assert_equal(tensorboard_numbers(tmp_path / "tb"), run_dir, exact=False)


@pytest.mark.slow
def test_a_wandb_file_has_all_numbers(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    done = export(run_dir, "--wandb", "--wandb-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"W&B run \w+ \(offline\) in ", done.stderr)
    assert "wandb sync" in done.stderr
    [path] = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    numbers = wandb_numbers(path)
    assert_equal(numbers, run_dir, exact=True)
    assert numbers[3]["time/rollout/gate"] == pytest.approx(0.3)


def test_prometheus_text_has_the_numbers_of_the_last_step(run_dir: Path) -> None:
    reader = RunReader(run_dir)
    status = {
        "live_groups": 3,
        "counts": {"states": {"rollout": {"at work": 1, "waiting": 4095}, "trainer": {"at work": 1}}},
        "waits": [["rollout-1", 'samples to "generate"\n', 4.5]],
        "cut_off": {"trainer": 1.0},
    }
    text = prometheus_text(reader.figures(), status)
    known = metrics_numbers(run_dir)
    last = known[STEPS - 1] | {name: value for name, value in known[10].items() if name.startswith("eval/")}
    assert prometheus_numbers(text) == {
        **{prometheus_name(exported_name(name)): value for name, value in last.items() if name != "step"},
        "flowrt_step": STEPS - 1,
    }
    assert "flowrt_oldest_wait_seconds 4.5\n" in text
    assert "worker_seconds_total" not in text  # attribution.jsonl is not read yet
    reader.read_attribution()
    text = prometheus_text(reader.figures(), status)
    gate = text.partition('flowrt_worker_seconds_total{role="rollout",cause="gate"} ')[2].splitlines()[0]
    assert float(gate) == pytest.approx(0.6 * STEPS)
    assert 'flowrt_workers{role="rollout",state="waiting"} 4095\n' in text
    assert 'flowrt_workers{role="trainer",state="at_work"} 1\n' in text
    assert "flowrt_workers_cut_off 1\n" in text
    assert "rollout-1" not in text  # no label per worker


def test_prometheus_text_has_the_evaluation_after_the_last_step(tmp_path: Path) -> None:
    lines = [{"step": 0, "wall_s": 1.0}, {"step": 1, "wall_s": 2.0, "eval/test/avg@1": 0.25, "eval/test/version": 1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    results = [{"name": "test", "version": version, "wall_s": 3.0, "avg@1": version / 4} for version in (1, 2)]
    path = tmp_path / "evaluations.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in results))
    reader = RunReader(tmp_path)
    numbers = prometheus_numbers(prometheus_text(reader.figures()))
    assert (numbers["flowrt_eval_test_version"], numbers["flowrt_eval_test_avg_1"]) == (2, 0.5)
    assert "flowrt_eval_test_wall_s" not in numbers
    with path.open("a") as file:
        file.write(json.dumps(results[0] | {"version": 3, "avg@1": 1.0, "pass@1": float("nan")}) + "\n")
    reader.read_new()
    numbers = prometheus_numbers(prometheus_text(reader.figures()))
    assert (numbers["flowrt_eval_test_version"], numbers["flowrt_eval_test_avg_1"]) == (3, 1)


@pytest.mark.slow
def test_randomly_chosen_tensorboard_numbers_equal_the_metrics(exported: tuple[Path, Numbers]) -> None:
    run_dir, board = exported
    known = metrics_numbers(run_dir)
    draw = random.Random(0)
    for _ in range(50):
        step = draw.randrange(STEPS)
        name = draw.choice(sorted(known[step].keys() - {"step"}))
        assert board[step][exported_name(name)] == pytest.approx(known[step][name], rel=2**-23)
