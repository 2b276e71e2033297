"""The lines of a folder of runs: states, numbers, order, and folders with anything else in them."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.errors import ConfigError
from flowrt.observability import runs_folder
from flowrt.observability.runs_folder import KILLED, NOT_BEGUN, RunLine, RunsFolder
from flowrt.recipes.config_io import defaults, to_toml
from flowrt.runtime.files import RunLock

CONFIG = to_toml(defaults("arithmetic"))


def create(path: Path, steps: int = 3, code: int | None = 0, started: float = 1.8e9, reason: str = "over") -> Path:
    """A run of 120 steps, of which ``steps`` have ended; without a summary if ``code`` is None."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(CONFIG)
    lines = [
        {"step": step, "wall_s": 60.0 * step, "reward": step / 10, "samples_per_s": 0.0167} for step in range(steps)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "events.jsonl").write_text(json.dumps({"kind": "started", "text": "x", "unix_s": started}) + "\n")
    if code is not None:
        summary = {"exit_code": code, "reason": reason, "samples_per_s": 0.015}
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def age(run_dir: Path, seconds: float = 3600.0) -> None:
    """Set the times of all files to this long ago."""
    then = time.time() - seconds
    for path in run_dir.rglob("*"):
        os.utime(path, (then, then))


def by_name(folder: Path) -> dict[str, RunLine]:
    return {line.name: line for line in RunsFolder(folder).scan()}


def test_states_and_numbers_are_those_of_the_files(tmp_path: Path) -> None:
    create(tmp_path / "complete", 120)
    create(tmp_path / "stopped", 7, 130, reason="interrupted (SIGTERM)")
    create(tmp_path / "guarded", 7, 5, reason="reward below 0.1")
    create(tmp_path / "failed", 2, 1, reason="no rollout worker")
    age(create(tmp_path / "killed", 12, None))
    (tmp_path / "not begun").mkdir()
    (tmp_path / "not begun" / "config.toml").write_text(CONFIG)
    age(tmp_path / "not begun")
    running = create(tmp_path / "running", 12, None)
    lock = RunLock(running)
    (running / "address").write_text("tcp://127.0.0.1:1")
    age(running)
    listed = by_name(tmp_path)
    lock.release()
    assert {name: (line.state, line.reason) for name, line in listed.items()} == {
        "complete": ("complete", ""),
        "stopped": ("stopped", "interrupted (SIGTERM)"),
        "guarded": ("stopped", "reward below 0.1"),
        "failed": ("failed", "no rollout worker"),
        "killed": ("failed", KILLED),
        "not begun": ("failed", NOT_BEGUN),
        "running": ("running", ""),
    }
    line = listed["running"]
    assert (line.done, line.steps, line.recipe, line.samples_per_s) == (12, 120, "arithmetic", 0.0167)
    assert line.reward == pytest.approx(0.65)  # of the steps 2 to 11
    assert listed["failed"].samples_per_s == 0.015
    create(tmp_path / "no step", 0, 1, reason="no rollout worker")
    assert by_name(tmp_path)["no step"].samples_per_s is None


