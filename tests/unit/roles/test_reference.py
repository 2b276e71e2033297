"""The reference model: its dtype is the trainer's, so that an untrained policy has a divergence of 0."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrt.algorithms import kl_k3_T
from flowrt.engines.hf import load_model
from flowrt.engines.training.forward import apply_optimizations, enable_packing, response_logprobs, score
from flowrt.errors import ConfigError
from flowrt.launcher.accelerators import assign
from flowrt.launcher.worker_commands import worker_commands
from flowrt.recipes.config_io import parse
from flowrt.recipes.constraints import check
from flowrt.recipes.devices import reference_device, reference_dtype
from flowrt.roles import reference
from flowrt.roles.reference import load_reference, score_on
from flowrt.transport.devices import choose
from tests.decoders import DECODERS

FSDP = ("--trainer.engine", "fsdp", "--trainer.fsdp.dtype")


def samples() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    lengths = ((5, 9), (5, 3), (7, 12))
    prompts = [torch.randint(2, 40, (length,), generator=generator) for length, _ in lengths]
    return prompts, [torch.randint(2, 40, (length,), generator=generator) for _, length in lengths]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model_class, config = DECODERS["llama"]
    torch.manual_seed(0)
    model_class(config).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(reference, "reference_model_dir", lambda _: tmp_path / "model")
    return tmp_path / "model"


def reference_logprobs(*flags: str) -> torch.Tensor:
    config: Any = parse(list(flags))
    device = choose(reference_device(config))
    return torch.cat(score_on(device, load_reference(config, device), *samples(), 1.0, 8192))


@pytest.mark.parametrize("share", ["True", "False"])
def test_an_untrained_bfloat16_policy_has_no_divergence(model: Path, share: str) -> None:
    flags = (*FSDP, "bfloat16", "--trainer.share-prompts", share)
    policy = apply_optimizations(load_model(model, dtype=torch.bfloat16), parse(list(flags)).trainer)
    policy_T = response_logprobs(policy, *samples(), 1.0)[0].detach()
    assert float(kl_k3_T(policy_T, reference_logprobs(*flags)).abs().mean()) <= 1e-6
    assert float(kl_k3_T(policy_T, reference_logprobs(*flags, "--reference.dtype", "float32")).abs().mean()) > 1e-6


def test_the_reference_of_a_float32_trainer_equals_the_plain_model(model: Path) -> None:
    plain = load_model(model).eval()
    enable_packing(plain)
    assert torch.equal(reference_logprobs(), torch.cat(score(plain, *samples(), 1.0, 8192)))


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ((), "float32"),
        ((*FSDP, "bfloat16"), "bfloat16"),
        ((*FSDP, "float64"), "float64"),
        ((*FSDP, "bfloat16", "--reference.dtype", "float32"), "float32"),
        (("--reference.dtype", "bfloat16"), "bfloat16"),
    ],
)
def test_the_reference_dtype_defaults_to_that_of_the_trainer(flags: tuple[str, ...], dtype: str) -> None:
    assert reference_dtype(parse(list(flags))) == dtype


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--reference.device", "tpu"], "--reference.device takes one of auto, cpu, cuda, npu, not 'tpu'"),
        (["--reference.workers", "0"], "reference.workers is 0; use"),
        (["--algorithm.kl.coef", "0", "--reference.workers", "2"], "reference.workers is 2, and algorithm reinforce"),
        (
            ["--algorithm.kl.coef", "0", "--reference.dtype", "float64"],
            "reference.dtype is float64, and algorithm reinforce",
        ),
    ],
)
def test_invalid_or_unused_reference_options_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(parse(flags))


def test_reference_workers_are_separate_processes_on_devices_in_turn() -> None:
    def names(*flags: str) -> list[str]:
        return [
            command.name for command in worker_commands(parse(list(flags)), "tcp://a:1") if command.role == "reference"
        ]

    assert names() == ["reference"]
    assert names("--reference.workers", "2") == ["reference-0", "reference-1"]
    assert names("--algorithm.kl.coef", "0") == []
    config = parse(["--reference.workers", "3", "--reference.device", "auto"])
    assigned = assign(config, ("4", "5"))
    assert [assigned[f"reference-{index}"] for index in range(3)] == [("4",), ("5",), ("4",)]
    assert "reference" not in assign(parse([]), ("4", "5"))
