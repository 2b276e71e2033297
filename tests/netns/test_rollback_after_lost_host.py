"""flowrt run, whose trainer is on a host that is cut off for ever: it goes back to its checkpoint with another one."""

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
def mended(hosts: Any) -> Iterator[Any]:
    yield hosts
    hosts.mend(2)
    hosts.end()


def test_permanently_unreachable_trainer_is_replaced(
    mended: Any, keys_and_model: tuple[Path, Path], tmp_path: Path
) -> None:
    hosts, (keys, model) = mended, keys_and_model
    elsewhere, once, run_dir, log = (tmp_path / name for name in ("elsewhere", "once", "run", "log"))
    first, then = (shlex.join(hosts.on(number)) for number in (2, 3))
    elsewhere.write_text(f'#!/bin/sh\nif mkdir {once}; then exec {first} "$@"; else exec {then} "$@"; fi\n')
    elsewhere.chmod(0o755)
    words = [str(FLOWRT), "run", *SMALL, "--run-dir", str(run_dir), "--model", str(model), "--steps", str(STEPS)]
    words += ["--controller.keys", str(keys), "--checkpoint.every", str(EVERY), "--launch.trainer", str(elsewhere)]
    launched = hosts.start(1, words, log, {"OMP_NUM_THREADS": "1", "COLUMNS": "200"})
    wait_until(lambda: len(checkpoint_steps(run_dir)) or launched.poll() is not None, 120.0, log.read_text)
    hosts.cut(2)
    saved = max(checkpoint_steps(run_dir))
    assert launched.wait(150) == 0, log.read_text()
    [said] = [line for line in log.read_text().splitlines() if "restart 1 of 3 in 1 s, from step" in line]
    assert said.startswith("trainer: its connection is closed"), said
    summary = json.loads((run_dir / "summary.json").read_text())
    assert saved < STEPS, "the run was over before the cut was"
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (STEPS, 0, 0)
    assert "host3" in (run_dir / "logs" / "trainer.log").read_text(), "the second one wrote the trained model"
