"""Accelerators of this machine that a run does not use are named, with the flag that uses them."""

from pathlib import Path

import pytest

from flowrt.launcher.device_check import unused
from flowrt.recipes.config_io import parse


def seen(name: str, count: int) -> str:
    """A probe of a machine whose torch sees all devices."""
    return ""


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    for index in range(4):
        (tmp_path / f"nvidia{index}").touch()
    (tmp_path / "nvidiactl").touch()
    return tmp_path


def test_unused_gpus_are_named_with_the_flag(dev: Path) -> None:
    expected = "this machine has 4 GPUs, and trainer and rollout compute on the CPU; --device cuda uses them"
    assert unused(parse([]), {}, dev, seen) == expected
    assert unused(parse([]), {"CUDA_VISIBLE_DEVICES": "2"}, dev, seen).startswith("this machine has a GPU, and")


def test_npus_have_a_flag_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "davinci0").touch()
    assert unused(parse([]), {}, tmp_path, seen).endswith("; --device npu uses them")


def test_a_torch_that_sees_none_is_named(dev: Path) -> None:
    sentence = unused(parse([]), {}, dev, lambda name, count: f"there is no {name} for {count}")
    assert sentence.endswith("; torch does not see one: there is no cuda for 1")


@pytest.mark.parametrize(
    "flags",
    [
        ["--device", "cuda"],
        ["--device", "cpu"],
        ["--device", "auto"],
        ["--trainer.device", "cuda"],
        ["--launch.trainer", "ssh a", "--launch.rollout", "ssh b"],
    ],
)
def test_a_chosen_device_is_not_questioned(dev: Path, flags: list[str]) -> None:
    assert unused(parse(flags), {}, dev, seen) == ""


def test_hidden_or_absent_devices_are_not_named(dev: Path, tmp_path: Path) -> None:
    assert unused(parse([]), {"CUDA_VISIBLE_DEVICES": ""}, dev, seen) == ""
    (tmp_path / "empty").mkdir()
    assert unused(parse([]), {}, tmp_path / "empty", seen) == ""
