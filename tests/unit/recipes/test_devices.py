"""The device of each role: its own, else that of the run, else the default of its engine."""

import sys
from contextlib import nullcontext

import pytest

from flowrt.errors import ConfigError, refuse
from flowrt.launcher.device_check import wanted_here
from flowrt.recipes.config import changed
from flowrt.recipes.config_io import defaults, from_toml, parse, to_toml
from flowrt.recipes.constraints import reward_mistakes
from flowrt.recipes.devices import named_accelerators, reference_device, rollout_device, training_device, with_devices

FSDP = ["--trainer.engine", "fsdp"]
SGLANG = ["--rollout.engine", "sglang", "--rollout.sglang.python", sys.executable]
NO_REFERENCE = ["--algorithm.kl.coef", "0"]


@pytest.mark.parametrize(
    ("flags", "trainer", "rollout", "reference"),
    [
        ([], "cpu", "cpu", "cpu"),
        ([*FSDP, *SGLANG], "auto", "auto", "cpu"),
        (["--device", "cuda"], "cuda", "cuda", "cuda"),
        (["--device", "auto"], "auto", "auto", "auto"),
        (["--device", "cuda", "--rollout.device", "cpu"], "cuda", "cpu", "cuda"),
        (["--trainer.device", "npu"], "npu", "cpu", "cpu"),
        ([*FSDP, *SGLANG, "--device", "cuda"], "cuda", "cuda", "cuda"),
        ([*FSDP, *SGLANG, "--device", "cpu"], "cpu", "cpu", "cpu"),
        ([*FSDP, "--trainer.fsdp.device", "auto", "--device", "cpu"], "auto", "cpu", "cpu"),
        ([*SGLANG, "--device", "auto"], "auto", "auto", "auto"),
        (["--device", "cuda", "--reference.device", "cpu"], "cuda", "cuda", "cpu"),
    ],
)
def test_each_role_resolves_its_device(flags: list[str], trainer: str, rollout: str, reference: str) -> None:
    config = parse(flags)
    assert (training_device(config), rollout_device(config), reference_device(config)) == (trainer, rollout, reference)
    assert with_devices(from_toml(to_toml(config))) == with_devices(config)


def test_without_a_device_the_configuration_is_unchanged() -> None:
    config = parse([])
    assert with_devices(config) is config


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {}),
        (["--device", "auto"], {}),
        (["--device", "cuda", *NO_REFERENCE], {"cuda": (1, ["trainer", "rollout"])}),
        (["--device", "cuda"], {"cuda": (1, ["trainer", "rollout", "reference"])}),
        (["--device", "cuda", *NO_REFERENCE, "--trainer.ranks", "3"], {"cuda": (3, ["trainer", "rollout"])}),
        (["--device", "cuda", *NO_REFERENCE, "--launch.trainer", "srun"], {"cuda": (1, ["rollout"])}),
        (["--device", "cuda", *NO_REFERENCE, *SGLANG], {"cuda": (1, ["trainer"])}),  # SGLang has its own torch
        (["--trainer.device", "cuda", "--rollout.device", "npu"], {"cuda": (1, ["trainer"]), "npu": (1, ["rollout"])}),
    ],
)
def test_the_accelerators_required_on_this_host(flags: list[str], expected: dict[str, tuple[int, list[str]]]) -> None:
    assert wanted_here(parse(flags)) == expected


def test_an_absent_reference_requires_no_accelerator() -> None:
    assert "reference" not in named_accelerators(parse(["--device", "cuda", *NO_REFERENCE]))
    with pytest.raises(ConfigError, match=r"reference\.device is cuda"):
        parse(["--reference.device", "cuda", *NO_REFERENCE])
    assert parse(["--reference.device", "cpu", *NO_REFERENCE])  # has no effect


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--rollout.device", "gpu"], "--rollout.device takes one of auto, cpu, cuda, npu, not 'gpu'"),
        (["--reference.device", "gpu"], "--reference.device takes one of auto, cpu, cuda, npu, not 'gpu'"),
        ([*SGLANG, "--rollout.device", "cuda"], "with rollout.engine sglang; set rollout.sglang.device in its place"),
        ([*SGLANG, "--rollout.dtype", "bfloat16"], "with rollout.engine sglang; set rollout.sglang.dtype in its place"),
        (["--device", "npu", "--rollout.compile", "True"], "rollout.compile is for CPUs and GPUs"),
        ([*SGLANG, "--device", "npu", "--rollout.sglang.weights", "broadcast"], "does not support NPUs"),
    ],
)
def test_an_invalid_device_is_refused(flags: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace(".", r"\.")):
        parse(flags)


@pytest.mark.parametrize(("name", "is_known"), [("cpu", True), ("cuda:3", True), ("foo", False), ("cuda:", False)])
def test_the_device_of_a_reward_model_is_one_that_torch_names(name: str, is_known: bool) -> None:
    config = changed(defaults("custom"), {"reward.functions": ("model:DIR",), "reward.model_device": name})
    with nullcontext() if is_known else pytest.raises(ConfigError, match=f"reward.model_device is '{name}'; use cpu"):
        refuse(reward_mistakes(config))
