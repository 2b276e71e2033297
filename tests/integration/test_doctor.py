"""flowrt doctor with real processes: one node, three that measure each other, and nodes that are not well."""

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
    words = [str(FLOWRT), "doctor", *map(str, arguments)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=deadline_s, env=environment)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Three nodes that look at each other with keys: what the command said, and each node's line of facts."""
    folder = tmp_path_factory.mktemp("doctor")
    subprocess.run([str(FLOWRT), "keys", str(folder / "keys")], check=True, timeout=60, capture_output=True)
    script = folder / "everywhere"
    starts = "\n".join(f'SLURMD_NODENAME={name} "$@" | tee {folder}/{name}.json &' for name in NODES)
    script.write_text(f"#!/bin/sh\n{starts}\nwait\n")
    script.chmod(0o755)
    ended = doctor("--on", script, "--nodes", len(NODES), "--keys", folder / "keys", "--run-dir", folder / "run")
    return ended, [(folder / f"{name}.json").read_text() for name in NODES]


def test_three_nodes_measure_each_other(three: tuple[subprocess.CompletedProcess[str], list[str]]) -> None:
    ended, lines = three
    assert ended.returncode == 0, ended.stdout + ended.stderr
    facts = [json.loads(line) for line in lines]
    probes = {one["probe"] for one in facts}
    for one in facts:
        assert set(one["bytes_per_s"]) == set(one["delay_s"]) == probes - {one["probe"]}
        assert min(one["bytes_per_s"].values()) > 0
        assert 0 < one["round_trip_s"] < 5
        assert one["peer_error"] == ""
        # One machine, one clock: what is left is the time on the way.
        assert all(0 <= delay_s < 5 for delay_s in one["delay_s"].values())
    assert "the same everywhere" in ended.stdout


def test_saved_facts_can_be_evaluated_later(
    three: tuple[subprocess.CompletedProcess[str], list[str]], tmp_path: Path
) -> None:
    """One node's memory is gone and its torch is another: two red lines, each with its node and what to do."""
    first, second, _ = (json.loads(line) for line in three[1])
    second["free_memory_bytes"] = 10**9
    second["versions"]["torch"] = "2.0.0"
    for name, facts in (("first", first), ("second", second)):
        (tmp_path / name).write_text("srun: some words\n" + json.dumps(facts) + "\n")
    ended = doctor("--merge", tmp_path / "first", tmp_path / "second")
    assert ended.returncode == 1
    red = [line for line in ended.stdout.splitlines() if line.startswith("flowrt: ")]
    assert len(red) == 2, ended.stdout
    assert red[0].startswith("flowrt: memory, middle: 0.9 GiB free")
    assert "rollout.max_running_requests" in red[0]
    assert "versions: torch" in red[1]
    assert "middle 2.0.0" in red[1]


def test_this_node_alone(tmp_path: Path) -> None:
    ended = doctor("--run-dir", tmp_path / "run", "--model", tmp_path)
    assert ended.returncode == 2
    assert "no config.json of a causal LM" in ended.stderr
    ended = doctor("--run-dir", tmp_path / "run", "--controller", "tcp://127.0.0.1:1", "--deadline-s", "1")
    assert ended.returncode == 1
    assert "waited 1 s for the controller at tcp://127.0.0.1:1" in ended.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices here")
def test_a_device_that_this_node_does_not_have(tmp_path: Path) -> None:
    ended = doctor("--run-dir", tmp_path / "run", "--device", "cuda")
    assert ended.returncode == 1
    red = [line for line in ended.stdout.splitlines() if line.startswith("flowrt: ")]
    assert [line.split(",")[0] for line in red] == ["flowrt: devices", "flowrt: reference device"]
    assert "trainer or rollout workers use cuda" in red[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--merge", "nowhere"], "nowhere cannot be read"),
        (["--merge", __file__], "holds no facts"),
        (["--on", "nosuchrun -n 2", "--nodes", "2"], "cannot be started"),
        (["--on", "true", "--nodes", "2"], "0 of 2 nodes answered"),
        (["--on", "ssh 'host"], "--on cannot be split into words"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
        (["--device", "gpu"], "device is 'gpu'; use one of auto, cpu, cuda, npu"),
    ],
)
def test_bad_input(arguments: list[str], said: str) -> None:
    ended = doctor(*arguments)
    assert ended.returncode == 2, ended.stdout
    assert said in " ".join(ended.stderr.split())
    assert len(ended.stderr.splitlines()) == 1
