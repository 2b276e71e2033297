"""flowrt doctor with real processes: one node, three that measure each other, and faulty nodes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FLOWRT = Path(sys.executable).with_name("flowrt")
NODES = ("left", "middle", "right")


def doctor(*arguments: object, deadline_s: float = 150.0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200"}
    command = [str(FLOWRT), "doctor", *map(str, arguments)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, env=environment)
    assert "Traceback" not in completed.stderr, completed.stderr
    return completed


@pytest.fixture(scope="module")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Three nodes that probe each other, with keys: the completed command, and each node's line of facts."""
    folder = tmp_path_factory.mktemp("doctor")
    subprocess.run([str(FLOWRT), "keys", str(folder / "keys")], check=True, timeout=600, capture_output=True)
    script = folder / "everywhere"
    starts = "\n".join(f'SLURMD_NODENAME={name} "$@" | tee {folder}/{name}.json &' for name in NODES)
    script.write_text(f"#!/bin/sh\n{starts}\nwait\n")
    script.chmod(0o755)
    completed = doctor("--on", script, "--nodes", len(NODES), "--keys", folder / "keys", "--run-dir", folder / "run")
    return completed, [(folder / f"{name}.json").read_text() for name in NODES]


def test_three_nodes_measure_each_other(three_nodes: tuple[subprocess.CompletedProcess[str], list[str]]) -> None:
    completed, lines = three_nodes
    assert completed.returncode == 0, completed.stdout + completed.stderr
    facts = [json.loads(line) for line in lines]
    probes = {fact["probe"] for fact in facts}
    for fact in facts:
        assert set(fact["bytes_per_s"]) == probes - {fact["probe"]}
        assert min(fact["bytes_per_s"].values()) > 0
        assert 0 < fact["round_trip_s"] < 60
        assert fact["peer_error"] == ""
    assert "the same everywhere" in completed.stdout


def test_single_node_with_a_bad_model_or_controller_address(tmp_path: Path) -> None:
    completed = doctor("--run-dir", tmp_path / "run", "--model", tmp_path)
    assert completed.returncode == 2
    assert "no config.json of a causal LM" in completed.stderr
    completed = doctor("--run-dir", tmp_path / "run", "--controller", "tcp://127.0.0.1:1", "--deadline-s", "1")
    assert completed.returncode == 1
    assert "waited 1 s for the controller at tcp://127.0.0.1:1" in completed.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices here")
def test_missing_device_is_reported_for_each_use(tmp_path: Path) -> None:
    completed = doctor("--run-dir", tmp_path / "run", "--device", "cuda")
    assert completed.returncode == 1
    errors = [line for line in completed.stdout.splitlines() if line.startswith("flowrt: ")]
    assert [line.split(",")[0] for line in errors] == ["flowrt: devices", "flowrt: reference device"]
    assert "trainer or rollout workers use cuda" in errors[0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--on", "echo {} #"], "printed no facts of this version of flowrt"),
        (["--on", "nosuchrun -n 2", "--nodes", "2"], "cannot be started"),
        (["--on", "true", "--nodes", "2"], "0 of 2 nodes answered before --on true ended with exit code 0"),
        (["--on", "false"], "0 of 1 nodes answered before --on false ended with exit code 1"),
        (["--on", "false", "--nodes", "0"], "0 is too few; give at least 1"),
        (["--on", "false", "--nodes", "-1"], "'-1' is not a whole number"),
        (["--on", "ssh 'host"], "--on cannot be split into words"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
        (["--device", "gpu"], "--device takes one of auto, cpu, cuda, npu, not 'gpu'"),
    ],
)
def test_bad_arguments(arguments: list[str], expected: str) -> None:
    completed = doctor(*arguments)
    assert completed.returncode == 2, completed.stdout
    assert expected in " ".join(completed.stderr.split())
    assert len(completed.stderr.splitlines()) == 1
