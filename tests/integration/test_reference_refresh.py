"""A refreshed reference is bit-equal in every deterministic run, also after a kill and a resume."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrt.engines.tiny_model import build_model, wrap_tokenizer
from flowrt.recipes.tasks.arithmetic import Arithmetic

pytestmark = pytest.mark.slow
STEPS = 7
SETTINGS = [
    *("--steps", str(STEPS), "--prompts-per-step", "4", "--group-size", "4", "--data.eval-prompts", "0"),
    *("--sft.steps", "0", "--sft.answer-only-steps", "0", "--rollout.workers", "1", "--trainer.save", "False"),
    *("--max-staleness", "0", "--deterministic", "True", "--trainer.lr", "0.002", "--checkpoint.every", "3"),
    *("--reference.refresh", "2", "--build.layers", "1", "--rollout.max-new-tokens", "8"),
]
TIMING_METRICS = {"wall_s", "samples_per_s"}


def lines(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    metrics = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [{name: value for name, value in line.items() if name not in TIMING_METRICS} for line in metrics]


@pytest.mark.long
def test_an_averaged_reference_survives_a_kill_and_a_resume(launch: Callable[..., Any]) -> None:
    flags = [*SETTINGS, "--reference.average", "0.5"]
    uninterrupted = launch(*flags)
    assert uninterrupted.wait(120.0) == 0, uninterrupted.output
    killed = launch(*flags)
    killed.wait_for(lambda: len(lines(killed.run_dir)) >= 5, "fifth step")
    killed.kill_all()
    resumed = launch(resume=killed.run_dir)
    assert resumed.wait(120.0) == 0, resumed.output
    assert lines(killed.run_dir) == lines(uninterrupted.run_dir)
    assert [line["reference_version"] for line in lines(uninterrupted.run_dir)] == [0, 0, 2, 2, 4, 4, 6]
    assert all(line["kl"] > 0 for line in lines(uninterrupted.run_dir)[1:])


def test_kl_is_zero_in_the_step_after_a_refresh(launch: Callable[..., Any]) -> None:
    run = launch(*SETTINGS)
    assert run.wait(120.0) == 0, run.output
    divergences = [line["kl"] for line in lines(run.run_dir)]
    assert max(divergences[0], divergences[2], divergences[4], divergences[6]) < 1e-9
    assert min(divergences[1], divergences[3], divergences[5]) > 1e-9


@pytest.mark.long
def test_another_checkpoint_can_be_the_reference(launch: Callable[..., Any]) -> None:
    trained = launch(*SETTINGS, "--trainer.save", "True", "--steps", "3")
    assert trained.wait(120.0) == 0, trained.output
    model = trained.run_dir / "final"
    no_refresh = ["--reference.refresh", "0", "--steps", "2"]
    run = launch(*SETTINGS, *no_refresh, "--reference.model", str(model))
    assert run.wait(120.0) == 0, run.output
    assert lines(run.run_dir)[0]["kl"] > 1e-9


def test_a_reference_with_another_vocabulary_is_rejected_at_startup(launch: Callable[..., Any], tmp_path: Path) -> None:
    tokenizer = wrap_tokenizer(Arithmetic(0, 1).tokenizer())
    sizes = {"hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 48, "max_length": 64}
    build_model(vocab_size=len(tokenizer) + 3, seed=1, **sizes).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    run = launch(*SETTINGS, "--reference.refresh", "0", "--reference.model", str(tmp_path / "other"))
    assert run.wait(120.0) == 2, run.output
    output = " ".join(run.output.split())
    assert f"has a vocab_size of {len(tokenizer) + 3}, and the trained model" in output
    assert "Traceback" not in output
    assert not (run.run_dir / "logs" / "trainer.log").exists()
