"""Runs over several hosts: worker commands, worker names, and the address of the controller."""

import asyncio
import dataclasses
import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flowrt.errors import ConfigError, WaitExpired
from flowrt.launcher.observer import locate
from flowrt.launcher.worker_commands import check_machine, check_programs, worker_commands
from flowrt.ranks.process_group import INTERFACE, choose_interface
from flowrt.recipes.config import CheckpointConfig
from flowrt.recipes.config_io import parse
from flowrt.recipes.run_dir import address_file, final_dir
from flowrt.roles.main import check_reach, find_address, worker_name
from flowrt.runtime.host import interfaces, local_address, own_address, pid_namespace, reachable
from flowrt.runtime.parent_death import LAUNCHER

ADDRESS = "tcp://10.1.2.3:4567"


def commands(*flags: str, rendezvous: str = "") -> dict[str, list[str]]:
    return {command.name: command.words for command in worker_commands(parse(flags), ADDRESS, rendezvous)}


# ---- commands


def test_each_role_gets_its_launch_prefix() -> None:
    words = commands(
        *("--launch.rollout", "srun --het-group=1 --ntasks=1", "--launch.trainer", "ssh 'a host'"),
        *("--rollout.workers", "2", "--launch.auxiliary", "nice"),
    )
    assert words["rollout-1"][:4] == ["srun", "--het-group=1", "--ntasks=1", sys.executable]
    assert words["trainer"][:3] == ["ssh", "a host", sys.executable]
    assert [words[name][0] for name in ("source", "reward", "reference")] == ["nice"] * 3


def test_rollout_workers_are_assigned_to_hosts_round_robin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENERATE", "a,b")
    flags = ["--launch.rollout-hosts", "$GENERATE", "--launch.rollout", "ssh $HOST", "--rollout.workers", "3"]
    words = commands(*flags)
    assert [words[f"rollout-{index}"][:2] for index in range(3)] == [["ssh", host] for host in ("a", "b", "a")]


def test_without_launch_prefixes_all_workers_run_locally() -> None:
    assert {words[0] for words in commands().values()} == {sys.executable}
    for name, words in commands().items():
        role = name.partition("-")[0]
        assert words[1:5] == ["-Pm", f"flowrt.roles.{role}", "--controller", ADDRESS]


def test_worker_commands_name_the_key_directory() -> None:
    config = parse([])
    config = dataclasses.replace(config, controller=dataclasses.replace(config.controller, keys="/a/keys"))
    for command in worker_commands(config, ADDRESS):
        assert command.words[command.words.index("--keys") + 1] == "/a/keys"


def test_a_multi_host_trainer_gets_ranks_hosts_and_rendezvous() -> None:
    words = commands(
        *("--trainer.ranks", "8", "--trainer.nodes", "2", "--launch.trainer", "srun --nodes=2"),
        rendezvous="10.1.2.3:5",
    )["trainer"]
    at = words.index("flowrt.ranks.torchrun")
    assert words[at + 1 : at + 7] == ["--ranks", "4", "--hosts", "2", "--rendezvous", "10.1.2.3:5"]


def test_ranks_of_one_host_rendezvous_in_the_run_directory() -> None:
    words = commands("--trainer.ranks", "2")["trainer"]
    assert words[1:5] == ["-Pm", "flowrt.ranks.torchrun", "--ranks", "2"]
    assert "--rendezvous" not in words
    assert Path(words[words.index("--directory") + 1]).name == "ranks"
    elsewhere = commands("--trainer.ranks", "2", "--launch.trainer", "ssh host")["trainer"]
    assert "--directory" not in elsewhere, "another host may not have the run directory"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trainer.ranks", "3", "--trainer.nodes", "2", "--launch.trainer", "srun"], "does not divide"),
        (["--trainer.ranks", "2", "--trainer.nodes", "2"], "launch.trainer is empty"),
        (["--launch.rollout-hosts", "a,b", "--launch.rollout", "ssh a"], r"no \$HOST"),
        (["--launch.rollout", "ssh 'host"], "launch.rollout cannot be split into words"),
    ],
)
def test_invalid_host_settings_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(flags)


def test_an_empty_host_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="names no host"):
        commands("--launch.rollout-hosts", ",", "--launch.rollout", "ssh $HOST")


def test_a_launch_program_that_is_not_installed_is_named() -> None:
    with pytest.raises(ConfigError, match=r"launch\.auxiliary starts with nosuchrun"):
        check_programs(parse(["--launch.auxiliary", "nosuchrun -n 1"]))


# ---- names


