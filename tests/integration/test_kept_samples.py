"""What was generated survives a preemption, a kill of the whole run, and the kill of a rollout worker."""

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrt.controller.storage.journals import read_journal
from flowrt.controller.storage.ledger_reader import LedgerReader
from flowrt.protocol.journals import JOURNALS, SampleKey
from flowrt.recipes.run_dir import checkpoint_steps
from flowrt.roles.journal import KeptTokens, read_sample

pytestmark = pytest.mark.slow
PROMPTS, GROUP = 4, 4
FLAGS = [
    *("--prompts-per-step", str(PROMPTS), "--group-size", str(GROUP), "--trainer.micro-batch-tokens", "1000"),
    *("--trainer.lr", "0.002", "--algorithm.kl.coef", "0", "--data.eval-prompts", "0", "--max-run-restarts", "0"),
    *("--rollout.max-new-tokens", "100", "--rollout.max-running-requests", "3", "--max-staleness", "2"),
]


def lines(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def summary(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "summary.json").read_text()))


def written(run_dir: Path, journals: str) -> dict[SampleKey, KeptTokens]:
    """What the journals of a start of the run have, or of one worker in it."""
    samples: dict[SampleKey, KeptTokens] = {}
    damaged: Counter[str] = Counter()
    for path in sorted((run_dir / JOURNALS).glob(f"{journals}/*.journal")):
        for key, sample in read_journal(path, damaged).items():
            tokens = read_sample(path, sample)
            assert tokens is not None
            samples[key] = tokens
    assert not damaged
    return samples


def trained(run_dir: Path) -> set[tuple[int, int]]:
    with LedgerReader(run_dir / "ledger.sqlite") as ledger:
        return {(epoch, prompt) for epoch, prompt in ledger.query("SELECT epoch, prompt FROM prompts")}


def assert_taken_over(before: dict[SampleKey, KeptTokens], after: dict[SampleKey, KeptTokens]) -> Counter[str]:
    """Counts the samples that are in both, by what the later ones have of the earlier ones.

    The tokens of a sample that is generated again are the same, and its log-probabilities are rounded otherwise.
    """
    taken: Counter[str] = Counter()
    for key in before.keys() & after.keys():
        length = len(before[key].prefix.tokens)
        if after[key].prefix.logprobs[:length].tolist() != before[key].prefix.logprobs.tolist():
            taken["generated again"] += 1
            continue
        assert after[key].prefix.tokens[:length].tolist() == before[key].prefix.tokens.tolist()
        taken["complete" if before[key].is_complete else "prefix"] += 1
    return taken


def wait_for_steps(run: Any, more: int) -> None:
    """Wait for this many more steps."""
    steps = len(lines(run.run_dir)) + more
    run.wait_for(lambda: len(lines(run.run_dir)) >= steps, "steps")


def assert_exact(run_dir: Path, steps: int) -> None:
    numbers = summary(run_dir)
    assert (numbers["steps"], numbers["prompts_lost"], numbers["prompts_trained_twice"]) == (steps, 0, 0)
    assert numbers["prompts"]["trained"] == steps * PROMPTS
    assert numbers["staleness_max"] <= 2


