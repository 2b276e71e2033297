"""Complete runs with the FSDP2 engine as trainer: two ranks with all weights, one with adapters only."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowrt.controller.storage.timeline_file import read_timeline
from flowrt.observability.stored_samples import SampleReader

STEPS, PROMPTS, MEMBERS = 2, 4, 4
MORE_STEPS = 6
"""Of the run with adapters, which needs several versions."""
ROUNDING = 1e-9
"""Of float32, in the KL between rollout and trainer."""
FSDP = [
    *("--trainer.engine", "fsdp", "--steps", str(STEPS), "--prompts-per-step", str(PROMPTS)),
    *("--group-size", str(MEMBERS), "--data.eval-prompts", "0", "--rollout.workers", "1"),
    *("--trainer.micro-batch-tokens", "100", "--trainer.warmup-steps", "1"),
]

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def two_ranks(launch: Callable[..., Any]) -> Any:
    run = launch(*FSDP, "--trainer.ranks", "2", "--sft.steps", "40", "--sft.answer-only-steps", "2")
    assert run.wait(150.0) == 0, run.output + run.log("trainer")
    run.assert_gone(10.0)
    return run


def parameters(path: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def changed(before: Path, after: Path) -> set[str]:
    """The names of the weights that training changed."""
    old, new = parameters(before), parameters(after)
    assert old.keys() == new.keys()
    assert all(tensor.isfinite().all() for tensor in new.values())
    return {name for name, tensor in new.items() if not torch.equal(tensor, old[name])}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_trained(run: Any, steps: int = STEPS) -> None:
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (steps, steps * PROMPTS * MEMBERS)
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


def test_adapters_reach_the_rollout_worker_and_the_final_model(two_ranks: Any, launch: Callable[..., Any]) -> None:
    """Each version is applied before the samples of the next step are generated, though only adapters are sent.

    Staleness bound 0 requires it. ``kl`` is the distance of the policy from the start model: with the weights of the
    start model, the log-probabilities of the worker would differ from those of the trainer.
    """
    start = str(two_ranks.run_dir / "final")
    lora = ["--trainer.lora.rank", "4", "--trainer.lora.targets", "q_proj,v_proj"]
    run = launch(*FSDP, "--model", start, *lora, "--steps", str(MORE_STEPS), "--max-staleness", "0")
    assert run.wait(120.0) == 0, run.output + run.log("trainer") + run.log("rollout-0")
    run.assert_gone(10.0)
    assert_trained(run, MORE_STEPS)
    swaps = sum(span.get("kind") == "swap" for span in read_timeline(run.run_dir))
    metrics = lines(run.run_dir / "metrics.jsonl")
    assert swaps >= MORE_STEPS - 1
    assert [line["staleness_max"] for line in metrics] == [0] * MORE_STEPS
    assert max(line["mismatch_kl_k3"] for line in metrics) < ROUNDING < 1e-3 * max(line["kl"] for line in metrics)
    moved = changed(Path(start), run.run_dir / "final")
    assert moved
    assert all("q_proj" in name or "v_proj" in name for name in moved)


def test_each_rank_sends_its_samples_and_no_sample_is_stored_twice(two_ranks: Any) -> None:
    """All groups are stored: a step has fewer samples than ``samples.per_step``."""
    reader = SampleReader(two_ranks.run_dir)
    rows = [row for row in reader.query(limit=10_000).samples if row.advantage is not None]
    assert len(rows) == STEPS * PROMPTS * MEMBERS
    assert len({(row.epoch, row.prompt, row.member) for row in rows}) == len(rows)
    assert {row.step for row in rows} == {*range(STEPS)}
    whole = [reader.get(row.id) for row in rows]
    assert all(
        sample is not None and len(sample.trainer_logprobs) == len(sample.logprobs) == sample.row.tokens
        for sample in whole
    )
    assert reader.left_out() == {}
