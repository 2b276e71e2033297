"""A signal that reaches the launcher before it has started a process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys
from flowrt import cli
from flowrt.launcher import local_run

class Signalled(local_run.Children):
    def __init__(self, *arguments):
        os.kill(os.getpid(), int(sys.argv[1]))
        super().__init__(*arguments)

local_run.Children = Signalled
sys.exit(cli.main(["run", "--run-dir", sys.argv[2]]))
"""
WITHIN_S = 60.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_launcher_exits_in_order(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", PROGRAM, str(int(number)), str(tmp_path / "run")]
    completed = subprocess.run(
        command, capture_output=True, text=True, timeout=WITHIN_S, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert completed.returncode == 130, completed.stderr
    assert "interrupted: ending the run" in completed.stdout
    assert "Traceback" not in completed.stderr
