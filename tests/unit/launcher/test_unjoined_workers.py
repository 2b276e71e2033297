"""Processes whose workers have not joined are reported at growing intervals, with the reason if the log has it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowrt.launcher.processes import Child
from flowrt.launcher.unjoined import MAX_LINES, MAX_SENTENCES, UnjoinedWorkers

AFTER_S = 30.0
BUSY = "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)"


class Harness:
    """Processes that do not end, and a driven clock."""

    def __init__(self, patch: pytest.MonkeyPatch, logs: Path, *names: str) -> None:
        self.now = 1000.0
        self.lines: list[str] = []
        self.logs = logs
        self.children = [self.child(name, 1) for name in names]
        running: Any = SimpleNamespace(running=lambda: self.children)
        workers = {name: [name] for name in names} | {"trainer": ["trainer-0", "trainer-1"]}
        self.unjoined = UnjoinedWorkers(running, workers, AFTER_S, self.lines.append)
        patch.setattr("flowrt.launcher.unjoined.monotonic", lambda: self.now)

    def child(self, name: str, pid: int) -> Child:
        process: Any = SimpleNamespace(pid=pid, returncode=None)
        (self.logs / f"{name}.log").touch()
        return Child(name, process, self.logs / f"{name}.log")

    def after(self, s: float, *present: str) -> tuple[list[str], dict[str, str]]:
        """The new lines and the sentences when this much time has passed."""
        self.now += s
        self.lines.clear()
        sentences = self.unjoined.check(present)
        return list(self.lines), sentences


def test_the_line_names_the_worker_the_reason_and_the_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    harness = Harness(monkeypatch, tmp_path, "rollout-0", "rollout-2")
    (tmp_path / "rollout-2.log").write_text(f"{BUSY}\n")
    assert harness.after(0.0) == ([], {})
    assert harness.after(AFTER_S - 1, "rollout-0") == ([], {})
    [line], sentences = harness.after(2.0, "rollout-0")
    assert line.startswith("rollout-2 has not joined for 31 s: SLURM holds its step back")
    assert line.endswith(f"its log {tmp_path}/rollout-2.log ends: {BUSY}")
    assert sentences == {"rollout-2": line}
    assert harness.after(5.0, "rollout-0", "rollout-2") == ([], {})


def test_it_is_repeated_after_four_times_as_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    harness = Harness(monkeypatch, tmp_path, "rollout-0")
    harness.after(0.0)
    times = [second for second in range(1, 2000) if harness.after(1.0)[0]]
    assert times == [30, 120, 480, 1920]
    assert "has not joined for 33 min" in harness.after(1.0)[1]["rollout-0"]


def test_a_worker_that_joined_and_left_is_not_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    harness = Harness(monkeypatch, tmp_path, "rollout-0")
    harness.after(0.0, "rollout-0")
    assert harness.after(100.0) == ([], {})
    harness.children = [harness.child("rollout-0", 2)]  # a new process has its own time
    assert harness.after(100.0) == ([], {})
    assert harness.after(AFTER_S)[0] == [
        f"rollout-0 has not joined for 30 s; its log {tmp_path}/rollout-0.log is empty"
    ]


def test_missing_ranks_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    harness = Harness(monkeypatch, tmp_path, "trainer")
    harness.after(0.0)
    [line], _ = harness.after(AFTER_S, "trainer-0")
    assert line.startswith("trainer-1 has not joined for 30 s")


def test_of_many_workers_few_are_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    harness = Harness(monkeypatch, tmp_path, *(f"rollout-{index}" for index in range(100)))
    harness.after(0.0)
    lines, sentences = harness.after(AFTER_S)
    assert len(lines) == MAX_LINES + 1
    assert lines[-1] == f"{100 - MAX_LINES} more processes have not joined; see {tmp_path}"
    assert len(sentences) == MAX_SENTENCES
