"""flowrt run with its trainer on a permanently unreachable host: rollback to a checkpoint with a new trainer."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrt.recipes.run_dir import checkpoint_steps
from tests.integration.conftest import wait_until
from tests.netns.runs import FLOWRT, SMALL

STEPS, EVERY = 40, 2

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def repaired(hosts: Any) -> Iterator[Any]:
    yield hosts
    hosts.repair(2)
    hosts.kill_all()


def test_permanently_unreachable_trainer_is_replaced(
    repaired: Any, keys_and_model: tuple[Path, Path], tmp_path: Path
) -> None:
    hosts, (keys, model) = repaired, keys_and_model
    launcher, marker, run_dir, log = (tmp_path / name for name in ("elsewhere", "once", "run", "log"))
    first, then = (shlex.join(hosts.on(number)) for number in (2, 3))
    launcher.write_text(f'#!/bin/sh\nif mkdir {marker}; then exec {first} "$@"; else exec {then} "$@"; fi\n')
    launcher.chmod(0o755)
    command = [str(FLOWRT), "run", *SMALL, "--run-dir", str(run_dir), "--model", str(model), "--steps", str(STEPS)]
    command += ["--controller.keys", str(keys), "--checkpoint.every", str(EVERY), "--launch.trainer", str(launcher)]
    launched = hosts.start(1, command, log, {"OMP_NUM_THREADS": "1", "COLUMNS": "200"})
    wait_until(lambda: len(checkpoint_steps(run_dir)) or launched.poll() is not None, 120.0, log.read_text)
    hosts.cut(2)
    saved = max(checkpoint_steps(run_dir))
    assert launched.wait(150) == 0, log.read_text()
    [line] = [line for line in log.read_text().splitlines() if "restart 1 of 3 in 1 s, from step" in line]
    assert line.startswith("trainer: its connection is closed"), line
    summary = json.loads((run_dir / "summary.json").read_text())
    assert saved < STEPS, "the run ended before the link was cut"
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (STEPS, 0, 0)
    assert "host3" in (run_dir / "logs" / "trainer.log").read_text(), "the new trainer wrote the trained model"
