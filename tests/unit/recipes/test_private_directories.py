"""Only the owner can read a run directory, and the files that a controller writes elsewhere."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrt import api
from flowrt.controller.storage.run_metrics import RunMetrics
from flowrt.protocol.messages import Position
from flowrt.recipes.config_io import defaults, to_toml
from flowrt.runtime.files import private_directory

FLOW = api.Dataflow((api.Column("data", "int32", "group"),), (api.Stage("read", ("data",), ()),))
POLICIES = api.Policies(api.StrictLag(1), api.Fifo(), api.GroupCount(1), api.DelayedUpdate())
LINE = (
    '{"step": 0, "wall_s": 1.0, "samples": 4, "tokens": 8, "samples_per_s": 4.0, "staleness_mean": 0.0, '
    '"staleness_max": 0}'
)


@pytest.fixture(autouse=True)
def permissive_umask() -> Iterator[None]:
    """A umask with which other users can read new files by default."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}


async def test_controller_files_in_a_shared_directory_are_readable_only_by_the_owner(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o755)
    async with api.controller(FLOW, api.Settings(), POLICIES, run_dir):
        during = modes(run_dir)
    assert {"ledger.sqlite", "ledger.sqlite-wal", "metrics.jsonl", "evaluations.jsonl"} <= set(during)
    assert set((during | modes(run_dir)).values()) == {0o600}
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o755, "an existing directory keeps its mode"


def test_truncated_metrics_stay_private(tmp_path: Path) -> None:
    RunMetrics(tmp_path, 0.0).close()
    RunMetrics(tmp_path, 0.0, Position(1), lines=[LINE]).close()
    assert modes(tmp_path) == {"evaluations.jsonl": 0o600, "metrics.jsonl": 0o600}


def test_a_new_directory_is_private_and_an_existing_one_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o755)
    for directory, mode in ((path, 0o755), (tmp_path / "new" / "run", 0o700)):
        private_directory(directory)
        assert stat.S_IMODE(directory.stat().st_mode) == mode


@pytest.mark.slow
def test_the_default_run_directory_is_that_of_the_configuration_file(tmp_path: Path) -> None:
    job, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    for directory in (job, elsewhere):
        directory.mkdir(mode=0o755)
    (job / "config.toml").write_text(to_toml(defaults("arithmetic")))
    command = [
        sys.executable,
        "-m",
        "flowrt.launcher.controller_main",
        "--config",
        str(job / "config.toml"),
        "--ready-fd",
    ]
    read, write = os.pipe()
    controller = subprocess.Popen([*command, str(write)], cwd=elsewhere, pass_fds=[write], stderr=subprocess.DEVNULL)
    os.close(write)
    with open(read) as ready:
        address = ready.read().strip()
    assert (job / "address").read_text().strip() == address
    controller.terminate()
    assert controller.wait(30.0) == 130
    assert not list(elsewhere.iterdir())
    assert (job / "summary.json").is_file()
    assert stat.S_IMODE(job.stat().st_mode) == stat.S_IMODE(elsewhere.stat().st_mode) == 0o755
