"""A disk that is full during a save: a clear error, and with free space the run resumes without loss."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

STEPS = 12
LEDGER_BYTES = 1_500_000
SMALL_DISK_BYTES = 1 << 16

pytestmark = [
    *(pytest.mark.slow, pytest.mark.long),
    pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is mounted by root only"),
]


@pytest.fixture
def disk(tmp_path: Path, untrained_model: Path) -> Iterator[Path]:
    """Space for the run and the start model, and for a part of a checkpoint (a model and two moments)."""
    size = 2 * sum(path.stat().st_size for path in untrained_model.iterdir()) + LEDGER_BYTES
    with small_disk(tmp_path / "disk", size) as place:
        yield place


@contextmanager
def small_disk(place: Path, size_bytes: int) -> Iterator[Path]:
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "flowrt-test", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=20)


def test_checkpoint_on_a_full_disk_ends_the_run_and_resume_succeeds(
    launch: Callable[..., Any], untrained_model: Path, disk: Path
) -> None:
    run_dir = disk / "run"
    launched = launch(
        *("--run-dir", str(run_dir), "--model", str(untrained_model), "--steps", str(STEPS), "--max-run-restarts", "0"),
        *("--prompts-per-step", "4", "--group-size", "4", "--data.eval-prompts", "0", "--algorithm.kl.coef", "0"),
        *("--checkpoint.every", "4", "--trainer.save", "False"),
    )
    assert launched.wait(120.0) == 1, launched.output
    # The first failing write is that of the first or second checkpoint, the ledger, or the metrics.
    assert re.search(
        r"(step-00000[48]|ledger\.sqlite|\w+\.jsonl) cannot be written: .*(No space left on device|disk is full)",
        launched.output,
    ), launched.output
    assert "Traceback" not in launched.output
    assert shutil.disk_usage(disk).used > 0
    subprocess.run(["mount", "-o", "remount,size=256m", str(disk)], check=True, timeout=20)
    resumed = launch(resume=run_dir)
    assert resumed.wait(120.0) == 0, resumed.output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (STEPS, 0, 0)
    assert summary["prompts"]["trained"] == 4 * STEPS


def test_trained_model_that_did_not_fit_on_disk_is_written_on_resume(
    launch: Callable[..., Any], untrained_model: Path, tmp_path: Path
) -> None:
    launched = launch(
        *(
            "--model",
            str(untrained_model),
            "--steps",
            str(STEPS),
            "--max-run-restarts",
            "0",
            "--checkpoint.every",
            str(STEPS),
        ),
        *("--prompts-per-step", "4", "--group-size", "4", "--data.eval-prompts", "0", "--algorithm.kl.coef", "0"),
    )
    launched.wait_for_training()
    final = launched.run_dir / "final"
    # The temporary directory to which the model is written before it is renamed.
    with small_disk(final.with_name(".final.part"), SMALL_DISK_BYTES):
        assert launched.wait(120.0) == 1, launched.output
        assert re.search(
            r"trained model \S+/final cannot be written: .*No space left on device.*; free disk space, then flowrt ",
            launched.words,
        ), launched.output
        assert "Traceback" not in launched.output
        assert not final.exists()
    resumed = launch(resume=launched.run_dir)
    assert resumed.wait(120.0) == 0, resumed.output
    assert (final / "config.json").is_file()
    assert (final / "model.safetensors").stat().st_size > SMALL_DISK_BYTES
    summary = json.loads((launched.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (STEPS, 0, 0)
