"""Damaged ledger files: the error names the file and what to do, and the files are not changed."""

import dataclasses
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrt.cli import main
from flowrt.controller.events import AppendLedger
from flowrt.controller.storage.integrity import LEDGER, check_not_behind_checkpoint
from flowrt.controller.storage.ledger import Ledger
from flowrt.errors import FlowError
from flowrt.launcher.controller_main import main as controller
from flowrt.recipes.checkpoint_checksums import write_checksums
from flowrt.recipes.config_io import defaults, to_toml
from flowrt.recipes.run_dir import checkpoint_dir

STEPS = 100
PAGE, FRAME, HEADER = 4096, 4096 + 24, 32
COPY = "restore it from a copy"


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint, whose controller was killed: all its writes are in the write-ahead log."""
    run_dir, live = tmp_path_factory.mktemp("killed") / "run", tmp_path_factory.mktemp("live")
    run_dir.mkdir()
    ledger = Ledger(live / LEDGER)
    ledger.resume(0, 1.0)
    for step in range(STEPS):
        for prompt in range(8 * step, 8 * step + 8):
            for state in ("in_flight", "ready", "leased", "trained"):
                ledger.add(AppendLedger(prompt, 0, state, step), 1.0 + step)
        ledger.flush()
    ledger.persist()
    for path in live.iterdir():
        shutil.copy(path, run_dir)
    ledger.close()
    (run_dir / "model").mkdir()
    checkpoint = checkpoint_dir(run_dir, STEPS // 2)
    checkpoint.mkdir(parents=True)
    (checkpoint / "state").write_bytes(b"state")
    write_checksums(checkpoint)
    return run_dir


def checkpoint_log(path: Path) -> None:
    """Move the log into the file, as at a normal end of the controller."""
    Ledger(path).close()


def garbage_in_the_file(path: Path) -> None:
    checkpoint_log(path)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2 // PAGE * PAGE)
        file.write(os.urandom(2 * PAGE))


def zeros_in_the_file(path: Path) -> None:
    checkpoint_log(path)
    with path.open("r+b") as file:
        file.seek(2 * PAGE)
        file.write(bytes(3 * PAGE))


def short_file(path: Path) -> None:
    checkpoint_log(path)
    os.truncate(path, path.stat().st_size // 2 // PAGE * PAGE)


def empty_file(path: Path) -> None:
    """SQLite would delete the log of an empty file."""
    os.truncate(path, 0)


def short_log(path: Path) -> None:
    """The rest of the log is valid, but ends long before the checkpoint."""
    os.truncate(log(path), HEADER + 20 * FRAME + 100)


def no_log(path: Path) -> None:
    log(path).unlink()


def garbage_in_the_log(path: Path) -> None:
    damage_log(path, HEADER + 15 * FRAME)


def garbage_at_the_start_of_the_log(path: Path) -> None:
    damage_log(path, 0)


def missing_ledger(path: Path) -> None:
    for file in path.parent.glob(f"{LEDGER}*"):
        file.unlink()


def log(path: Path) -> Path:
    return path.with_name(f"{LEDGER}-wal")


def damage_log(path: Path, at: int) -> None:
    with log(path).open("r+b") as file:
        file.seek(at)
        file.write(os.urandom(PAGE))


DAMAGES = [
    garbage_in_the_file,
    zeros_in_the_file,
    short_file,
    empty_file,
    short_log,
    no_log,
    garbage_in_the_log,
    garbage_at_the_start_of_the_log,
]


@pytest.fixture
def run_dir(killed_run: Path, tmp_path: Path) -> Path:
    run_dir = Path(shutil.copytree(killed_run, tmp_path / "run"))
    (run_dir / "config.toml").write_text(to_toml(dataclasses.replace(defaults("arithmetic"), run_dir=str(run_dir))))
    return run_dir


def ledger_files(run_dir: Path) -> dict[str, bytes]:
    """The files of the ledger without the index of the log, which SQLite rebuilds for each reader."""
    return {path.name: path.read_bytes() for path in run_dir.glob(f"{LEDGER}*") if not path.name.endswith("-shm")}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_reading_a_damaged_ledger_is_an_error(
    damage: Callable[[Path], None], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run_dir / LEDGER)
    before = ledger_files(run_dir)
    assert main(["ledger", str(run_dir)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    [line] = output.err.splitlines()
    assert str(run_dir / LEDGER) in line
    assert COPY in line or f"flowrt resume {run_dir}" in line
    assert ledger_files(run_dir) == before


@pytest.mark.parametrize("damage", [*DAMAGES, missing_ledger], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("arguments", [(), ("--from-checkpoint",)], ids=["restart", "from checkpoint"])
def test_a_controller_does_not_start_with_a_damaged_ledger(
    damage: Callable[[Path], None],
    arguments: tuple[str, ...],
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    damage(run_dir / LEDGER)
    before = ledger_files(run_dir)
    monkeypatch.setattr(sys, "argv", ["controller", "--config", str(run_dir / "config.toml"), *arguments])
    assert controller() == 2
    [message] = [record.getMessage() for record in caplog.records]
    assert str(run_dir / LEDGER) in message
    assert COPY in message
    assert ledger_files(run_dir) == before


@pytest.mark.slow
@pytest.mark.parametrize("damage", [garbage_in_the_file, short_log], ids=lambda damage: damage.__name__)
def test_resume_reports_the_error_of_its_controller(damage: Callable[[Path], None], run_dir: Path) -> None:
    damage(run_dir / LEDGER)
    before = ledger_files(run_dir)
    command = [str(Path(sys.executable).with_name("flowrt")), "resume", str(run_dir)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 2, result.stdout + result.stderr
    [line] = result.stderr.splitlines()
    assert f"ledger {run_dir / LEDGER} " in line
    assert COPY in line
    assert ledger_files(run_dir) == before
    assert checkpoint_dir(run_dir, STEPS // 2).is_dir()


def test_damage_after_the_checkpoint_allows_a_rollback_to_it(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A power failure destroys the end of a log: the steps after the checkpoint are repeated."""
    path = run_dir / LEDGER
    end = log(path).stat().st_size
    damage_log(path, end - 20 * FRAME)
    with pytest.raises(FlowError, match=f"from frame .*; flowrt resume {run_dir} goes back to the newest checkpoint"):
        check_not_behind_checkpoint(path, STEPS // 2, require_intact_wal=True)
    check_not_behind_checkpoint(path, STEPS // 2, require_intact_wal=False)
    assert "those steps are repeated" in caplog.text
    os.truncate(log(path), end - 20 * FRAME + 7)
    check_not_behind_checkpoint(path, STEPS // 2, require_intact_wal=True)
    ledger = Ledger(path)
    ledger.resume(STEPS // 2, 0.0)
    states = ledger.account(live=[]).states
    assert states["trained"] == STEPS // 2 * 8
    assert set(states) == {"trained", "unread"}
    ledger.close()


def test_damage_that_sqlite_does_not_detect_is_reported(run_dir: Path) -> None:
    """Invalid records in valid pages."""
    path = run_dir / LEDGER
    with sqlite3.connect(path) as database:
        database.execute("INSERT INTO members VALUES ('rollout-0', 'rollout')")
        database.execute("INSERT INTO replay_log VALUES (1, 77, x'00')")
    database.close()
    ledger = Ledger(path)
    with pytest.raises(FlowError, match=f"ledger {path} cannot be read: .*flowrt resume {run_dir}"):
        ledger.recover()
    ledger.close()
    with sqlite3.connect(path) as database:
        database.execute("INSERT INTO pending_writes (data) VALUES (x'c1')")
    database.close()
    with pytest.raises(FlowError, match=f"ledger {path} cannot be read: pending write 1 .*{COPY}"):
        check_not_behind_checkpoint(path, 1, require_intact_wal=False)
    with pytest.raises(FlowError, match=f"ledger {path} cannot be opened: pending write 1 .*{COPY}"):
        Ledger(path)
