"""Engine descriptors: the properties that each declares; no other module compares the names of engines."""

import asyncio
import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from flowrt.engines.base import ExternalEngine
from flowrt.engines.descriptor import TrainEngineDescriptor
from flowrt.engines.fsdp.trainer import FsdpTrainer
from flowrt.engines.options import LoraOptions
from flowrt.engines.registry import ROLLOUT_ENGINES, TRAIN_ENGINES, RolloutEngineName, TrainEngineName
from flowrt.engines.server.engine import ServerRollout
from flowrt.engines.sglang.descriptor import SglangGeneration
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.errors import ConfigError
from flowrt.grpo import run_recipe
from flowrt.recipes.config_io import parse
from flowrt.recipes.constraints import check
from flowrt.roles.engine_setup import rollout_engine
from flowrt.roles.trainer import check_supports

ROOT = Path(__file__).resolve().parents[3]
SGLANG = ["--rollout.engine", "sglang", "--rollout.sglang.python", sys.executable]
FSDP = ["--trainer.engine", "fsdp"]
NAME_COMPARISON = re.compile(
    r"\.engine\s*(==|!=|in\b)|[\"'](torch|fsdp|sglang)[\"']\s*(==|!=)|(==|!=)\s*[\"'](torch|fsdp|sglang)[\"']"
)


def test_the_table_has_every_engine_that_a_configuration_can_name() -> None:
    assert set(TRAIN_ENGINES) == set(get_args(TrainEngineName))
    assert set(ROLLOUT_ENGINES) == set(get_args(RolloutEngineName))


def test_the_engine_table_imports_neither_torch_nor_aiohttp() -> None:
    code = "import flowrt.engines.registry, sys; sys.exit('torch' in sys.modules or 'aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=600).returncode == 0


def test_no_module_compares_the_name_of_an_engine() -> None:
    product = [path for package in ("flowrt", "workers", "launch") for path in (ROOT / package).rglob("*.py")]
    comparisons = [
        f"{path}: {line}" for path in product for line in path.read_text().splitlines() if NAME_COMPARISON.search(line)
    ]
    assert comparisons == []


def test_a_rollout_engine_is_checked_against_the_published_weights() -> None:
    fsdp, torch = TRAIN_ENGINES["fsdp"], TRAIN_ENGINES["torch"]
    whole = parse([*FSDP, "--trainer.fsdp.dtype", "bfloat16"]).trainer
    adapters = parse([*FSDP, "--trainer.lora.rank", "4"]).trainer
    merged = parse([*FSDP, "--trainer.lora.rank", "4", "--trainer.lora.publish", "merged"]).trainer
    assert (fsdp.published(whole).dtype, fsdp.published(whole).lora) == ("bfloat16", None)
    assert fsdp.published(adapters).lora == LoraOptions(rank=4)
    assert fsdp.published(merged).lora is None
    assert torch.published(parse([]).trainer).dtype == "float32"
    mistakes = ROLLOUT_ENGINES["sglang"].mistakes(parse([]).rollout, fsdp.published(adapters), deterministic=False)
    assert next(iter(mistakes)).startswith("rollouts on SGLang take whole weights")


def test_passes_are_in_lock_step_only_if_each_gathers_parameters() -> None:
    cases = [([], False), (FSDP, False), ([*FSDP, "--trainer.fsdp.gather", "pass"], True)]
    for flags, lock_step in cases:
        trainer = parse(flags).trainer
        assert TRAIN_ENGINES[trainer.engine].is_lock_step(trainer) is lock_step


