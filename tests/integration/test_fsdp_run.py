"""Whole runs whose trainer is the FSDP2 engine: two ranks with all weights, one with adapters alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS, PROMPTS, MEMBERS = 2, 4, 4
FSDP = [
    *("--trainer.engine", "fsdp", "--steps", str(STEPS), "--prompts-per-step", str(PROMPTS)),
    *("--group-size", str(MEMBERS), "--data.eval-prompts", "0", "--rollout.workers", "1"),
    *("--trainer.micro-batch-tokens", "100", "--trainer.warmup-steps", "1"),
]

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def two_ranks(launch: Callable[..., Any]) -> Any:
    run = launch(*FSDP, "--trainer.ranks", "2", "--warm-start.steps", "40", "--warm-start.bare-steps", "2")
    assert run.wait(150.0) == 0, run.output + run.log("trainer")
    run.assert_gone(10.0)
    return run


def parameters(path: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def changed(before: Path, after: Path) -> set[str]:
    """The names of the weights that training moved."""
    old, new = parameters(before), parameters(after)
    assert old.keys() == new.keys()
    assert all(tensor.isfinite().all() for tensor in new.values())
    return {name for name, tensor in new.items() if not torch.equal(tensor, old[name])}


def assert_trained(run: Any) -> None:
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (STEPS, STEPS * PROMPTS * MEMBERS)
    assert summary["prompts_lost"] == summary["prompts_trained_twice"] == 0
    assert "Warning" not in run.log("trainer")


def test_two_ranks_train_every_weight(two_ranks: Any) -> None:
    assert_trained(two_ranks)
    final = two_ranks.run_dir / "final"
    assert "model.embed_tokens.weight" in changed(two_ranks.run_dir / "model", final)
    assert AutoTokenizer.from_pretrained(final).eos_token_id == 1
    assert not list(two_ranks.run_dir.rglob("*.part"))


def test_each_rank_writes_its_shards_into_the_checkpoint(two_ranks: Any) -> None:
    assert len(list((two_ranks.run_dir / "checkpoints" / f"step-{STEPS:06}").glob("shard-*.safetensors"))) == 2


def test_adapters_go_to_the_rollout_worker_and_into_the_final_model(two_ranks: Any, launch: Callable[..., Any]) -> None:
    """Versions are put into use (staleness stays in its bound), though only adapters travel."""
    start = str(two_ranks.run_dir / "final")
    run = launch(*FSDP, "--model", start, "--trainer.lora.rank", "4", "--trainer.lora.targets", "q_proj,v_proj")
    assert run.wait(120.0) == 0, run.output + run.log("trainer") + run.log("rollout-0")
    run.assert_gone(10.0)
    assert_trained(run)
    moved = changed(Path(start), run.run_dir / "final")
    assert moved
    assert all("q_proj" in name or "v_proj" in name for name in moved)
