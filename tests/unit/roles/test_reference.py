"""The reference model: its dtype is the trainer's, so that a policy that has not moved has a divergence of 0."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrt.algorithms import kl_k3_T
from flowrt.engines.hf import load_model
from flowrt.engines.training.forward import apply_optimizations, enable_packing, response_logprobs, score
from flowrt.errors import ConfigError
from flowrt.launcher.accelerators import assign
from flowrt.launcher.commands import worker_commands
from flowrt.recipes.config_io import parse
from flowrt.recipes.constraints import check, reference_dtype
from flowrt.recipes.devices import reference_device
from flowrt.roles import reference
from flowrt.roles.reference import load_reference, score_on
from flowrt.transport.devices import choose
from tests.decoders import DECODERS

FSDP = ("--trainer.engine", "fsdp", "--trainer.fsdp.dtype")


def samples() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    dice = torch.Generator().manual_seed(0)
    lengths = ((5, 9), (5, 3), (7, 12))
    prompts = [torch.randint(2, 40, (length,), generator=dice) for length, _ in lengths]
    return prompts, [torch.randint(2, 40, (length,), generator=dice) for _, length in lengths]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    kind, config = DECODERS["llama"]
    torch.manual_seed(0)
    kind(config).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(reference, "reference_model_dir", lambda _: tmp_path / "model")
    return tmp_path / "model"


def scored(*flags: str) -> torch.Tensor:
    config: Any = parse(list(flags))
    device = choose(reference_device(config))
    return torch.cat(score_on(device, load_reference(config, device), *samples(), 1.0, 8192))


@pytest.mark.parametrize("share", ["True", "False"])
def test_a_bfloat16_trainer_that_has_not_moved_has_no_divergence(model: Path, share: str) -> None:
    flags = (*FSDP, "bfloat16", "--trainer.share-prompts", share)
    policy = apply_optimizations(load_model(model, dtype=torch.bfloat16), parse(list(flags)).trainer)
    own_T = response_logprobs(policy, *samples(), 1.0)[0].detach()
    assert float(kl_k3_T(own_T, scored(*flags)).abs().mean()) <= 1e-6
    assert float(kl_k3_T(own_T, scored(*flags, "--reference.dtype", "float32")).abs().mean()) > 1e-6


def test_beside_a_float32_trainer_it_is_bit_for_bit_the_plain_model(model: Path) -> None:
    plain = load_model(model).eval()
    enable_packing(plain)
    assert torch.equal(scored(), torch.cat(score(plain, *samples(), 1.0, 8192)))


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
def test_the_dtype_is_the_trainers_unless_one_is_given(flags: tuple[str, ...], dtype: str) -> None:
    assert reference_dtype(parse(list(flags))) == dtype


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--reference.device", "tpu"], "reference.device is 'tpu'; use one of auto, cpu, cuda, npu"),
        (["--reference.workers", "0"], "reference.workers is 0; use"),
        (["--algorithm.kl.coef", "0", "--reference.workers", "2"], "reference.workers is 2, and algorithm reinforce"),
        (
            ["--algorithm.kl.coef", "0", "--reference.dtype", "float64"],
            "reference.dtype is float64, and algorithm reinforce",
        ),
    ],
)
def test_what_cannot_be_or_cannot_act_is_refused(flags: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check(parse(flags))


def test_each_worker_has_a_process_of_its_own_and_takes_turns_over_the_devices() -> None:
    def names(*flags: str) -> list[str]:
        return [one.name for one in worker_commands(parse(list(flags)), "tcp://a:1") if one.role == "reference"]

    assert names() == ["reference"]
    assert names("--reference.workers", "2") == ["reference-0", "reference-1"]
    assert names("--algorithm.kl.coef", "0") == []
    config = parse(["--reference.workers", "3", "--reference.device", "auto"])
    assigned = assign(config, ("4", "5"))
    assert [assigned[f"reference-{index}"] for index in range(3)] == [("4",), ("5",), ("4",)]
    assert "reference" not in assign(parse([]), ("4", "5"))
