"""Refreshed weights of the reference: which one scores a sample, its contents, and its retention."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from flowrt.engines.hf import load_model, named_parameters
from flowrt.engines.tiny_model import build_model, wrap_tokenizer
from flowrt.errors import ConfigError, EngineError
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import parse
from flowrt.recipes.constraints import check
from flowrt.recipes.run_dir import checkpoint_dir
from flowrt.recipes.tasks.arithmetic import Arithmetic
from flowrt.roles.reference import score_by_refresh, score_on
from flowrt.roles.reference_weights import (
    RefreshedModel,
    refresh_file,
    refresh_step,
    refresh_steps,
    resume_refreshes,
    write_refresh,
)
from flowrt.transport.devices import choose

SIZES = {"hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 48, "max_length": 64}
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory with a tiny start model."""
    torch.set_num_threads(1)
    tokenizer = wrap_tokenizer(Arithmetic(0, 1).tokenizer())
    build_model(vocab_size=len(tokenizer), seed=1, **SIZES).save_pretrained(tmp_path / "model")
    return tmp_path


def config_of(run_dir: Path, *flags: str) -> RunConfig:
    return dataclasses.replace(parse(["--reference.refresh", "2", *flags]), run_dir=str(run_dir))


def policy(run_dir: Path, seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    """Weights that the trainer could publish."""
    generator = torch.Generator().manual_seed(seed)
    start = named_parameters(load_model(run_dir / "model"))
    return {name: (tensor + torch.randn(tensor.shape, generator=generator)).to(dtype) for name, tensor in start.items()}


def weights(run_dir: Path, step: int) -> Tensors:
    tensors: Tensors = load_file(refresh_file(run_dir, step))
    return tensors


@given(st.integers(0, 10_000), st.integers(1, 50))
def test_the_refresh_step_is_the_largest_multiple_up_to_the_version(version: int, every: int) -> None:
    step = refresh_step(version, every)
    assert step % every == 0
    assert step <= version < step + every
    assert refresh_step(version, 0) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_is_computed_in_float32_from_the_previous_reference(run_dir: Path, dtype: torch.dtype) -> None:
    config = config_of(run_dir, "--reference.average", "0.3")
    start = named_parameters(load_model(run_dir / "model"))
    first, second = policy(run_dir, 1, dtype), policy(run_dir, 2, dtype)
    write_refresh(config, 2, first)
    write_refresh(config, 4, second)
    for name, average in weights(run_dir, 4).items():
        after_first = 0.3 * first[name].double() + 0.7 * start[name].double()
        after_second = 0.3 * second[name].double() + 0.7 * after_first
        assert average.dtype == torch.float32
        assert torch.allclose(average.double(), after_second, rtol=0, atol=1e-6)


def test_an_average_with_weight_1_is_a_copy_of_the_policy(run_dir: Path) -> None:
    published = policy(run_dir, 1, torch.bfloat16)
    write_refresh(config_of(run_dir), 2, published)
    copy = weights(run_dir, 2)
    assert copy.keys() == published.keys()
    assert all(
        torch.equal(copy[name], tensor) and copy[name].dtype == tensor.dtype for name, tensor in published.items()
    )


def test_each_sample_is_scored_by_its_own_refresh_in_any_order(run_dir: Path) -> None:
    config, device = config_of(run_dir), choose("cpu")
    published = {step: policy(run_dir, step) for step in (2, 4)}
    for step, tensors in published.items():
        write_refresh(config, step, tensors)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(2, 10, (length,), generator=generator) for length in (5, 6, 7, 8, 9)]
    steps = [4, 0, 2, 4, 0]
    refreshed = RefreshedModel(config, load_model(run_dir / "model").eval())
    scores = score_by_refresh(device, refreshed, steps, sequences, sequences, temperature=1.0, budget_tokens=1)
    for step, sequence, logprobs in zip(steps, sequences, scores, strict=True):
        plain = load_model(run_dir / "model").eval()
        if step:
            plain.load_state_dict(published[step], strict=False)
        assert torch.equal(logprobs, score_on(device, plain, [sequence], [sequence], 1.0, 1)[0])
    assert len({float(sequence_logprobs.sum()) for sequence_logprobs in scores}) == len(scores)


def test_a_rewritten_refresh_is_reloaded(run_dir: Path) -> None:
    config = config_of(run_dir)
    refreshed = RefreshedModel(config, load_model(run_dir / "model"))
    for seed in (1, 2):
        write_refresh(config, 2, policy(run_dir, seed))
        refreshed.use(2)
        expected = policy(run_dir, seed)
        assert all(
            torch.equal(parameter, expected[name]) for name, parameter in named_parameters(refreshed.model).items()
        )


def test_refreshes_that_a_checkpoint_may_need_are_kept(run_dir: Path) -> None:
    config = config_of(run_dir, "--max-staleness", "2")
    published = policy(run_dir, 1)
    checkpoint_dir(run_dir, 7).mkdir(parents=True)
    for step in range(2, 13, 2):
        write_refresh(config, step, published)
    assert refresh_steps(run_dir) == [4, 6, 8, 10, 12]  # 7 - 2 = 5, scored by 4
    checkpoint_dir(run_dir, 7).rmdir()
    write_refresh(config, 14, published)
    assert refresh_steps(run_dir) == [12, 14]


def test_a_resume_discards_later_refreshes_and_requires_its_own(run_dir: Path) -> None:
    config = config_of(run_dir)
    for step in (2, 4, 6):
        write_refresh(config, step, policy(run_dir, step))
    resume_refreshes(config, 5)
    assert refresh_steps(run_dir)[-1] == 4
    refresh_file(run_dir, 4).unlink()
    with pytest.raises(EngineError, match="of step 4 are not in"):
        resume_refreshes(config, 5)
    resume_refreshes(config, 1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "of step 2 are not in"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "cannot be read"),
    ],
)
def test_missing_or_damaged_refreshes_raise_an_error(
    run_dir: Path, damage: Callable[[Path], object], message: str
) -> None:
    config = config_of(run_dir)
    write_refresh(config, 2, policy(run_dir, 1))
    damage(refresh_file(run_dir, 2))
    with pytest.raises(EngineError, match=message):
        RefreshedModel(config, load_model(run_dir / "model")).use(2)


def test_weights_with_a_missing_parameter_are_refused(run_dir: Path) -> None:
    with pytest.raises(EngineError, match="are not the parameters of"):
        write_refresh(config_of(run_dir), 2, dict(list(policy(run_dir, 1).items())[1:]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--reference.average", "0.5"],
            "reference.average is 0.5, which changes nothing with reference.refresh 0; set reference.refresh",
        ),
        (["--reference.refresh", "2", "--reference.average", "0"], "reference.average is 0.0; use"),
        (["--reference.refresh", "-1"], "reference.refresh is -1; use"),
        (["--reference.refresh", "10", "--steps", "10"], "no sample would be scored by refreshed weights"),
        (["--reference.refresh", "2", "--algorithm.kl.coef", "0"], "needs no reference"),
        (["--reference.model", "/nowhere", "--algorithm.kl.coef", "0"], "needs no reference"),
        (["--reference.model", "/nowhere"], "model /nowhere is not a directory"),
        (["--trainer.engine", "fsdp", "--trainer.lora.rank", "2", "--reference.refresh", "2"], "adapters alone"),
    ],
)
def test_invalid_or_unused_refresh_options_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(parse(flags))
