"""Random command lines and configurations end as specified; the seed is fixed, so that failures are reproducible."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[2] / "scripts" / "fuzz_cli.py"
WRONG = ("tracebacks", "hangs", "files_left", "wrong_codes", "processes_left", "temporary_files_left", "valid_refused")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_random_command_lines_end_as_specified(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    flags = ["--draws", "50", "--seed", "1", "--runs", "0.02", "--work", str(tmp_path / "work"), "--json", str(result)]
    completed = subprocess.run([sys.executable, str(FUZZ), *flags], capture_output=True, text=True, timeout=580)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    counts = json.loads(result.read_text())
    assert counts["draws"] == 50
    assert counts["stepped"] >= 1
    assert {name: counts[name] for name in WRONG} == dict.fromkeys(WRONG, 0)