def test_the_program_of_the_guide_prints_runs_differences_and_resources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    create(tmp_path / "runs" / "old", 120, started=1.0)
    new = create(tmp_path / "runs" / "new", 7, 130, started=2.0)
    (new / "config.toml").write_text(CONFIG.replace("steps = 120", "steps = 9", 1))
    used = {"workers": 1, "devices": 1, "tokens_per_s": 250.5, "figures": {"cache": [0.25, 0.5, 0.75]}}
    line = {"step": 6, "from_s": 5.0, "to_s": 6.0, "roles": {}, "roots": [], "worst": {}}
    resources = {"from_s": 5.0, "to_s": 6.0, "roles": {"rollout": used}, "worst": {}}
    (new / "attribution.jsonl").write_text(json.dumps({**line, "resources": resources}) + "\n")
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "seeing.md").read_text()
    [source] = [block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "RunsFolder" in block]
    monkeypatch.chdir(tmp_path)
    exec(compile(source, "seeing.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.splitlines() == [
        "new stopped 7 of 9 0.3 0.015",
        "old complete 120 of 120 11.45 0.015",
        "steps 9 120",
        "6 rollout 250.5 {'cache': [0.25, 0.5, 0.75]}",
    ]


def test_a_run_of_another_host_runs_while_it_writes(tmp_path: Path) -> None:
    run_dir = create(tmp_path / "run", 3, None)
    (run_dir / "address").write_text("tcp://10.0.0.7:4321")
    assert by_name(tmp_path)["run"].state == "running"
    age(run_dir)
    assert by_name(tmp_path)["run"].state == "failed"
    (run_dir / "recording").mkdir()
    (run_dir / "recording" / "0001-0000.fr").touch()
    assert by_name(tmp_path)["run"].state == "running"
    (run_dir / "address").write_text("tcp://127.0.0.1:4321")  # a controller of this host without its lock is gone
    assert by_name(tmp_path)["run"].state == "failed"


def test_new_resumed_and_deleted_runs_are_followed(tmp_path: Path) -> None:
    old, new = create(tmp_path / "old", started=1.0), tmp_path / "new"
    folder = RunsFolder(tmp_path)
    create(new, started=2.0)
    assert [line.name for line in folder.scan()] == ["new", "old"]
    assert folder.run_dir("new") == new
    (old / "summary.json").unlink()
    (old / "metrics.jsonl").write_text('{"step": 9, "samples_per_s": 1}\n')
    lock = RunLock(old)
    assert [(line.state, line.done) for line in folder.scan()] == [("complete", 3), ("running", 10)]
    lock.release()
    for path in new.iterdir():
        path.unlink()
    new.rmdir()
    assert [line.name for line in folder.scan()] == ["old"]
    assert folder.run_dir("new") is None


def test_other_directories_and_damaged_files_are_tolerated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none of its directories is one"):
        RunsFolder(tmp_path)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.toml").write_text("[project]\nname = 'other'\n")
    (tmp_path / "model" / "summary.json").write_text("[1]")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    create(tmp_path / ".hidden")
    create(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")))
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "config.toml")
    os.mkfifo(tmp_path / "pipe" / "metrics.jsonl")
    with pytest.raises(ConfigError, match="none of its directories is one"):
        RunsFolder(tmp_path)
    damaged = create(tmp_path / "damaged")
    for name in ("metrics.jsonl", "events.jsonl", "summary.json"):
        (damaged / name).write_bytes(b"\x00\xff{" * 9000)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"step": 4, "reward": NaN, "samples_per_s": 1e999}\n{"step": 5, "rew')
    listed = by_name(tmp_path)
    assert sorted(listed) == ["bare", "damaged"]
    assert (listed["damaged"].state, listed["damaged"].reason) == ("failed", "summary.json cannot be read")
    assert (listed["damaged"].done, listed["damaged"].reward) == (0, None)
    assert (listed["bare"].done, listed["bare"].steps, listed["bare"].reward, listed["bare"].samples_per_s) == (
        5,
        0,
        None,
        None,
    )


def test_a_finished_run_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        create(tmp_path / f"run-{number}")
    folder = RunsFolder(tmp_path)
    seen: list[Path] = []
    version = runs_folder._version

    def counted(path: Path) -> runs_folder.FileVersion | None:
        seen.append(path)
        return version(path)

    monkeypatch.setattr(runs_folder, "_version", counted)
    assert len(folder.scan()) == 20
    assert sorted(seen) == sorted(tmp_path / f"run-{number}" / "summary.json" for number in range(20))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), st.lists, max_leaves=3
)
FIELDS = st.sampled_from(["step", "reward", "samples_per_s", "unix_s", "exit_code", "reason"])
CONTENTS = st.binary(max_size=40) | st.dictionaries(FIELDS, JSON).map(lambda fields: json.dumps(fields).encode())
FILES = st.dictionaries(
    st.sampled_from(["config.toml", "metrics.jsonl", "events.jsonl", "summary.json", "address", ".lock"]), CONTENTS
)


@settings(max_examples=150, deadline=None)
@given(files=FILES)
def test_any_content_gives_a_line_or_none(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
    folder = tmp_path_factory.mktemp("runs")
    create(folder / "sound")
    (folder / "other").mkdir()
    for name, content in files.items():
        (folder / "other" / name).write_bytes(content)
    listed: dict[str, Any] = by_name(folder)
    assert set(listed) - {"other"} == {"sound"}
