"""Run directories are nobody else's, whoever made them; nor is what a controller writes into any other directory."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrt import api
from flowrt.controller.journal import Journal
from flowrt.recipes.paths import private
from flowrt.wire.records import Position

FLOW = api.Dataflow((api.Column("data", "int32", "group"),), (api.Stage("read", ("data",), ()),))
POLICIES = api.Policies(api.StrictLag(1), api.Fifo(), api.GroupCount(1), api.DelayedUpdate())


@pytest.fixture(autouse=True)
def generous() -> Iterator[None]:
    """What a process makes is for everybody to read, unless it says otherwise."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}


async def test_what_a_controller_writes_into_a_directory_that_others_may_read_is_not_for_them(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o755)
    async with api.controller(FLOW, api.Settings(), POLICIES, run_dir):
        during = modes(run_dir)
    assert {"ledger.sqlite", "ledger.sqlite-wal", "metrics.jsonl", "timeline.jsonl"} <= set(during)
    assert set((during | modes(run_dir)).values()) == {0o600}
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o755, "it is not ours"


def test_metrics_that_were_cut_back_are_still_not_for_others(tmp_path: Path) -> None:
    Journal(tmp_path, 0.0).close()
    Journal(tmp_path, 0.0, Position(1)).close()
    assert modes(tmp_path) == {"metrics.jsonl": 0o600, "timeline.jsonl": 0o600}


def test_a_directory_that_was_there_is_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o755)
    for directory in (path, tmp_path / "new" / "run"):
        private(directory)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