@pytest.mark.parametrize(
    ("arguments", "devices"),
    [("", 1), ("--tp 2", 2), ("--max-total-tokens 64 --tp-size=4", 4), ("--tensor-parallel-size 8 --tp 2", 2)],
)
def test_a_server_uses_as_many_devices_as_it_has_tensor_parallel_ranks(arguments: str, devices: int) -> None:
    flags = ["--rollout.engine", "sglang", "--rollout.sglang.python", sys.executable]
    rollout = parse([*flags, f"--rollout.sglang.arguments={arguments}"]).rollout
    assert ROLLOUT_ENGINES["sglang"].devices(rollout) == devices
    assert ROLLOUT_ENGINES["torch"].devices(rollout) == 1


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"])
def test_a_server_with_more_ranks_than_its_worker_has_devices_is_refused(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--rollout.engine", "sglang", "--rollout.sglang.python", sys.executable, "--run-dir", str(tmp_path)]
    config = parse([*flags, "--rollout.sglang.arguments=--tp 4"])
    monkeypatch.setenv(variable, "2,3")
    with pytest.raises(ConfigError, match=rf"worker rollout-1 may use 2 accelerator.*{variable}=2,3.* ask for 4; give"):
        rollout_engine(config, "rollout-1")


@pytest.mark.parametrize(
    ("given", "share", "arguments"),
    [
        ("", 1.0, ""),
        ("", 0.4, "--mem-fraction-static 0.3400"),
        ("--tp 1", 0.4, "--tp 1 --mem-fraction-static 0.3400"),
        ("--mem-fraction-static 0.3", 0.4, "--mem-fraction-static 0.3"),
        ("--mem-frac=0.3 --tp 2", 0.4, "--mem-frac=0.3 --tp 2"),
    ],
)
def test_a_server_gets_the_share_of_its_worker_unless_the_user_gives_it_a_fraction(
    given: str, share: float, arguments: str
) -> None:
    server = parse([*SGLANG, f"--rollout.sglang.arguments={given}"]).rollout.sglang
    assert SglangGeneration().within_share(server, share).arguments == arguments


@pytest.mark.parametrize("value", ["1", "0", "nan", "half"])
def test_a_memory_fraction_of_a_server_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=f"--mem-fraction-static '{value}', which is no fraction between 0 and 1"):
        parse([*SGLANG, f"--rollout.sglang.arguments=--mem-fraction-static {value}"])


def test_the_sglang_engine_is_external_and_the_torch_engine_is_not() -> None:
    assert issubclass(ServerRollout, ExternalEngine)
    assert not issubclass(TorchRollout, ExternalEngine)


def test_a_worker_repeats_the_engine_check_of_the_launcher(tmp_path: Path) -> None:
    config = parse(["--rollout.engine", "sglang", "--rollout.sglang.python", sys.executable])
    server = dataclasses.replace(config.rollout.sglang, python=str(tmp_path / "gone"))
    moved = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, sglang=server))
    with pytest.raises(ConfigError, match="not a file"):
        rollout_engine(moved)


class Plain:
    """A training engine that declares nothing about supports."""


class Applying:
    applies_supports = True


class Ignoring:
    applies_supports = False


@pytest.mark.parametrize("engine", [Plain, Ignoring, Plain(), Ignoring()])
def test_truncated_sampling_is_refused_with_an_engine_that_ignores_supports(engine: object) -> None:
    truncated = parse(["--rollout.top-k", "8"])
    with pytest.raises(ConfigError, match=r"rollout.top_k is 8, and the training engine (Plain|Ignoring) does not"):
        check_supports(truncated, engine)
    check_supports(parse([]), engine)
    check_supports(truncated, Applying)
    check_supports(truncated, Applying())


def test_a_run_with_an_engine_class_that_ignores_supports_is_refused(tmp_path: Path) -> None:
    config = parse(["--rollout.top-k", "8", "--run-dir", str(tmp_path / "run")])
    engine: Any = Plain
    with pytest.raises(ConfigError, match="training engine Plain"):
        asyncio.run(run_recipe(config, train_engine=engine))
    assert not (tmp_path / "run").exists()


def test_a_descriptor_that_does_not_declare_supports_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    truncated = parse(["--rollout.top-k", "8"])
    check(truncated)
    monkeypatch.setattr(type(TRAIN_ENGINES["torch"]), "applies_supports", TrainEngineDescriptor.applies_supports)
    with pytest.raises(ConfigError, match=r"rollout.top_k is 8, and trainer.engine torch"):
        check(truncated)
    check(parse([]))


def test_the_engines_of_the_table_apply_supports() -> None:
    assert TorchTrainer.applies_supports
    assert FsdpTrainer.applies_supports