@pytest.mark.parametrize(
    ("given", "environment", "name"),
    [
        ("", {}, "rollout-0"),
        ("left", {}, "left"),
        ("", {"RANK": "3"}, "rollout-3"),
        ("left", {"RANK": "3"}, "left-3"),
        ("", {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, "rollout-2"),
        ("left", {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}, "left-2"),
        ("left", {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, "left"),
        ("left", {"RANK": "7", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "left-7"),
    ],
)
def test_workers_started_by_one_command_get_distinct_names(given: str, environment: dict[str, str], name: str) -> None:
    assert worker_name("rollout", given, environment) == name


# ---- addresses


def test_a_wildcard_bind_is_published_as_an_address_of_this_host() -> None:
    bound = reachable("tcp://0.0.0.0:4567", "")
    assert bound == f"tcp://{own_address()}:4567"
    assert own_address() in interfaces().values()
    assert reachable("tcp://0.0.0.0:4567", "head") == "tcp://head:4567"
    assert reachable("tcp://10.1.2.3:4567", "head") == "tcp://10.1.2.3:4567"


def test_loopback_is_used_only_without_another_interface() -> None:
    others = [address for address in interfaces().values() if not address.startswith("127.")]
    assert own_address().startswith("127.") == (not others)
    assert interfaces()["lo"] == "127.0.0.1"


async def test_the_controller_address_is_read_from_the_run_directory(tmp_path: Path) -> None:
    assert await find_address(ADDRESS, 0.1) == ADDRESS
    pending = asyncio.create_task(find_address(str(tmp_path), 20.0))
    address_file(tmp_path).write_text(ADDRESS + "\n")
    assert await pending == ADDRESS


async def test_a_run_directory_may_be_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job").mkdir()
    address_file(tmp_path / "job").write_text(ADDRESS + "\n")
    for name in ("job", "./job", "job/"):
        assert await find_address(name, 0.1) == ADDRESS
        assert locate(name) == (ADDRESS, Path(name))


async def test_a_run_directory_without_an_active_run_times_out(tmp_path: Path) -> None:
    with pytest.raises(WaitExpired, match=r"waited 0 s for .*/address: is a run active"):
        await find_address(str(tmp_path), 0.05)


def test_a_host_without_the_model_is_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(parse([]), run_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=f"model {tmp_path}/model does not exist on host '{socket.gethostname()}'"):
        check_reach(config)


def test_a_host_without_the_run_directory_cannot_write_checkpoints(tmp_path: Path) -> None:
    config = dataclasses.replace(parse([]), run_dir=str(tmp_path / "run"), model=str(tmp_path))
    check_reach(config)
    check_reach(dataclasses.replace(config, checkpoint=CheckpointConfig(every=0)), checkpoints=True)
    with pytest.raises(ConfigError, match=f"run directory {tmp_path}/run is not the controller's on host"):
        check_reach(config, checkpoints=True)


def test_the_directory_of_the_final_model_is_configurable(tmp_path: Path) -> None:
    assert final_dir(parse(["--trainer.final-dir", str(tmp_path / "out")])) == tmp_path / "out"
    assert final_dir(dataclasses.replace(parse([]), run_dir="run")) == Path("run/final")


# ---- the launcher's process id


@pytest.mark.parametrize(("namespace", "code"), [(pid_namespace(), 1), (f"{socket.gethostname()}/another/4", 0)])
def test_the_launcher_process_is_checked_only_on_its_own_host(namespace: str, code: int) -> None:
    """The environment is passed on to other hosts, where the process id is meaningless."""
    exited = subprocess.Popen(["true"])
    exited.wait(20)
    result = subprocess.run(
        [sys.executable, "-c", "from flowrt.runtime.parent_death import die_with_parent as d; d()"],
        env={**os.environ, LAUNCHER: f"{namespace} {exited.pid}"},
        timeout=600,
    )
    assert result.returncode == code


def test_a_controller_without_a_route_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"has no route to the controller at tcp://nowhere.invalid:1: .*; check the address"
    ):
        local_address("tcp://nowhere.invalid:1")


# ---- the ranks of a trainer


def chosen_interface(controller: str, **environment: str) -> str | None:
    choose_interface(controller, environment)
    return environment.get(INTERFACE)


def test_ranks_use_the_network_interface_of_the_controller() -> None:
    two_ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    assert chosen_interface("tcp://127.0.0.1:9", **two_ranks) == "lo"
    address = own_address()
    name = next(name for name, own in interfaces().items() if own == address)
    assert chosen_interface(f"tcp://{address}:9", **two_ranks) == name
    assert chosen_interface(f"tcp://{address}:9", **two_ranks, GLOO_SOCKET_IFNAME="ib0") == "ib0"


def test_ranks_of_one_host_need_no_network() -> None:
    assert chosen_interface("tcp://192.0.2.1:9", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2") == "lo"
    assert chosen_interface("tcp://192.0.2.1:9") is None
    assert (
        chosen_interface("tcp://192.0.2.1:9", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", FLOWRT_RANKS_STORE="file") is None
    )


def test_adapters_without_peft_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(["--trainer.engine", "fsdp", "--trainer.lora.rank", "4"])
    check_programs(config)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs peft, not installed here: pip install 'flowrt\[lora\]'"):
        check_programs(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--threads", "9"], "threads is 9, and this machine has 2 cores; use at most 8"),
        (["--rollout.workers", "200"], r"204 workers with 1 threads each .* at most 128 threads in all"),
        (["--rollout.workers", "15", "--threads", "8"], "19 workers with 8 threads each"),
        (["--trainer.ranks", "200"], "205 workers"),
    ],
)
def test_too_many_threads_for_a_machine_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_machine(parse(settings), cores=2)


def test_workers_on_other_hosts_do_not_count_towards_this_machine() -> None:
    words = ["--launch.rollout", "srun", "--launch.trainer", "srun", "--launch.auxiliary", "srun"]
    check_machine(parse([*words, "--threads", "64", "--rollout.workers", "1000"]), cores=2)
    check_machine(parse(["--threads", "8", "--rollout.workers", "12"]), cores=2)
