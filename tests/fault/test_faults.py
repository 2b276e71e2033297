"""Real runs with injected faults: a few trials of each group of bench/faults.py, which has hundreds."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.integration.helpers.forked import run_script

pytestmark = pytest.mark.slow
BENCH = Path(__file__).parents[2] / "bench" / "faults.py"
# Seeds that once found a bug. A restarted controller restored groups that had left; a run that had ended was taken for
# a hung one; a trainer that was stopped in its first step ended the run; a controller that died before any worker had
# joined was restarted at another address; a controller that was stopped during shutdown wrote no summary.
REGRESSIONS = ("22", "48", "78", "150", "162", "263", "199", "35", "21", "16", "298")
"""The last four silence a source, disconnect a reward and silence a rollout worker, and kill a trainer in step 4."""
SAMPLE = (
    *("1038", "1041", "1007", "1006", "1005", "1013", "1066", "1078", "1095", "1030", "1040"),
    *("1086", "1060", "1022", "1054", "1069", "1076"),
)
"""The last six shut down a controller, a source and the only worker of each role."""
GROUPS = (
    "two",
    "disk",
    "everything",
    "files",
    "launcher",
    "SIGHUP",
    "resume",
    "fork server",
    "SIGINT",
    "SIGTERM",
    "leave",
)
"""Groups of faults of these seeds, as named in the metrics."""
COUNTED = ("lost", "doubled", "hung", "wrong")
TIMED = ("detect_s_p50", "recover_s_p50", "recover_s_max")


def campaign(tmp_path: Path, *arguments: str, timeout_s: float = 270.0) -> tuple[dict[str, Any], str]:
    """Metrics and output of some trials; asserts that nothing is lost, doubled, hung or wrong."""
    path = tmp_path / "faults.json"
    ended = run_script([str(BENCH), *arguments, "--json", str(path)], {"OMP_NUM_THREADS": "1"}, timeout_s)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    metrics: dict[str, Any] = json.loads(path.read_text())["metrics"]
    assert [metrics[name] for name in COUNTED] == [0, 0, 0, 0], ended.stdout
    return metrics, ended.stdout


@pytest.mark.parametrize("seeds", [("600",), pytest.param(("607", "608"), marks=pytest.mark.long)])
def test_under_dynamic_sampling_every_prompt_is_trained_once_or_filtered(
    tmp_path: Path, seeds: tuple[str, ...]
) -> None:
    """A kill of everything, of the reference and of the reward worker, while each step drops three groups."""
    options = ("--groups", "one", "everything", "--kinds", "kill", "--only", *seeds)
    metrics, output = campaign(tmp_path, *options, "--filtered", "3")
    assert metrics["trials"] == len(seeds), output


@pytest.mark.parametrize("seeds", [pytest.param(REGRESSIONS[:8], marks=pytest.mark.long), REGRESSIONS[8:]])
def test_no_fault_of_one_process_loses_or_doubles_a_prompt(tmp_path: Path, seeds: tuple[str, ...]) -> None:
    metrics, output = campaign(tmp_path, "--groups", "one", "--only", *seeds)
    assert metrics["trials"] == len(seeds)
    assert all(metrics[name] > 0 for name in TIMED)
    assert metrics["recover_s_p50"] <= metrics["recover_s_max"]
    assert "kill " in output


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is mounted by root only")
def test_no_prompt_is_lost_or_doubled_by_a_fault_of_each_group(tmp_path: Path) -> None:
    metrics, _ = campaign(tmp_path, "--only", *SAMPLE)
    assert metrics["trials"] == len(SAMPLE)
    assert all(metrics[f"{row.replace(' ', '_')}_trials"] for row in GROUPS)
    assert all(metrics[f"{row}_resumed"] == metrics[f"{row}_trials"] for row in ("everything", "disk", "files"))
    assert 0 < metrics["replaced_s_p50"] <= metrics["replaced_s_max"]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_prompt_is_lost_or_doubled_in_a_hundred_runs(tmp_path: Path) -> None:
    metrics, _ = campaign(tmp_path, "--trials", "100", "--first-seed", "5000", timeout_s=1140.0)
    assert metrics["trials"] + metrics["skipped"] == 100
