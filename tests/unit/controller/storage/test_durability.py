"""Durability: a checkpoint is synced before its rename, and the ledger before the checkpoint."""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowrt.controller.events import AppendLedger
from flowrt.controller.storage.ledger import Ledger
from flowrt.engines.simulated.engine import SimulatedTrainer
from flowrt.engines.simulated.time import ManualSimClock
from flowrt.engines.simulated.workload import TrainCost
from flowrt.engines.tiny_model import wrap_tokenizer
from flowrt.protocol.messages import Position
from flowrt.ranks.barrier import RankCollectives
from flowrt.recipes.config import CheckpointConfig, RunConfig
from flowrt.recipes.run_dir import checkpoint_dir
from flowrt.recipes.tasks.arithmetic import Arithmetic
from flowrt.roles.checkpoints import Checkpoints, keep_model
from flowrt.runtime.progress import Progress

Entries = dict[Path, int]


class Disk:
    """Records which changes of files and directories are synced."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._synced: dict[int, int] = {}  # by inode, which a rename keeps: time of the last synced change
        self.renamed: dict[Path, list[Path]] = {}  # by new name: the paths that were not synced at the rename
        self._fsync, self._rename = os.fsync, os.rename
        patch.setattr(os, "fsync", self.fsync)
        patch.setattr(os, "rename", self.rename)

    def fsync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        stat = os.fstat(descriptor)
        self._synced[stat.st_ino] = stat.st_mtime_ns

    def rename(self, source: Any, target: Any) -> None:
        if Path(source).is_dir():
            self.renamed[Path(target)] = [
                path for path in (*Path(source).rglob("*"), Path(source)) if self.is_unsynced(path)
            ]
        self._rename(source, target)

    def is_unsynced(self, path: Path) -> bool:
        """Whether it has changed since it was synced."""
        stat = path.stat()
        return self._synced.get(stat.st_ino) != stat.st_mtime_ns


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


class Session:
    """The part of a session that saving needs; the rename must come after the controller's answer."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self.welcome = SimpleNamespace(position=Position(0))
        self.progress = Progress()
        self.timeline = self
        self.saved_steps: list[int] = []

    @contextlib.contextmanager
    def busy(self, kind: str) -> Iterator[None]:
        yield

    async def saved(self, step: int) -> None:
        assert not self._checkpoint.exists()
        self.saved_steps.append(step)


async def test_a_checkpoint_is_synced_before_its_rename(disk: Disk, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    wrap_tokenizer(Arithmetic(0, 0).tokenizer()).save_pretrained(run_dir / "model")
    config = RunConfig(run_dir=str(run_dir), checkpoint=CheckpointConfig(every=1, keep=1))
    checkpoint = checkpoint_dir(run_dir, 1)
    session: Any = Session(checkpoint)
    await Checkpoints(session, config, SimulatedTrainer(TrainCost(0.0), ManualSimClock()), RankCollectives()).save(1)
    assert session.saved_steps == [1]
    assert len(list(checkpoint.iterdir())) > 1
    assert disk.renamed == {checkpoint: []}
    assert not disk.is_unsynced(checkpoint.parent), "its name may be lost"
    assert not disk.is_unsynced(run_dir), "the directory of all checkpoints may be lost"


def test_a_kept_model_is_synced_before_its_rename(disk: Disk, tmp_path: Path) -> None:
    model, kept = tmp_path / "model", tmp_path / "run" / "kept"
    (model / "part").mkdir(parents=True)
    kept.parent.mkdir()
    for name in ("config.json", "part/weights"):
        (model / name).write_text("a model")
    keep_model(model, kept)
    assert disk.renamed == {kept: []}
    assert not disk.is_unsynced(kept.parent)


def test_the_ledger_is_synced_only_for_a_checkpoint(tmp_path: Path) -> None:
    """SQLite does not report when it syncs; the test reads the setting under which it wrote."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    levels: list[tuple[str, int]] = []
    rewrite_term = ledger._restart_log.rewrite_term

    def level() -> int:
        [(value,)] = ledger._db.execute("PRAGMA synchronous").fetchall()
        return int(value)

    def checked_rewrite() -> None:
        before = ledger._db.total_changes
        rewrite_term()
        assert ledger._db.total_changes > before, "a commit that changes nothing syncs nothing"
        levels.append(("persist", level()))

    ledger._restart_log.rewrite_term = checked_rewrite  # type: ignore[method-assign]
    normal, full = 1, 2
    ledger.add(AppendLedger(1, 0, "trained", step=0), 0.0)
    ledger.commit()
    assert level() == normal
    ledger.persist()
    assert levels == [("persist", full)]
    assert level() == normal
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    ledger.close()
