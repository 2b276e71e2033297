"""SLURM templates: filled-in values, omitted options, refused values."""

import dataclasses
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from flowrt.cli import main
from flowrt.errors import ConfigError
from flowrt.launcher.slurm import HERE, Site, fill, filled, placeholders, write
from flowrt.launcher.worker_commands import worker_commands
from flowrt.ranks.process_group import HCCL_TIMEOUTS_S, group_timeout_s
from flowrt.recipes.config_io import parse
from flowrt.transport.devices import Device

ROOT = Path(__file__).parents[3]
NAMES = ["extra_rollout.sbatch", "hetjob.sbatch", "many_nodes.sbatch", "one_node.sbatch"]
FULL = Site(partition="gpu", rollout_partition="spare", account="lab", nodes=6, train_nodes=2, gpus="a100:8")
ASCEND = Site(nodes=6, train_nodes=2, npus="npu:8", cann="/opt/cann")
EVERYTHING = dataclasses.replace(
    FULL,
    qos="long",
    constraint="a100&ib",
    reservation="week",
    exclude="n1,n[7-9]",
    mem="500G",
    sbatch=("--mail-type=FAIL",),
    modules="cuda/12.4 gcc",
    container="flowrt.sif",
    container_mounts="/models:/models",
)


SGLANG = (
    f"--rollout.engine sglang --rollout.sglang.python {shlex.quote(sys.executable)} "
    "--rollout.sglang.arguments='--tp {tp}'"
)


def headers(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


@pytest.mark.parametrize("site", [Site(), FULL, ASCEND, EVERYTHING], ids=["defaults", "GPUs", "NPUs", "all options"])
def test_no_placeholder_is_left_and_the_script_is_valid_bash(site: Site) -> None:
    texts = filled(site)
    assert sorted(texts) == NAMES
    for name, text in texts.items():
        assert "{{" not in text, name
        assert text.startswith("#!/usr/bin/env bash\n")
        subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=20)
        assert not [line for line in headers(text) if line.endswith("=")], name


def test_the_recipe_may_be_the_path_of_a_task_file() -> None:
    file = ROOT / "examples" / "own_task.py"
    texts = filled(Site(recipe=f"{file}:RECIPE"))
    assert f"run_flowrt {file}:RECIPE " in texts["one_node.sbatch"]
    with pytest.raises(ConfigError, match="partition 'a/b' is not allowed"):
        filled(Site(partition="a/b"))


def test_site_values_fill_the_sbatch_options() -> None:
    texts = filled(FULL)
    assert {"--partition=gpu", "--account=lab", "--nodes=6", "--gpus-per-node=a100:8"} < set(
        headers(texts["many_nodes.sbatch"])
    )
    het = headers(texts["hetjob.sbatch"])
    assert [line for line in het if line.startswith(("--partition", "--nodes", "hetjob"))] == [
        *("--partition=gpu", "--nodes=2", "hetjob", "--partition=spare", "--nodes=4"),
    ]
    for name in ("many_nodes.sbatch", "hetjob.sbatch"):
        assert "--trainer.nodes 2 --trainer.ranks 16 --rollout.workers 32" in texts[name]
        assert "--nodes=2 --ntasks=2 --cpus-per-task=32 --gpus-per-node=a100:8" in texts[name]
        assert "--nodes=1 --ntasks=1 --cpus-per-task=4 --gpus-per-node=a100:1" in texts[name]
    assert {"--partition=spare", "--gpus-per-node=a100:1"} < set(headers(texts["extra_rollout.sbatch"]))
    assert {"--nodes=1", "--cpus-per-task=32"} < set(headers(texts["one_node.sbatch"]))


def test_requested_gpus_set_the_device_option() -> None:
    """The torch engines, the default, run on the CPU unless --device is given."""
    names = ("many_nodes.sbatch", "hetjob.sbatch", "one_node.sbatch")
    for name in names:
        assert "run_flowrt arithmetic --device cuda --controller.bind" in filled(FULL)[name]
        assert "run_flowrt arithmetic --controller.bind" in filled(Site())[name]
        assert "run_flowrt arithmetic --device npu --controller.bind" in filled(ASCEND)[name]