@pytest.mark.parametrize("flags", [[], ["--rollout.top-k", "8", "--rollout.top-p", "0.9"]])
def test_samples_and_prefixes_survive_a_preemption(
    launch: Callable[..., Any], untrained_model: Path, flags: list[str]
) -> None:
    run = launch("--model", str(untrained_model), *FLAGS, *flags, "--rollout.workers", "2", "--steps", "1000")
    run.wait_for(lambda: len(lines(run.run_dir)) >= 3, "steps")
    run.signal(signal.SIGTERM)
    assert run.wait(60.0) == 130, run.output
    [saved] = checkpoint_steps(run.run_dir)
    consumed = {key for key, sample in written(run.run_dir, "1/*").items() if min(sample.prefix.spans[::2]) < saved - 2}
    before = {key: sample for key, sample in written(run.run_dir, "1/*").items() if key not in consumed}
    assert any(not sample.is_complete for sample in before.values())
    resumed = launch("--steps", str(saved + 4), "--rollout.workers", "1", resume=run.run_dir)
    assert resumed.wait(90.0) == 0, resumed.output
    assert_exact(run.run_dir, saved + 4)
    kept = summary(run.run_dir)["kept"]
    taken = assert_taken_over(before, written(run.run_dir, "2/*"))
    assert taken["generated again"] == 0
    assert taken["complete"] == kept["complete"] > 0
    assert taken["prefix"] == kept["prefixes"] > 0
    assert kept["tokens"] > 0
    assert kept["discarded"] == {}
    assert "tokens that were generated before" in (run.run_dir / "events.jsonl").read_text()


def test_without_the_setting_nothing_is_kept(launch: Callable[..., Any], untrained_model: Path) -> None:
    words = ["--rollout.workers", "1", "--steps", "2", "--checkpoint.samples", "False"]
    run = launch("--model", str(untrained_model), *FLAGS, *words)
    assert run.wait(90.0) == 0, run.output
    assert not (run.run_dir / JOURNALS).exists()
    assert summary(run.run_dir)["kept"] == {"complete": 0, "prefixes": 0, "tokens": 0, "discarded": {}}


@pytest.mark.long
def test_a_killed_run_takes_over_what_its_journals_have_and_no_damaged_part(
    launch: Callable[..., Any], untrained_model: Path
) -> None:
    words = ["--rollout.workers", "2", "--steps", "1000", "--rollout.journal-s", "0.2", "--checkpoint.every", "2"]
    run = launch("--model", str(untrained_model), *FLAGS, *words)
    run.wait_for(lambda: len(lines(run.run_dir)) >= 5, "steps")
    run.kill_all()
    saved = max(checkpoint_steps(run.run_dir))
    before = {
        key: sample
        for key, sample in written(run.run_dir, "1/*").items()
        if max(sample.prefix.spans[::2], default=0) <= saved
    }
    damaged = max((run.run_dir / JOURNALS).glob("1/*/*.journal"), key=lambda path: path.stat().st_size)
    data = bytearray(damaged.read_bytes())
    data[len(data) * 9 // 10] ^= 1
    damaged.write_bytes(data)
    resumed = launch("--steps", str(saved + 4), resume=run.run_dir)
    assert resumed.wait(90.0) == 0, resumed.output
    assert_exact(run.run_dir, saved + 4)
    taken = assert_taken_over(before, written(run.run_dir, "2/*"))
    assert taken["complete"] > 0
    # Of the record with the damaged byte the header may be intact, so that its sample counts as kept.
    assert taken["complete"] + taken["prefix"] >= summary(run.run_dir)["kept"]["complete"] - 1


@pytest.mark.long
def test_another_worker_continues_the_sequences_of_a_killed_one(
    launch: Callable[..., Any], untrained_model: Path
) -> None:
    words = ["--rollout.workers", "2", "--steps", "1000", "--rollout.journal-s", "0.05"]
    run = launch("--model", str(untrained_model), *FLAGS, *words)
    taken: Counter[str] = Counter()
    for _ in range(5):
        wait_for_steps(run, 2)
        [killed] = run.find("flowrt.roles.rollout", "rollout-0")
        before_kill = written(run.run_dir, "1/rollout-0")
        run.signal(signal.SIGKILL, killed)
        wait_for_steps(run, 4)
        unfinished = {key: sample for key, sample in before_kill.items() if not sample.is_complete}
        taken += assert_taken_over(unfinished, written(run.run_dir, "1/rollout-1"))
        if taken["prefix"]:
            break
    assert taken["prefix"] > 0
    run.signal(signal.SIGTERM)
    assert run.wait(60.0) == 130, run.output
