"""SLURM templates: filled-in values, omitted options, refused values."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowrt.cli import main
from flowrt.errors import ConfigError
from flowrt.launcher.slurm import HERE, Site, fill, filled, placeholders, write
from flowrt.ranks.process_group import HCCL_TIMEOUTS_S, group_timeout_s
from flowrt.transport.devices import Device

ROOT = Path(__file__).parents[3]
NAMES = ["ascend.sbatch", "extra_rollout.sbatch", "hetjob.sbatch", "many_nodes.sbatch", "one_node.sbatch"]
FULL = Site(partition="gpu", rollout_partition="spare", account="lab", nodes=6, train_nodes=2, gpus="a100:8")


def headers(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


@pytest.mark.parametrize("site", [Site(), FULL], ids=["defaults", "all options"])
def test_no_placeholder_is_left_and_the_script_is_valid_bash(site: Site) -> None:
    texts = filled(site)
    assert sorted(texts) == NAMES
    for name, text in texts.items():
        assert "{{" not in text, name
        assert text.startswith("#!/usr/bin/env bash\n")
        subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=20)
        assert not [line for line in headers(text) if line.endswith("=")], name


def test_the_recipe_may_be_the_path_of_a_task_file() -> None:
    texts = filled(Site(recipe="/home/me/mine.py:RECIPE"))
    assert "run_flowrt /home/me/mine.py:RECIPE " in texts["one_node.sbatch"]
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
        assert "--nodes=1 --ntasks=1 --cpus-per-task=4 --gpus-per-task=1" in texts[name]
    assert {"--partition=spare", "--gpus-per-node=a100:1"} < set(headers(texts["extra_rollout.sbatch"]))
    assert {"--nodes=1", "--cpus-per-task=32"} < set(headers(texts["one_node.sbatch"]))


def test_requested_gpus_set_the_device_option() -> None:
    """The torch engines, the default, run on the CPU unless --device is given."""
    names = ("many_nodes.sbatch", "hetjob.sbatch", "one_node.sbatch")
    for name in names:
        assert "run_flowrt arithmetic --device cuda --controller.bind" in filled(FULL)[name]
        assert "run_flowrt arithmetic --controller.bind" in filled(Site())[name]
    assert "--device npu" in filled(Site())["ascend.sbatch"]


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
    text = (HERE / "ascend.sbatch").read_text()
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
    for path in [*HERE.glob("*.sbatch"), HERE / "job.sh"]:
        text = path.read_text()
        assert not re.search(r"MASTER_PORT|\bsleep\b|:\d{4,5}\b", text), path


def test_an_unknown_placeholder_is_an_error() -> None:
    with pytest.raises(ConfigError, match="unknown placeholder PARTITON"):
        fill("#SBATCH --partition={{PARTITON}}\n", placeholders(FULL))


@pytest.mark.parametrize(
    ("site", "message"),
    [
        (Site(nodes=2, train_nodes=2), "at least one node trains and one generates"),
        (Site(partition="a b"), "partition 'a b' is not allowed in a script"),
        (Site(account="x\n#SBATCH --uid=0"), "account .* is not allowed"),
        (Site(recipe="$(date)"), "recipe .* is not allowed"),
        (Site(gpus="many"), "does not end with a number"),
        (Site(cpus=0), "use 1 or more"),
    ],
)
def test_invalid_site_values_are_refused(site: Site, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
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