@pytest.mark.parametrize("name", ["many_nodes.sbatch", "hetjob.sbatch"])
def test_steps_share_the_memory_of_the_job_and_name_their_devices(name: str) -> None:
    """Otherwise the first step takes all of it, and the others wait."""
    for site in (Site(), FULL, ASCEND):
        steps = re.findall(r'"srun (.*)"', filled(site)[name])
        assert len(steps) == 2
        for step in steps:
            assert "--exact" in step
            assert "--mem=0" in step
            assert site == Site() or "--gpus-per-node=" in step or "--gres=npu:" in step


@pytest.mark.parametrize(
    ("flag", "value", "lines"),
    [
        ("qos", "long", ["--qos=long"]),
        ("constraint", "a100&ib", ["--constraint=a100&ib"]),
        ("reservation", "week", ["--reservation=week"]),
        ("exclude", "n1,n[7-9]", ["--exclude=n1,n[7-9]"]),
        ("mem", "500G", ["--mem=500G"]),
        ("time", "1-00:00:00", ["--time=1-00:00:00"]),
        ("save_s", 600, ["--signal=B:USR1@600"]),
        ("requeue", False, ["--no-requeue"]),
        ("sbatch", ("--mail-type=FAIL", "--comment=x"), ["--mail-type=FAIL", "--comment=x"]),
        ("gres", True, ["--gres=gpu:a100:8"]),
        ("npus", "npu:8", ["--gres=npu:8"]),
        ("mem", "0", ["--mem=0"]),
    ],
)
@pytest.mark.parametrize("name", ["one_node.sbatch", "many_nodes.sbatch", "hetjob.sbatch"])
def test_a_flag_adds_its_option_to_the_templates(name: str, flag: str, value: Any, lines: list[str]) -> None:
    own = dataclasses.replace(FULL, **{flag: value, **({"gpus": ""} if flag == "npus" else {})})
    plain = dataclasses.replace(FULL, gpus="" if flag == "npus" else FULL.gpus)
    assert set(lines) <= set(headers(filled(own)[name]))
    assert not set(lines) & set(headers(filled(plain)[name]))


def test_extra_workers_and_the_generating_part_have_options_of_their_own() -> None:
    site = dataclasses.replace(FULL, constraint="a100", rollout_constraint="l40", mem="500G", extra_mem="60G")
    texts = filled(site)
    assert {"--mem=60G", "--constraint=l40"} <= set(headers(texts["extra_rollout.sbatch"]))
    options = [line for line in headers(texts["hetjob.sbatch"]) if line.startswith("--constraint")]
    assert options == ["--constraint=a100", "--constraint=l40"]


def test_a_tensor_parallel_engine_sets_the_devices_of_each_worker() -> None:
    site = dataclasses.replace(FULL, flags=SGLANG.format(tp=4))
    texts = filled(site)
    for name in ("many_nodes.sbatch", "hetjob.sbatch"):
        assert "--trainer.ranks 16 --rollout.workers 8" in texts[name]
        assert "--nodes=1 --ntasks=1 --cpus-per-task=16 --gpus-per-node=a100:4" in texts[name]
        assert "--device cuda --rollout.engine sglang" in texts[name]
    assert {"--gpus-per-node=a100:4", "--cpus-per-task=16"} <= set(headers(texts["extra_rollout.sbatch"]))


def test_modules_are_loaded_before_the_run() -> None:
    for text in filled(dataclasses.replace(FULL, modules="cuda/12.4 gcc")).values():
        assert "\nmodule load cuda/12.4 gcc\n" in text
    assert "module load" not in "".join(filled(FULL).values())


