"""Complete runs: their outputs, and the models that they can start from."""

import dataclasses
import json
import re
import sqlite3
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowrt.recipes.config_io import from_toml, parse
from tests.run_page import unpacked

STEPS = 12
PROMPTS = 4
MEMBERS = 4
SMALL = [
    *("--prompts-per-step", str(PROMPTS), "--group-size", str(MEMBERS), "--data.eval-prompts", "16"),
    *("--trainer.micro-batch-tokens", "150"),
]
FIRST = [
    *("--steps", str(STEPS), "--seed", "3", "--sft.steps", "60", "--sft.answer-only-steps", "3"),
    *SMALL,
]
WORKERS = ["source", "reward", "rollout-0", "rollout-1", "reference", "trainer"]
PROBABILITIES = ["eval_first", "eval_last", "reward_first", "reward_last"]
KEYS = {
    *("seed", "steps", "wall_s", *PROBABILITIES, "samples", "samples_per_s", "tokens_per_s", "staleness_bound"),
    *("staleness_max", "staleness_mean", "prompts_lost", "prompts_trained_twice", "busy_fraction"),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(launch: Callable[..., Any]) -> Any:
    """A run of a few steps that has ended with exit code 0."""
    launched = launch(*FIRST)
    assert launched.wait(150.0) == 0, launched.output
    return launched


@pytest.fixture(scope="module")
def summary(run: Any) -> dict[str, Any]:
    return dict(json.loads((run.run_dir / "summary.json").read_text()))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def parameters(path: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


# ---- outputs of a run


def test_no_process_and_no_shared_memory_is_left(run: Any) -> None:
    run.assert_gone(10.0)


def test_run_prints_its_directory_and_result(run: Any) -> None:
    assert str(run.run_dir) in run.output
    assert "Traceback" not in run.output
    assert re.search(rf"step \d+/{STEPS} ", run.words)
    assert f"steps │ {STEPS} │" in run.words
    assert str(run.run_dir / "run.html") in run.output


def test_written_configuration_equals_the_given_one(run: Any) -> None:
    written = from_toml((run.run_dir / "config.toml").read_text())
    assert written == dataclasses.replace(parse(FIRST), run_dir=str(run.run_dir))


def test_run_accepts_the_written_configuration(run: Any) -> None:
    written = run.run_dir / "config.toml"
    assert parse(["--config", str(written)]) == from_toml(written.read_text())


def test_metrics_have_one_line_per_step(run: Any) -> None:
    metrics = lines(run.run_dir / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(STEPS))
    for line in metrics:
        assert line["groups"] == PROMPTS
        assert line["samples"] == PROMPTS * MEMBERS
        assert 0 <= line["reward"] <= 1
        assert 0 <= line["staleness_mean"] <= line["staleness_max"] <= 1
    assert [line["wall_s"] for line in metrics] == sorted(line["wall_s"] for line in metrics)


def test_ledger_has_each_prompt_once(run: Any, summary: dict[str, Any]) -> None:
    with sqlite3.connect(run.run_dir / "ledger.sqlite") as ledger:
        prompts = ledger.execute("SELECT epoch, prompt, state, step FROM prompts").fetchall()
        trained = ledger.execute("SELECT epoch, prompt FROM events WHERE state = 'trained'").fetchall()
    ledger.close()
    states = Counter(state for _, _, state, _ in prompts)
    assert len({(epoch, prompt) for epoch, prompt, _, _ in prompts}) == len(prompts) == states.total()
    assert dict(states) == summary["prompts"]
    assert states["trained"] == len(trained) == len(set(trained)) == STEPS * PROMPTS
    steps = Counter(step for _, _, state, step in prompts if state == "trained")
    assert steps == dict.fromkeys(range(STEPS), PROMPTS)


def test_summary_is_complete(summary: dict[str, Any]) -> None:
    assert summary.keys() >= KEYS
    assert (summary["seed"], summary["steps"], summary["samples"]) == (3, STEPS, STEPS * PROMPTS * MEMBERS)
    assert all(0 <= summary[name] <= 1 for name in PROBABILITIES)
    assert all(summary[name] > 0 for name in ("wall_s", "samples_per_s", "tokens_per_s"))
    assert summary["exit_code"] == 0


def test_no_prompt_is_lost_or_trained_twice(summary: dict[str, Any]) -> None:
    assert summary["prompts_lost"] == 0
    assert summary["prompts_trained_twice"] == 0


def test_staleness_stays_within_its_bound(run: Any, summary: dict[str, Any]) -> None:
    assert summary["staleness_bound"] == 1
    assert summary["staleness_max"] <= 1
    assert 0 <= summary["staleness_mean"] <= summary["staleness_max"]
    assert summary["staleness_max"] == max(line["staleness_max"] for line in lines(run.run_dir / "metrics.jsonl"))


def test_summary_agrees_with_the_metrics(run: Any, summary: dict[str, Any]) -> None:
    metrics = lines(run.run_dir / "metrics.jsonl")
    rewards = [line["reward"] for line in metrics]
    window = summary["reward_window"]
    assert window == min(len(metrics) // 2, 10)
    assert summary["reward_first"] == pytest.approx(sum(rewards[:window]) / window, abs=1e-5)
    assert summary["reward_last"] == pytest.approx(sum(rewards[-window:]) / window, abs=1e-5)
    assert summary["samples"] == sum(line["samples"] for line in metrics)
    assert summary["wall_s"] >= metrics[-1]["wall_s"]


def test_summary_has_busy_fractions_of_every_role(summary: dict[str, Any]) -> None:
    busy = summary["busy_fraction"]
    assert busy.keys() >= {"rollout", "trainer", "reward", "reference"}
    assert all(0 <= share <= 1 for share in busy.values())
    assert busy["rollout"] > 0
    assert busy["trainer"] > 0


def test_the_run_page_is_one_file_that_fetches_nothing(run: Any) -> None:
    page = (run.run_dir / "run.html").read_text()
    assert len(page) < 4 << 20
    assert not re.search(r"<(link|img|iframe)|<script src|url\(|@import", page)
    embedded = unpacked(page)
    assert embedded["api/run"]["summary"]["steps"] == STEPS
    assert embedded["api/series?from=0"]["steps"] == list(range(STEPS))


def test_trained_model_loads_and_has_changed(run: Any) -> None:
    before, after = parameters(run.run_dir / "model"), parameters(run.run_dir / "final")
    assert {name: tensor.shape for name, tensor in before.items()} == {
        name: tensor.shape for name, tensor in after.items()
    }
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_trained_model_has_its_tokenizer(run: Any) -> None:
    before, after = (AutoTokenizer.from_pretrained(run.run_dir / name) for name in ("model", "final"))
    assert after.get_vocab() == before.get_vocab()
    assert after.eos_token_id == before.eos_token_id == 1
    assert after("5+3-2=")["input_ids"] == before("5+3-2=")["input_ids"]


def test_each_worker_has_a_log_without_errors(run: Any) -> None:
    names = {path.stem for path in (run.run_dir / "logs").glob("*.log")}
    assert names == {"build_model", "controller", "fork_server", *WORKERS}
    for name in names:
        assert "Traceback" not in run.log(name), run.log(name)
        assert " ERROR " not in run.log(name), run.log(name)
        assert "Warning" not in run.log(name), run.log(name)


def test_run_directory_is_private(run: Any) -> None:
    assert stat.S_IMODE(run.run_dir.stat().st_mode) == 0o700


def test_no_partial_file_is_left(run: Any) -> None:
    assert not list(run.run_dir.rglob("*.part"))
    assert not list(run.run_dir.rglob("ledger.sqlite-*"))


# ---- initial models


@pytest.mark.long
def test_a_run_starts_from_any_model_directory(run: Any, launch: Callable[..., Any], tmp_path: Path) -> None:
    """The run uses the tokenizer of the directory, here with the ids of two digits exchanged.

    Most problems contain neither digit, so that rewards still differ.
    """
    model = tmp_path / "model"
    model.mkdir()
    for path in (run.run_dir / "final").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    exchanged = {"8": vocabulary["9"], "9": vocabulary["8"]}
    vocabulary.update(exchanged)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    second = launch("--model", str(model), "--steps", "4", *SMALL, "--rollout.workers", "1")
    assert second.wait(120.0) == 0, second.output
    second.assert_gone(10.0)
    assert not (second.run_dir / "logs" / "build_model.log").exists()
    assert not (second.run_dir / "model").exists()
    assert [line["step"] for line in lines(second.run_dir / "metrics.jsonl")] == [0, 1, 2, 3]
    after = AutoTokenizer.from_pretrained(second.run_dir / "final").get_vocab()
    assert {digit: after[digit] for digit in exchanged} == exchanged
    start, end = parameters(model), parameters(second.run_dir / "final")
    assert any(not torch.equal(start[name], end[name]) for name in start)


@pytest.mark.long
def test_a_run_completes_with_two_trainer_ranks(run: Any, launch: Callable[..., Any]) -> None:
    model = str(run.run_dir / "final")
    two = launch("--model", model, "--steps", "2", *SMALL, "--rollout.workers", "1", "--trainer.ranks", "2")
    assert two.wait(120.0) == 0, two.output
    two.assert_gone(10.0)
    summary = json.loads((two.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (2, 2 * PROMPTS * MEMBERS)
    assert summary["prompts_lost"] == summary["prompts_trained_twice"] == 0
    start, end = parameters(Path(model)), parameters(two.run_dir / "final")
    assert any(not torch.equal(start[name], end[name]) for name in start)


def test_server_without_keys_reports_that_it_listens_on_loopback_only(run: Any) -> None:
    assert "listening on tcp://127.0.0.1:" in run.log("controller")
    assert "for this machine only: no keys" in run.log("controller")
