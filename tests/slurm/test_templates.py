"""Every template on a real SLURM: the default job learns and ends with exit code 0; other jobs are interrupted."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowrt.controller.storage.ledger_reader import LedgerReader
from flowrt.controller.storage.timeline_file import read_timeline
from flowrt.recipes.config_io import defaults, to_toml
from flowrt.recipes.run_dir import checkpoint_steps
from tests.netns.runs import make_keys_and_model, tiny_model
from tests.slurm.conftest import NPUS

FLOWRT = Path(sys.executable).with_name("flowrt")
CORES = 4  # per node: one for each worker
JOB_S = 300.0
SMALL = [
    *("--prompts-per-step", "16", "--group-size", "4", "--data.eval-prompts", "0", "--algorithm.kl.coef", "0"),
    *("--trainer.lr", "5e-4", "--trainer.warmup-steps", "3"),
]

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the default job, warmed up."""
    run_dir = tmp_path_factory.mktemp("warm")
    path = run_dir / "config.toml"
    path.write_text(to_toml(dataclasses.replace(defaults("arithmetic"), run_dir=str(run_dir))))
    command = [sys.executable, "-m", "flowrt.launcher.build_model", "--config", str(path)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    return run_dir / "model"


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that learns nothing in a few steps."""
    return make_keys_and_model(tmp_path_factory.mktemp("untrained"), tiny_model())[1]


class Site:
    """A directory of templates, and of the jobs that are submitted from it."""

    def __init__(self, cluster: Any, directory: Path, *flags: str) -> None:
        self.cluster = cluster
        self.directory = directory
        command = [
            str(FLOWRT),
            "slurm",
            str(directory),
            "--runs",
            str(directory / "jobs"),
            "--cpus",
            str(CORES),
            *flags,
        ]
        subprocess.run(command, check=True, timeout=60, capture_output=True)

    def submit(self, template: str, *arguments: object) -> str:
        return str(self.cluster.submit(self.directory / template, *arguments))

    def job(self, number: str) -> Path:
        return self.directory / "jobs" / number

    def log(self, number: str) -> str:
        """The logs of the job and its workers."""
        paths = [*self.directory.glob(f"*{number}*.log"), *self.job(number).glob("run/logs/*.log")]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in paths)

    def finish(self, number: str, *, learns: bool = True) -> dict[str, Any]:
        """The summary of a job that must succeed and, if it is long enough, learn."""
        code = self.cluster.wait_for(number, JOB_S, lambda: self.log(number))
        assert code == "0:0", self.log(number)
        summary: dict[str, Any] = json.loads((self.job(number) / "run" / "summary.json").read_text())
        assert not learns or summary["reward_last"] > summary["reward_first"] + 0.1, summary
        assert (summary["prompts_lost"], summary["prompts_trained_twice"]) == (0, 0)
        return summary

    def finish_default(self, number: str) -> dict[str, Any]:
        """The same for the default job, with all of its steps and its final reward."""
        summary = self.finish(number)
        assert summary["steps"] == defaults("arithmetic").steps
        assert min(summary["reward_last"], summary["eval_last"]) >= 0.9, summary
        return summary

    def nodes(self, number: str) -> dict[str, int]:
        """How many steps of the job each node has run (the batch script is not a step)."""
        logs = {path.stem.removeprefix("slurmd-"): path for path in self.cluster.directory.glob("slurmd-n*.log")}
        # "launch task StepId=7.0 request from ...", in a heterogeneous job "launch task 7+0 (StepId=7.0) request ..."
        step = re.compile(rf"launch task .*StepId={number}\.")
        return {name: len(step.findall(path.read_text())) for name, path in logs.items()}


def test_workers_of_a_job_array_join_the_default_job_on_one_node(cluster: Any, tmp_path: Path) -> None:
    """Includes building the model; the array has two workers."""
    site = Site(cluster, tmp_path, "--extra", "2", "--rollout-partition", "generate")
    number = site.submit("one_node.sbatch")
    array = site.submit("extra_rollout.sbatch", site.job(number))
    site.finish_default(number)
    for task in range(2):
        assert cluster.wait_for(f"{array}_{task}", 30.0, lambda: site.log(array)) == "0:0", site.log(array)
    spans = read_timeline(site.job(number) / "run")
    generated = {span["worker"] for span in spans if span.get("kind") == "generate"}
    assert generated == {"rollout-0", "rollout-1", f"extra-{array}-0", f"extra-{array}-1"}
    assert not (site.job(number) / "run" / "address").exists()
    assert (site.job(number) / "keys").stat().st_mode & 0o777 == 0o700


def test_default_job_learns_on_many_nodes(core_cluster: Any, model: Path, tmp_path: Path) -> None:
    """Where memory is no resource."""
    site = Site(core_cluster, tmp_path, "--nodes", "3")
    number = site.submit("many_nodes.sbatch", "--model", model)
    site.finish_default(number)
    assert site.nodes(number) == {"n1": 1, "n2": 1, "n3": 1}  # the trainer, and a rollout worker on each other node


def test_heterogeneous_job_trains_on_two_nodes(cluster: Any, model: Path, tmp_path: Path) -> None:
    site = Site(cluster, tmp_path, "--nodes", "3", "--train-nodes", "2", "--rollout-partition", "generate")
    number = site.submit("hetjob.sbatch", "--model", model)
    site.finish_default(number)
    controller = (site.job(number) / "run" / "logs" / "controller.log").read_text()
    assert all(f"trainer-{rank} joined" in controller for rank in range(2))
    # SLURM chooses the nodes of each component: two train, the third generates.
    assert sorted(site.nodes(number).values()) == [0, 1, 1]
    assert sorted(site.nodes(str(int(number) + 1)).values()) == [0, 0, 1]


SEVERAL = ["--nodes", "3", "--gpus", "2", "--cpus", "1", "--rollout-partition", "generate"]
SEVERAL_SMALL = [*SMALL, "--steps", "12", "--device", "cpu"]
"""With these flags a job computes on CPUs, whatever devices SLURM has allocated."""


@pytest.mark.parametrize(
    ("template", "options"),
    [
        ("many_nodes.sbatch", []),
        ("many_nodes.sbatch", ["--mem", "600M"]),
        ("many_nodes.sbatch", ["--sbatch=--mem-per-cpu=100M", "--gres", "True"]),
        ("hetjob.sbatch", ["--sbatch=--mem-per-gpu=100M"]),
    ],
)
def test_each_device_has_a_worker_where_memory_is_a_resource(
    cluster: Any, untrained: Path, tmp_path: Path, template: str, options: list[str]
) -> None:
    """Each node has two GPUs: two ranks train, four workers generate."""
    site = Site(cluster, tmp_path, *SEVERAL, *options)
    number = site.submit(template, "--model", untrained, *SEVERAL_SMALL)
    site.finish(number, learns=False)
    events = (site.job(number) / "run" / "events.jsonl").read_text()
    controller = (site.job(number) / "run" / "logs" / "controller.log").read_text()
    for name in ("trainer-0", "trainer-1", *(f"rollout-{index}" for index in range(4))):
        assert f"{name} joined" in controller, events


@pytest.fixture
def reservation(cluster: Any) -> Iterator[str]:
    """A reservation of one node."""
    cluster.run("scontrol", "create", "reservation=week", "starttime=now", "duration=60", "users=root", "nodes=n1")
    yield "week"
    cluster.run("scontrol", "delete", "reservation=week")


def test_sbatch_accepts_what_the_flags_write(cluster: Any, tmp_path: Path) -> None:
    """sbatch checks the options without submitting."""
    flags = [
        *("--partition", "train", "--rollout-partition", "generate", "--nodes", "3", "--gpus", "2", "--cpus", "1"),
        *("--constraint", "fast", "--mem", "500M", "--extra-mem", "100M", "--time", "1-00:00:00", "--qos", "normal"),
        *("--requeue", "False", "--sbatch=--mail-type=FAIL", "--sbatch=--comment=mine"),
    ]
    Site(cluster, tmp_path / "all", *flags)
    for name in ("one_node", "many_nodes", "hetjob", "extra_rollout"):
        assert "to start at" in cluster.test(tmp_path / "all" / f"{name}.sbatch"), name
    Site(cluster, tmp_path / "none", "--constraint", "slow")
    assert "Invalid feature specification" in cluster.test(tmp_path / "none" / "one_node.sbatch")


def test_sbatch_finds_the_reservation_and_the_npus(cluster: Any, reservation: str, tmp_path: Path) -> None:
    flags = ["--exclude", "n[2-3]", "--npus", f"npu:{NPUS}", "--cpus", "1"]
    Site(cluster, tmp_path / "here", "--reservation", reservation, *flags)
    assert "to start at" in cluster.test(tmp_path / "here" / "one_node.sbatch")
    Site(cluster, tmp_path / "other", "--reservation", "month", *flags)
    assert "reservation is invalid" in cluster.test(tmp_path / "other" / "one_node.sbatch")


def test_a_run_in_a_container(cluster: Any, untrained: Path, tmp_path: Path) -> None:
    """A program in place of apptainer notes its arguments and runs the command outside of any container."""
    programs = tmp_path / "programs"
    programs.mkdir()
    stand_in = programs / "apptainer"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/used\nshift 4\nexec "$@"\n')
    stand_in.chmod(0o755)
    options = ["--container", "flowrt.sif", "--container-runtime", "apptainer", "--container-mounts", "/models:/models"]
    site = Site(cluster, tmp_path / "site", "--nodes", "3", *options)
    text = (site.directory / "many_nodes.sbatch").read_text()
    (site.directory / "many_nodes.sbatch").write_text(text.replace("export PATH=", f"export PATH={programs}:", 1))
    number = site.submit("many_nodes.sbatch", "--model", untrained, *SMALL, "--steps", "12")
    site.finish(number, learns=False)
    used = (tmp_path / "used").read_text().splitlines()
    assert len(used) == 3
    mounts = f"{site.directory}/jobs:{site.directory}/jobs,/models:/models"
    assert all(line.startswith(f"exec --bind {mounts} flowrt.sif sh -c") for line in used), used


def test_default_job_learns_with_npus(cluster: Any, model: Path, tmp_path: Path) -> None:
    """SLURM allocates NPUs that do not exist; a flag makes the run compute on the CPUs."""
    cann = tmp_path / "cann"
    cann.mkdir()
    (cann / "set_env.sh").write_text('echo "$MAYBE_UNSET"\nexport FROM_CANN=yes\n')
    site = Site(cluster, tmp_path, "--npus", f"npu:{NPUS}", "--cpus", "1", "--cann", str(cann))
    number = site.submit("one_node.sbatch", "--model", model, "--device", "cpu")

    def trainers() -> list[psutil.Process]:
        return [process for process in cluster.processes() if "-Pm flowrt.roles.trainer" in " ".join(process.cmdline())]

    cluster.wait_until(trainers, JOB_S, lambda: site.log(number))
    assert f"npu:{NPUS}" in site.cluster.run("scontrol", "show", "job", number)
    [trainer] = trainers()
    settings = trainer.environ()
    assert settings["FROM_CANN"] == "yes"
    assert int(settings["HCCL_EVENT_TIMEOUT"]) > int(settings["HCCL_EXEC_TIMEOUT"]) > 600
    site.finish_default(number)


def test_preempted_job_resumes_from_its_checkpoint(cluster: Any, model: Path, tmp_path: Path) -> None:
    site = Site(cluster, tmp_path)
    flags = ["--steps", "24", "--rollout.workers", "1", "--checkpoint.every", "4"]
    number = site.submit("one_node.sbatch", "--model", model, *SMALL, *flags)
    run = site.job(number) / "run"
    cluster.wait_until(lambda: checkpoint_steps(run), JOB_S, lambda: site.log(number))
    cluster.run("scontrol", "requeue", number)
    cluster.wait_until(lambda: cluster.job(number)["JobState"] == "PENDING", 30.0, lambda: site.log(number))
    kept = max(checkpoint_steps(run))
    cluster.run("scontrol", "update", f"job={number}", "StartTime=now")  # SLURM would wait for two minutes
    summary = site.finish(number)
    assert cluster.job(number)["Restarts"] == "1"
    assert f"resuming after step {kept - 1}" in (run / "logs" / "controller.log").read_text()
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(24))
    assert summary["steps"] == 24


def test_a_job_at_its_time_limit_saves_a_checkpoint_and_is_requeued(cluster: Any, model: Path, tmp_path: Path) -> None:
    site = Site(cluster, tmp_path)
    flags = ["--steps", "24", "--rollout.workers", "1", "--checkpoint.every", "1000"]
    number = site.submit("one_node.sbatch", "--model", model, *SMALL, *flags)
    run = site.job(number) / "run"
    metrics = run / "metrics.jsonl"
    cluster.wait_until(
        lambda: metrics.is_file() and len(metrics.read_text().splitlines()) >= 5, JOB_S, lambda: site.log(number)
    )
    assert checkpoint_steps(run) == []
    cluster.run("scancel", "--batch", "--signal=USR1", number)  # as SLURM does by itself three minutes before the limit
    cluster.wait_until(lambda: cluster.job(number)["JobState"] == "PENDING", 60.0, lambda: site.log(number))
    [saved] = checkpoint_steps(run)
    assert saved >= 5
    # Delayed: with SLURM's clock of whole seconds the node would mistake it for the job that it has just killed.
    cluster.run("scontrol", "update", f"job={number}", "StartTime=now+3")
    summary = site.finish(number)
    assert cluster.job(number)["Restarts"] == "1"
    log = (run / "logs" / "controller.log").read_text()
    assert f"the run ends: interrupted (SIGTERM); saved after {saved} steps" in log
    assert f"resuming after step {saved - 1}" in log
    # Each step was trained once, and none was rolled back.
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(24))
    assert (summary["steps"], summary["resumed_from"]) == (24, saved)
    with LedgerReader(run / "ledger.sqlite") as ledger:
        assert ledger.query("SELECT prompt FROM events WHERE reason LIKE 'rolled back: trained in step%'") == []


def test_a_run_that_fails_fails_its_job(cluster: Any, tmp_path: Path) -> None:
    site = Site(cluster, tmp_path)
    number = site.submit("one_node.sbatch", "--model", "nowhere")
    assert cluster.wait_for(number, JOB_S, lambda: site.log(number)) == "2:0"
    assert "model nowhere is not a directory" in site.log(number)