def test_npus_set_the_environment_of_cann_in_every_template() -> None:
    for text in filled(ASCEND).values():
        assert "source /opt/cann/set_env.sh" in text
    assert "set_env" not in "".join(filled(FULL).values())
    assert "--rollout.workers 32" in filled(ASCEND)["many_nodes.sbatch"]
    assert "--cpus-per-task=4 --gres=npu:1" in filled(ASCEND)["many_nodes.sbatch"]


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_workers_run_in_the_container(runtime: Any) -> None:
    site = dataclasses.replace(
        FULL, container="/images/flowrt.sif", container_runtime=runtime, container_mounts="/m:/m", runs="/shared/jobs"
    )
    texts = filled(site)
    mounts = "/shared/jobs:/shared/jobs,/m:/m"
    options = {
        "pyxis": f"--container-image=/images/flowrt.sif --container-mounts={mounts}",
        "apptainer": f"apptainer exec --nv --bind {mounts} /images/flowrt.sif",
    }[runtime]
    assert f"{options} flowrt " in texts["one_node.sbatch"]
    assert f"{options} flowrt worker rollout" in texts["extra_rollout.sbatch"]
    for name in ("many_nodes.sbatch", "hetjob.sbatch"):
        [line] = [line for line in texts[name].splitlines() if line.startswith("container=")]
        assigned = subprocess.run(["bash", "-c", f'{line}\nprintf %s "$container"'], capture_output=True, text=True)
        config = parse(["--launch.rollout", f"srun {assigned.stdout}", "--rollout.workers", "1"])
        [words] = [command.words for command in worker_commands(config, "tcp://x:1") if command.name == "rollout-0"]
        assert shlex.join(words).startswith(f"srun {options} sh -c")
        inner = words[words.index("sh") :]
        inner[inner.index("-c") + 1] = inner[inner.index("-c") + 1].replace("python3", "echo")
        shown = subprocess.run(inner, capture_output=True, text=True, check=True).stdout
        assert shown.startswith("-Pm flowrt.roles.rollout --controller tcp://x:1")
    assert "container" not in re.sub(r"container=''|\$container", "", "".join(filled(FULL).values()))


def test_unset_values_leave_their_options_to_slurm() -> None:
    for text in filled(Site()).values():
        assert not re.search(r"--(partition|account|gpus\S*)=", text)


def test_the_job_environment_is_that_of_this_python() -> None:
    for text in filled(Site()).values():
        assert f"export PATH={Path(sys.executable).parent}:" in text
        assert "PYTHONSAFEPATH=1" in text
    quoted = placeholders(Site(runs="/a dir/it's"))["RUNS"]
    assert subprocess.run(["bash", "-c", f"printf %s {quoted}"], capture_output=True, text=True).stdout == "/a dir/it's"


def test_the_process_group_timeout_exceeds_all_hccl_timeouts() -> None:
    """Otherwise the first error reported is not the root cause."""
    text = (HERE / "cann.sh").read_text()
    template = dict(re.findall(r"^export (HCCL_\w+_TIMEOUT)=(\d+)", text, re.MULTILINE))
    assert template.keys() == HCCL_TIMEOUTS_S.keys()
    for environment in (template, {}, {"HCCL_EXEC_TIMEOUT": "0", "HCCL_CONNECT_TIMEOUT": "7200"}):
        connect, execution, event = (int(environment.get(name, default)) for name, default in HCCL_TIMEOUTS_S.items())
        assert event > execution
        group_s = group_timeout_s(Device("npu"), 300.0, environment)
        assert group_s > max(connect, execution, event)
        assert group_timeout_s(Device("npu"), 9000.0, environment) == 9000.0
        assert group_timeout_s(Device("cuda"), 300.0, environment) == 300.0


def test_no_template_has_a_fixed_port_or_a_sleep() -> None:
    for path in [*HERE.glob("*.sbatch"), *HERE.glob("*.sh")]:
        text = path.read_text()
        assert not re.search(r"MASTER_PORT|\bsleep\b|:\d{4,5}\b", text), path


