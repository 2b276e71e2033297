"""Assignment of the accelerators of the launcher's machine to its workers."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flowrt.errors import ConfigError
from flowrt.launcher.accelerators import environments, shared_device_bytes, visible
from flowrt.launcher.doctor.estimate import estimate
from flowrt.launcher.processes import Children
from flowrt.recipes.config_io import parse
from flowrt.runtime.resource_limits import MEMORY_SHARE
from tests.unit.launcher.test_memory_needs import SEVEN_B

FSDP = ["--trainer.engine", "fsdp", "--trainer.ranks", "2"]
SPLIT = ["--rollout.engine", "sglang", "--rollout.sglang.python", sys.executable]


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    """The device directory of a machine with four GPUs."""
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    return tmp_path


def visible_to_workers(flags: list[str], dev: Path, **environment: str) -> dict[str, str]:
    """The devices that each worker sees."""
    assigned = environments(parse(flags), environment, dev)
    return {name: variables["CUDA_VISIBLE_DEVICES"] for name, variables in assigned.items()}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {"rollout-0": "0", "rollout-1": "1"}),  # this trainer works on the CPU
        (FSDP, {"trainer": "0,1", "rollout-0": "2", "rollout-1": "3"}),
        ([*FSDP, "--rollout.workers", "3"], {"trainer": "0,1", "rollout-0": "2", "rollout-1": "3", "rollout-2": "2"}),
        ([*FSDP, "--trainer.fsdp.device", "cpu"], {"rollout-0": "0", "rollout-1": "1"}),
        ([*FSDP[:3], "4"], {"trainer": "0,1,2,3", "rollout-0": "0", "rollout-1": "1"}),
        (
            [*FSDP, *SPLIT, "--rollout.sglang.arguments=--tp 2"],
            {"trainer": "0,1", "rollout-0": "2,3", "rollout-1": "2,3"},
        ),
        ([*SPLIT, "--rollout.sglang.arguments=--tp-size=2"], {"rollout-0": "0,1", "rollout-1": "2,3"}),
        ([*SPLIT, "--rollout.sglang.arguments=--tp 8"], {"rollout-0": "0,1,2,3", "rollout-1": "0,1,2,3"}),
        ([*FSDP, "--launch.rollout", "srun"], {"trainer": "0,1"}),
        ([*FSDP, "--launch.trainer", "srun"], {"rollout-0": "0", "rollout-1": "1"}),
        (["--launch.devices", "none"], {}),
        (
            ["--device", "cuda"],
            {"trainer": "0", "rollout-0": "1", "rollout-1": "2", "reference": "1"},
        ),
        (
            ["--device", "cuda", "--rollout.workers", "1", "--launch.devices", "0"],
            {"trainer": "0", "rollout-0": "0", "reference": "0"},
        ),
        ([*FSDP, "--launch.devices", "3,1,GPU-5a"], {"trainer": "3,1", "rollout-0": "GPU-5a", "rollout-1": "GPU-5a"}),
    ],
)
def test_devices_are_divided_among_the_local_workers(flags: list[str], expected: dict[str, str], dev: Path) -> None:
    assert visible_to_workers(flags, dev) == expected


def test_only_devices_visible_to_the_launcher_are_assigned(dev: Path) -> None:
    assert visible_to_workers(FSDP, dev, CUDA_VISIBLE_DEVICES="GPU-a,GPU-b,7") == {
        "trainer": "GPU-a,GPU-b",
        "rollout-0": "7",
        "rollout-1": "7",
    }
    assert (
        visible_to_workers(FSDP, dev, CUDA_VISIBLE_DEVICES="")
        == visible_to_workers(FSDP, dev, CUDA_VISIBLE_DEVICES="-1")
        == {}
    )


def test_npus_are_found_and_a_machine_without_devices_assigns_none(tmp_path: Path) -> None:
    assert visible_to_workers(FSDP, tmp_path, CUDA_VISIBLE_DEVICES="0") == {}
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (tmp_path / name).touch()
    assert visible({}, tmp_path) == ("ASCEND_RT_VISIBLE_DEVICES", ("0", "1"))
    assert visible({"ASCEND_RT_VISIBLE_DEVICES": "5"}, tmp_path) == ("ASCEND_RT_VISIBLE_DEVICES", ("5",))


def test_an_invalid_device_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"launch\.devices is '0,,1'; use auto, none, or a list like 0,1,2"):
        parse(["--launch.devices", "0,,1"])


async def test_a_worker_process_gets_its_own_environment(tmp_path: Path) -> None:
    """So does its replacement, under the same name."""
    children = Children(tmp_path, {"SHARED": "1"}, {"rollout-1": {"CUDA_VISIBLE_DEVICES": "3"}})
    for name in ("rollout-1", "reward", "rollout-1"):
        child = await children.start(name, ["sh", "-c", "echo $SHARED $CUDA_VISIBLE_DEVICES"])
        assert await child.wait_exit(30.0) == 0
    logs = [(tmp_path / f"{name}.log").read_text().split() for name in ("rollout-1", "reward")]
    assert logs == [["1", "3", "1", "3"], ["1", *filter(None, [os.environ.get("CUDA_VISIBLE_DEVICES")])]]


def test_a_shared_device_has_room_for_each_worker_within_its_share() -> None:
    config = parse(["--device", "cuda", "--rollout.workers", "3"])
    needs = dataclasses.replace(estimate(config, SEVEN_B), trainer_device=9000, server=90, reference_device=900)
    sizes = [shared_device_bytes(config, needs, devices) for devices in (0, 1, 2, 3, 4, 5)]
    assert sizes == pytest.approx([0, 11300, 1300, 1200, 1100, 1100], abs=1)  # trainer and a worker on their own: 0
    mixed = parse(["--device", "cuda", "--rollout.device", "cpu", "--reference.device", "cpu"])
    assert shared_device_bytes(mixed, needs, 1) == 0  # only the trainer uses it


def shares_of(flags: list[str], dev: Path, **environment: str) -> dict[str, float]:
    """The shares of memory that workers get, by name."""
    assigned = environments(parse(flags), environment, dev)
    return {name: float(variables[MEMORY_SHARE]) for name, variables in assigned.items() if MEMORY_SHARE in variables}


def test_workers_that_share_a_device_divide_its_memory_by_what_they_need(dev: Path) -> None:
    flags = ["--device", "cuda", "--rollout.workers", "2"]
    assert shares_of(flags, dev, CUDA_VISIBLE_DEVICES="0,1,2,3").keys() == {"rollout-0", "reference"}
    shares = shares_of(flags, dev, CUDA_VISIBLE_DEVICES="0")
    assert shares.keys() == {"trainer", "rollout-0", "rollout-1", "reference"}
    assert sum(shares.values()) == pytest.approx(0.9, abs=1e-3)
    larger = shares_of([*flags, "--rollout.max-running-requests", "512"], dev, CUDA_VISIBLE_DEVICES="0")
    assert larger["rollout-0"] > shares["rollout-0"]
    assert larger["trainer"] < shares["trainer"]
    assert shares_of([*flags, "--launch.devices", "none"], dev) == {}
    generating = ["--rollout.device", "cuda", "--launch.trainer", "srun"]
    assert shares_of([*generating, "--rollout.workers", "4"], dev) == {}


def test_a_fraction_that_the_user_gives_a_server_is_left_out_of_what_others_divide(dev: Path) -> None:
    flags = [*FSDP[:3], "1", *SPLIT, "--rollout.workers", "1", "--launch.devices", "0"]
    shares = shares_of([*flags, "--rollout.sglang.arguments=--mem-fraction-static 0.5"], dev)
    assert shares == {"trainer": pytest.approx(0.4), "rollout-0": 0.5}
    with pytest.raises(ConfigError, match=r"trainer, rollout-0 share device 0, .* give 0\.95 of its memory to servers"):
        shares_of([*flags, "--rollout.sglang.arguments=--mem-fraction-static=0.95"], dev)


def test_a_model_of_unknown_sizes_cannot_share_a_device(dev: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    save_file({"weight": torch.zeros(1)}, model / "model.safetensors")
    flags = ["--device", "cuda", "--model", str(model), "--reference.device", "cpu"]
    with pytest.raises(ConfigError, match="workers share a device of this host, and its memory cannot be divided"):
        shares_of(flags, dev, CUDA_VISIBLE_DEVICES="0")
    assert shares_of(flags, dev) == {}
