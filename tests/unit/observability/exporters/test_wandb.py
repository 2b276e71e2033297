"""W&B by the real library, offline: one W&B run for a run, over all its resumes and exports."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from common.exported_numbers import wandb_history, wandb_numbers, wandb_run

from flowrt.errors import ConfigError
from flowrt.observability.exporters.exported_names import exported_numbers
from flowrt.observability.exporters.feed import Feed
from flowrt.observability.exporters.wandb_run import WandbProgress, WandbRun
from flowrt.recipes.config_io import defaults, to_toml
from flowrt.recipes.run_dir import run_name
from tests.unit.observability.exporters.written_run import event, metrics, shares, write_lines, write_run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
VARIABLES = ("API_KEY", "MODE", "RUN_ID", "NAME", "PROJECT", "ENTITY")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("flowrt.observability.exporters.wandb_run.FINISH_S", 300.0)  # on a busy machine


def export(run_dir: Path, steps: str = "", last: int | None = None) -> str:
    """Export to files in the run directory; returns the last message."""
    sink = WandbRun(run_dir, run_dir / "wandb", steps)
    Feed(run_dir, sink, 0, last).read_new(is_last=True)
    return sink.close()


def files(run_dir: Path) -> list[Path]:
    """The files of W&B, in the order of their creation."""
    paths = (run_dir / "wandb" / "wandb").glob("offline-run-*/run-*.wandb")
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns)


def again(steps: Iterable[int], after_s: float) -> list[dict[str, Any]]:
    """Lines of steps that are done after a resume, at a later time of the run clock."""
    return [line | {"wall_s": line["wall_s"] + after_s} for line in metrics(steps, seed=7)]


def test_a_resumed_run_continues_its_wandb_run(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 9)
    assert "upload it with: wandb sync" in export(run_dir)
    before = metrics(range(6))
    resumed = again(range(6, 12), after_s=20.0)
    write_lines(run_dir / "metrics.jsonl", [*before, *resumed])
    with (run_dir / "attribution.jsonl").open("a") as file:
        file.writelines(
            json.dumps(line | {"to_s": end["wall_s"]}) + "\n"
            for line, end in zip(shares(range(6, 12)), resumed, strict=True)
        )
    export(run_dir)
    first, second = files(run_dir)
    runs = [wandb_run(path) for path in (first, second)]
    assert runs[0].run_id == runs[1].run_id
    assert [run.display_name for run in runs] == [run_name(run_dir, "")] * 2
    numbers = wandb_numbers(second)
    assert list(numbers) == list(range(6, 12))
    assert numbers[6]["rewound"] == 1
    for line in resumed:
        assert numbers[line["step"]].items() >= exported_numbers(line).items()
        assert numbers[line["step"]]["time/rollout/gate"] == pytest.approx(0.3)
    counts = [line["_step"] for path in (first, second) for line in wandb_history(path)]
    assert counts == sorted(set(counts)), "W&B ignores steps that do not increase"
    assert "has all steps" in export(run_dir)
    assert files(run_dir) == [first, second]


def test_a_rollback_that_is_followed_live_is_logged_once(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 9)
    sink = WandbRun(run_dir, run_dir / "wandb")
    feed = Feed(run_dir, sink)
    feed.read_new()
    write_lines(run_dir / "metrics.jsonl.new", [*metrics(range(6)), *again(range(6, 8), after_s=20.0)])
    (run_dir / "metrics.jsonl.new").rename(run_dir / "metrics.jsonl")
    feed.read_new(is_last=True)
    sink.close()
    history = wandb_history(*files(run_dir))
    assert [line["step"] for line in history if "train/reward" in line] == [*range(9), 6, 7]
    assert [line["step"] for line in history if "rewound" in line] == [6]


def test_a_run_in_another_directory_is_the_same_wandb_run(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 3)
    export(run_dir)
    moved = run_dir.rename(tmp_path / "moved")
    write_lines(moved / "metrics.jsonl", metrics(range(5)))
    export(moved)
    first, second = files(moved)
    assert wandb_run(first).run_id == wandb_run(second).run_id
    assert list(wandb_numbers(second)) == [3, 4]


def test_nothing_is_logged_where_wandb_is_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run_dir = write_run(tmp_path / "run", 3)
    export(run_dir)
    assert files(run_dir) == []


def test_another_run_in_the_same_directory_is_another_wandb_run(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 3)
    first = WandbRun(run_dir, run_dir / "wandb")
    Feed(run_dir, first).read_new(is_last=True)
    first.close()
    shutil.rmtree(run_dir)
    write_run(run_dir, 3)
    write_lines(run_dir / "events.jsonl", [event(1.0, "started", "a run has started")])
    second = WandbRun(run_dir, run_dir / "wandb")
    Feed(run_dir, second).read_new(is_last=True)
    second.close()
    assert first.id != second.id
    assert list(wandb_numbers(*files(run_dir))) == [0, 1, 2]


def test_an_export_of_some_steps_is_a_wandb_run_of_its_own(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 4)
    export(run_dir, "0:1", last=1)
    export(run_dir)
    part, whole = files(run_dir)
    assert wandb_run(part).run_id != wandb_run(whole).run_id
    assert wandb_run(part).display_name.endswith(" steps 0:1")
    assert (list(wandb_numbers(part)), list(wandb_numbers(whole))) == ([0, 1], [0, 1, 2, 3])


def test_variables_of_wandb_set_name_id_and_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write_run(tmp_path / "run", 2)
    for name, value in (("NAME", "mine"), ("RUN_ID", "abc123"), ("PROJECT", "one")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    export(run_dir)
    [path] = files(run_dir)
    record = wandb_run(path)
    assert (record.display_name, record.run_id, record.project) == ("mine", "abc123", "one")
    monkeypatch.setenv("WANDB_PROJECT", "other")  # where nothing has been logged
    export(run_dir)
    assert list(wandb_numbers(files(run_dir)[1])) == [0, 1]
    monkeypatch.setenv("WANDB_MODE", "nowhere")
    with pytest.raises(ConfigError, match="WANDB_MODE is 'nowhere'; use one of online, offline, disabled, shared"):
        export(run_dir)


PLACE = ("offline", "", "flowrt")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"logs": "x"}', '{"place": ["offline", "", "flowrt"], "logs": null}'),
        '{"place": ["offline", "", "other"], "logs": 7}',
    ],
)
def test_a_note_of_what_was_logged_that_is_unreadable_or_of_another_place_is_ignored(tmp_path: Path, text: str) -> None:
    path = tmp_path / "note.json"
    path.write_text(text)
    assert WandbProgress.read(path, PLACE) == WandbProgress(PLACE)
    assert WandbProgress.read(tmp_path / "none", PLACE) == WandbProgress(PLACE)
    path.write_text('{"place": ["offline", "", "flowrt"], "logs": 7}')
    assert WandbProgress.read(path, PLACE) == WandbProgress(PLACE, logs=7)


@pytest.mark.parametrize(
    ("run_dir", "recipe", "expected"),
    [
        ("runs/gsm8k-20261128-091530-77", "gsm8k", "gsm8k-20261128-091530-77"),
        ("jobs/4711/run", "gsm8k", "gsm8k-4711"),
        ("jobs/4711/run", "/home/me/sums.py:SUMS", "sums-4711"),
        ("jobs/4711/run", "", "4711"),
    ],
)
def test_the_run_of_a_job_is_named_after_its_recipe_and_the_job(run_dir: str, recipe: str, expected: str) -> None:
    assert run_name(Path(run_dir), recipe) == expected


def test_a_wandb_run_has_the_name_of_the_job(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "4711" / "run", 1)
    (run_dir / "config.toml").write_text(to_toml(defaults("arithmetic")))
    export(run_dir)
    assert wandb_run(*files(run_dir)).display_name == "arithmetic-4711"