def test_an_unknown_placeholder_is_an_error() -> None:
    with pytest.raises(ConfigError, match="unknown placeholder PARTITON"):
        fill("#SBATCH --partition={{PARTITON}}\n", placeholders(FULL))


@pytest.mark.parametrize(
    "flags",
    [
        ["--qos", "a\nb"],
        ["--container-runtime", "docker"],
        ["--recipe", ""],
        ["--save-s", "soon"],
        ["--sbatch", "x y"],
        ["--partitoin", "gpu"],
        ["another-directory"],
        ["--gpus", "2", "--flags", "--no-such-flag 1"],
    ],
)
def test_bad_flags_write_nothing(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", str(tmp_path / "site"), *flags]) == 2
    assert not list(tmp_path.iterdir())
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("site", "message"),
    [  # None: not refused
        (Site(nodes=2, train_nodes=2), "at least one node trains and one generates"),
        (Site(partition="a b"), "partition 'a b' is not allowed in a script"),
        (Site(account="x\n#SBATCH --uid=0"), "account .* is not allowed"),
        (Site(recipe="$(date)"), "recipe .* is not allowed"),
        (Site(gpus="many"), "does not end with a number"),
        (Site(gpus="a100:0"), "does not end with a number"),
        (Site(cpus=0), "--cpus is 0; use 1 to"),
        (Site(save_s=0), "--save-s is 0; use 1 to"),
        (Site(cpus=10**20), "--cpus is 10+; use 1 to"),
        (Site(nodes=10**20), "--nodes is 10+; use 1 to"),
        (Site(mem="٣G"), "--mem .* use a number"),
        (Site(mem="5G", sbatch=("--mem-per-cpu=3G",)), "contradicts --mem"),
        (Site(extra_mem="5G", sbatch=("--mem-per-gpu=3G",)), "contradicts --mem"),
        (Site(sbatch=("--mem-per-gpu=3G", "--mem-bind=local")), None),
        (Site(sbatch=("--signa=B:USR2",)), "--sbatch '--signa=B:USR2' contradicts .* use --save-s"),
        (Site(sbatch=("--gpus=3",)), "--sbatch '--gpus=3' contradicts .* use --gpus"),
        (Site(modules="-f purge"), "--modules .* use names of modules"),
        (Site(modules="cuda --force"), "--modules .* use names of modules"),
        (Site(modules="cuda/12.4 gcc-12"), None),
        (Site(container="a.sif", runs="/x,y"), "--runs '/x,y' cannot be mounted"),
        (Site(container="a.sif", runs="/x:y"), "--runs '/x:y' cannot be mounted"),
        (Site(runs="/x,y"), None),
        (Site(flags="--run-dir x"), "--flags has --run-dir, .*; use --runs"),
        (Site(flags="--run_dir=x"), "--flags has --run_dir=x, .*; use --runs"),
        (Site(flags="--controller.bind tcp://*:1"), "--flags has --controller.bind"),
        (Site(flags="--rollout.workers 3"), "--flags has --rollout.workers, .*; use --nodes"),
        (Site(flags="--trainer.ranks 3"), "--flags has --trainer.ranks, .*; use --gpus"),
        (Site(flags="--launch.rollout ssh"), "--flags has --launch.rollout"),
        (Site(flags="--steps 3 --"), "--flags has --, .*; leave it out"),
        (Site(gpus="8", flags="--device cpu"), "--flags has --device, .*; use --gpus or --npus"),
        (Site(flags="--device cpu"), None),
        (Site(nodes=3, flags=SGLANG.format(tp="8 --nnodes 2"), gpus="8"), "has --nnodes 2"),
        (Site(qos="a b"), "--qos 'a b' is not allowed"),
        (Site(constraint="a\n#SBATCH --uid=0"), "--constraint .* use features"),
        (Site(rollout_constraint="$(date)"), "--rollout-constraint .* use features"),
        (Site(reservation='x"'), "--reservation .* is not allowed"),
        (Site(exclude="n1 n2"), "--exclude .* use node names"),
        (Site(mem="much"), "--mem 'much' .* use a number"),
        (Site(extra_mem="-1G"), "--extra-mem .* use a number"),
        (Site(time="1 day"), "--time .* is not allowed"),
        (Site(time="soon"), "--time 'soon' is no time limit"),
        (Site(time="-1"), "--time '-1' is no time limit"),
        (Site(time="10"), None),
        (Site(time="3:59"), "--save-s 180 is not 60 s below --time 3:59"),
        (Site(time="00:03:59"), "--save-s 180 is not 60 s below"),
        (Site(time="1-0", save_s=86_341), "would save and end as soon as it starts"),
        (Site(time="1-0:10", save_s=86_341), None),
        (Site(time="unlimited", save_s=10**6), None),
        (Site(gres=True), "--gres is given without --gpus"),
        (Site(container_runtime="apptainer"), "--container-runtime is given without --container"),
        (Site(gpus=":8"), "does not end with a number"),
        (Site(flags="--steps"), "--steps needs a value"),
        (Site(flags="--no-such 1"), "takes no flag --no-such"),
        (Site(recipe="/etc"), "/etc"),
        (Site(recipe="missing.py"), "there is no task file missing.py"),
        (Site(recipe="missing.py", gpus="8"), "there is no task file missing.py"),
        (Site(recipe=f"{ROOT}/examples/own_task.py:OTHER"), "own_task.py has no recipe OTHER"),
        (Site(recipe=f"{ROOT}/examples/own_task.py", flags="--data.prefill True"), "data.prefill changes nothing"),
        (Site(sbatch=("--nodes=3",)), "--sbatch '--nodes=3' contradicts .* use --nodes"),
        (Site(sbatch=("--array=0-3",)), "contradicts .* use --extra"),
        (Site(sbatch=("--no-requeue",)), "contradicts .* use --requeue"),
        (Site(sbatch=("--output=/x",)), "contradicts .* edit them"),
        (Site(sbatch=("--job-name=mine", "--mail-type=FAIL")), None),
        (Site(sbatch=("--comment=a\nrm -rf",)), "--sbatch .* is not an option"),
        (Site(sbatch=("mail-type=FAIL",)), "--sbatch .* is not an option"),
        (Site(modules="cuda; rm"), "--modules .* use names of modules"),
        (Site(container="a b.sif"), "--container .* is not allowed"),
        (Site(container="a.sif", container_mounts="/a b:/c"), "--container-mounts .* use SOURCE:TARGET"),
        (Site(container_mounts="/a:/b"), "without --container"),
        (Site(container="a.sif", container_mounts="/a:/b", runs="/a b"), "--runs '/a b' cannot be mounted"),
        (Site(runs="/a\nb"), "--runs .* has a line end"),
        (Site(runs=""), "--runs is empty"),
        (Site(recipe=""), "--recipe is empty"),
        (Site(npus="npu:8", cann=""), "--cann is empty"),
        (Site(npus="npu:8", gpus="8"), "has one kind of accelerator"),
        (Site(rollout_gpus="8"), "without --gpus"),
        (Site(flags="--steps 'a"), "--flags .* are no command line"),
        (Site(gpus="2", flags=SGLANG.format(tp=4)), "needs 4 devices, and a node has 2"),
    ],
)
def test_invalid_site_values_are_refused(site: Site, message: str | None) -> None:
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        filled(site)


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "hetjob.sbatch").write_text("mine")
    with pytest.raises(ConfigError, match=r"hetjob\.sbatch exists"):
        write([str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["hetjob.sbatch"]


def test_the_slurm_command_writes_the_templates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", str(tmp_path / "site"), "--partition", "gpu"]) == 0
    assert [Path(line).name for line in capsys.readouterr().out.splitlines()] == NAMES
    assert "--partition=gpu" in (tmp_path / "site" / "one_node.sbatch").read_text()
