"""The torch engines on a device that is not the CPU: whole programs, in a process with a simulated NPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engines.device_programs import PROGRAMS

pytestmark = [pytest.mark.long, pytest.mark.timeout(960)]
ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 900.0
CODE = """
from tests.simulated_device import without_inference_mode
without_inference_mode()
from tests.unit.engines.device_programs import main
main()
"""


@pytest.fixture(scope="module")
def report() -> Any:
    """The traceback of each program by name, and the functions of torch_npu that were called."""
    command = [sys.executable, "-c", CODE]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_program_gives_the_same_results_on_the_device_as_on_the_cpu(name: str, report: Any) -> None:
    assert report["programs"][name] == "", report["programs"][name]


def test_weights_are_copied_on_a_separate_stream_after_queued_work(report: Any) -> None:
    assert {"Stream", "wait_stream", "stream", "synchronize", "set_device"} <= set(report["npu_calls"])
