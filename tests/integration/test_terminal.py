"""A run does not depend on the reader or encoding of its output, or on the name of its directory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.helpers.forked_flowrt import ForkedFlowrt

FLOWRT = str(Path(sys.executable).with_name("flowrt"))
SMALL = ["--steps", "2", "--prompts-per-step", "2", "--group-size", "2", "--data.eval-prompts", "0"]
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


def flags(run_dir: Path, model: Path) -> list[str]:
    return [*SMALL, "--rollout.workers", "1", "--model", str(model), "--run-dir", str(run_dir)]


@pytest.mark.slow
def test_run_completes_after_its_output_pipe_is_closed(tmp_path: Path, untrained_model: Path) -> None:
    read, write = os.pipe()
    words = ["run", *flags(tmp_path / "run", untrained_model)]
    process = ForkedFlowrt(words, tmp_path, os.environ, write)
    os.close(write)
    with open(read, "rb", buffering=0) as output:
        assert output.read(10) == b"run direct"
    assert process.wait(600.0) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2


@pytest.mark.long
def test_run_completes_with_its_output_on_a_full_disk(tmp_path: Path, untrained_model: Path) -> None:
    words = [FLOWRT, "run", *flags(tmp_path / "run", untrained_model)]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == b"flowrt: standard output cannot be written and is dropped: No space left on device\n"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2


@pytest.mark.long
def test_a_run_directory_name_may_contain_markup_with_ascii_output(tmp_path: Path, untrained_model: Path) -> None:
    run_dir = tmp_path / "m" / "a[/x]b[red]"
    words = [FLOWRT, "run", *flags(run_dir, untrained_model)]
    ended = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600, env={**os.environ, **ASCII}
    )
    text = ended.stdout.decode("ascii")
    assert ended.returncode == 0, text
    assert f"page {tmp_path}/m/a[/x]b[red]/run.html" in text
    resumed = subprocess.run([FLOWRT, "resume", str(run_dir)], capture_output=True, text=True, timeout=600)
    assert resumed.returncode == 0, resumed.stderr
    assert f"run {run_dir} is complete: 2 steps" in resumed.stdout


def test_a_run_directory_name_that_is_not_text_is_refused(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path / "run-") + b"\xff"
    refused = subprocess.run([FLOWRT.encode(), b"run", b"--run-dir", name], capture_output=True, timeout=600)
    assert refused.returncode == 2
    [line] = refused.stderr.splitlines()
    assert line.startswith(b"flowrt: run_dir is ")
    assert b"not text in this locale" in line
    assert not list(tmp_path.iterdir())
