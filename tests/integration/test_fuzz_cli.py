"""Random command lines and configurations end as they should; the seed is fixed, so that a failure can be repeated."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[2] / "scripts" / "fuzz_cli.py"
WRONG = ("tracebacks", "hangs", "files_left", "wrong_codes", "processes_left", "temporary_files_left", "valid_refused")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_random_command_line_ends_badly(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    words = ["--draws", "50", "--seed", "1", "--runs", "0.02", "--work", str(tmp_path / "work"), "--json", str(result)]
    ended = subprocess.run([sys.executable, str(FUZZ), *words], capture_output=True, text=True, timeout=580)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    counts = json.loads(result.read_text())
    assert counts["draws"] == 50
    assert counts["stepped"] >= 1
    assert {name: counts[name] for name in WRONG} == dict.fromkeys(WRONG, 0)
