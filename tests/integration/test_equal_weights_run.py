"""Rollout and trainer compute the same policy, or nothing is trained: refused models, planted differences."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, Mamba2Config, Mamba2ForCausalLM

from flowrt.cli import main
from flowrt.engines.hf import load_model, save_model
from flowrt.engines.options import LoraOptions
from flowrt.engines.tiny_model import build_model, wrap_tokenizer
from flowrt.engines.training.lora import add_adapters, write_adapters
from flowrt.recipes.tasks.arithmetic import Arithmetic

TOKENS = ("--rollout.max-new-tokens", "8")
SMALL = (
    *("--prompts-per-step", "4", "--group-size", "4", "--rollout.workers", "1", "--data.eval-prompts", "0", *TOKENS),
    *("--eval.at-start", "False", "--eval.at-end", "False", "--checkpoint.every", "0"),
)


def saved(model: Any, path: Path) -> str:
    """The directory of a model with the tokenizer of the arithmetic task."""
    tokenizer = wrap_tokenizer(Arithmetic(0, 1).tokenizer())
    save_model(model, tokenizer, path)
    return str(path)


def vocabulary() -> int:
    return len(wrap_tokenizer(Arithmetic(0, 1).tokenizer()))


@pytest.fixture(scope="module")
def with_dropout(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose configuration has dropout."""
    torch.set_num_threads(1)
    sizes = {"hidden_size": 32, "layers": 2, "heads": 2, "intermediate_size": 32, "max_length": 64}
    model = build_model(vocab_size=vocabulary(), seed=0, **sizes)
    with torch.no_grad():
        model.model.embed_tokens.weight *= 4  # confident predictions, which dropout changes
    model.config.attention_dropout = 0.5
    return saved(model, tmp_path_factory.mktemp("models") / "dropout")


def test_a_model_that_is_not_causal_is_refused_before_anything_starts(
    refused: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = BertConfig(
        vocab_size=vocabulary(),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        initializer_range=0.5,  # later tokens make a difference that is no rounding
    )
    torch.manual_seed(0)
    path = saved(BertLMHeadModel(config), tmp_path_factory.mktemp("models") / "bert")
    error = refused("arithmetic", "--model", path, *SMALL, loads_model=True).sentence()
    assert f"model {path} (bert) is not causal" in error
    assert "use another model" in error


@pytest.mark.slow
def test_a_run_with_a_planted_difference_ends_before_its_first_update(
    launch: Callable[..., Any], with_dropout: str
) -> None:
    run = launch("--model", with_dropout, "--trainer.dropout", "True", "--steps", "2", *SMALL)
    assert run.wait(300) == 2, run.output
    assert f"model {with_dropout} (qwen3): rollout and trainer disagree by" in run.output
    assert "nats a token at equal weights" in run.output
    assert "Traceback" not in run.output
    assert not (run.run_dir / "final").exists()


@pytest.mark.slow
def test_a_model_without_keys_and_values_learns_with_the_torch_engines(
    launch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = Mamba2Config(
        vocab_size=vocabulary(),
        hidden_size=16,
        num_hidden_layers=1,
        num_heads=4,
        head_dim=8,
        state_size=8,
        n_groups=1,
        chunk_size=8,
        pad_token_id=0,
        eos_token_id=1,
    )
    path = saved(Mamba2ForCausalLM(config), tmp_path_factory.mktemp("models") / "mamba2")
    run = launch("--model", path, "--steps", "2", "--rollout.weight-update", "in_flight", *SMALL)
    assert run.wait(300) == 0, run.output
    steps = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    mismatches = [step["mismatch_kl_k3"] for step in steps if "mismatch_kl_k3" in step]
    assert mismatches[0] < 1e-6


# ---- flowrt data check --deep


def check(capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path, *flags: str) -> tuple[int, str]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(9, 29)))
    words = ["data", "check", "--deep", "--model", model, "--data", str(path), "--data.eval-prompts", "2"]
    code = main([*words, "--rollout.max-new-tokens", "8", *flags])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_deep_check_compares_rollout_and_trainer(
    capsys: pytest.CaptureFixture[str], with_dropout: str, tmp_path: Path
) -> None:
    code, output = check(capsys, with_dropout, tmp_path)
    assert code == 0, output
    assert "policies      equal: rollout and trainer disagree by" in output
    assert "(packed)" in output
    code, output = check(capsys, with_dropout, tmp_path, "--trainer.dropout", "True")
    assert code == 2, output
    assert "more than the 0.0002 that trainer.max_initial_mismatch allows: rollout and trainer disagree by" in output
    code, output = check(capsys, with_dropout, tmp_path, "--trainer.dropout", "True", *UNCHECKED)
    assert code == 0, output


def test_deep_check_loads_the_model_that_a_run_would_write(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, with_dropout: str
) -> None:
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    code, output = check(capsys, with_dropout, tmp_path, "--model-overrides", json.dumps(yarn))
    assert code == 0, output
    assert f"model {with_dropout} with model_overrides (qwen3)" in output
    options = LoraOptions(rank=2)
    adapted = add_adapters(load_model(with_dropout), options)
    write_adapters(adapted, dict(adapted.named_parameters()), Path(with_dropout), tmp_path / "adapter")
    code, output = check(capsys, str(tmp_path / "adapter"), tmp_path)
    assert code == 0, output
    assert f"model {tmp_path / 'adapter'} (qwen3)" in output
    for fields, why in (
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "rope_scaling.factor '4'; use a number"),
        ({"rope_scaling": {"rope_type": "yern", "factor": 4}}, "rope_scaling.rope_type 'yern', which transformers"),
        ({"rope_scaling": {"rope_type": "yarn", "facter": 4}}, "has rope_scaling.facter, which no type of rotary"),
        ({"max_positions": 64}, "has 'max_positions', which the configuration of model"),
        ({"max_position_embeddings": "64"}, f"flowrt: model {with_dropout} with model_overrides is no causal LM that"),
    ):
        code, output = check(capsys, with_dropout, tmp_path, "--model-overrides", json.dumps(fields))
        assert code == 2, output
        assert why in output


UNCHECKED = ("--trainer.max-initial-mismatch", "0")


def test_deep_check_needs_an_engine_in_the_process(
    capsys: pytest.CaptureFixture[str], with_dropout: str, tmp_path: Path
) -> None:
    flags = ("--rollout.engine", "sglang", "--rollout.workers", "1", "--rollout.sglang.url", "http://127.0.0.1:9")
    code, output = check(capsys, with_dropout, tmp_path, *flags)
    assert code == 2
    assert "--deep generates in this process, and rollout.engine sglang in a server" in output


def test_a_negative_limit_is_refused(refused: Callable[..., Any]) -> None:
    error = refused("arithmetic", "--trainer.max-initial-mismatch=-1").sentence()
    assert "trainer.max_initial_mismatch" in error
