"""Two data sets with a reward function each: a function says None where it does not apply."""

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrt.errors import ConfigError
from flowrt.recipes.config_io import parse
from flowrt.recipes.tasks.registry import task_of
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.outcomes import Result, RewardOutcome
from flowrt.rewards.scoring import RewardScorer

FUNCTIONS = """
def sums(response, kind, log):
    log("length", len(response))
    return len(response) / 8 if kind == "sum" else None

def words(response, kind):
    return {"right": 1.0, "_short": float(len(response) < 3)} if kind == "word" else None
"""


@pytest.fixture
def flags(tmp_path: Path, untrained_model: Path) -> list[str]:
    """Flags of a run on two sets; to every third row of the first one no function applies."""
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    for name, kinds in (("first", ("sum", "sum", "other")), ("second", ("word",))):
        rows = [{"prompt": f"{n}+1=", "kind": kinds[n % len(kinds)]} for n in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("custom", "--data", f"first={tmp_path}/first.jsonl", "--data", f"second={tmp_path}/second.jsonl"),
        *("--reward", f"{tmp_path}/mine.py:sums", "--reward", f"{tmp_path}/mine.py:words"),
        *("--model", str(untrained_model), "--data.eval-prompts", "0", "--data.allow-overlap", "True"),
        *("--rollout.max-new-tokens", "8"),
    ]


def test_the_check_finds_a_row_for_each_function_in_any_set(flags: list[str]) -> None:
    messages: list[str] = []
    config = parse(flags)
    assert task_of(config).check(messages.append) == ("sums/length", "words/right", "words/short")
    assert messages == []


def test_a_function_that_applies_to_no_row_is_reported_and_refused_if_no_other_applies(flags: list[str]) -> None:
    messages: list[str] = []
    path = flags[flags.index("--reward") + 1].rpartition(":")[0]
    (Path(path).parent / "mine.py").write_text("def sums(response): pass\n\ndef words(response): return 1.0\n")
    task_of(parse(flags)).check(messages.append)
    assert messages == [
        f"reward function sums ({path}) returned None for the first 60 rows: it applies to none of them"
    ]
    (Path(path).parent / "mine.py").write_text("def sums(response): pass\n\nwords = sums\n")
    with pytest.raises(ConfigError, match="returned None for the first 60 rows"):
        task_of(parse(flags)).check(messages.append)


def test_a_row_that_is_left_out_for_its_length_does_not_refuse_a_run(flags: list[str], tmp_path: Path) -> None:
    """Its function is first called on rows with short prompts, some of which are trained in any case."""
    broken = [{"prompt": "1+" * 500, "kind": n} for n in range(12)]
    with (tmp_path / "first.jsonl").open("r+") as file:
        kept = file.read()
        file.seek(0)
        file.write("".join(json.dumps(row) + "\n" for row in broken) + kept)
    (tmp_path / "mine.py").write_text("def sums(response, kind): return len(kind) / 8\n\nwords = sums\n")
    with pytest.raises(ConfigError, match="object of type 'int' has no len"):
        task_of(parse(flags)).check(print)
    assert task_of(parse([*flags, "--data.overlong", "drop"])).check(print) == ()


@pytest.mark.slow
def test_samples_without_an_applicable_function_are_counted_and_not_trained(
    launch: Callable[..., Any], flags: list[str]
) -> None:
    words = [
        *flags[1:],
        "--prompts-per-step",
        "6",
        "--group-size",
        "2",
        "--steps",
        "5",
    ]
    words += ["--algorithm.kl.coef", "0", "--checkpoint.every", "0", "--samples.per-step", "1000"]
    launched = launch("--recipe", "custom", *words)
    assert launched.wait(240.0) == 0, launched.output
    metrics = [json.loads(line) for line in (launched.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["reward_failures/not_applicable"] for line in metrics) > 0
    for line in metrics:
        applies = line["applies/sums"] + line["applies/words"]
        assert applies + line["reward_failures/not_applicable"] == pytest.approx(1.0, abs=1e-6)
        total = 2 * (line["reward/sums"] + line["reward/words"])  # the weight of one is that of both
        assert line["reward"] == pytest.approx(total / applies, abs=1e-5)
        assert line["reward/words/right"] == pytest.approx(line["applies/words"])
        assert {"reward/sums/length", "reward/words/short"} <= line.keys()


def outcome(function: str, row: dict[str, object], response: str = "7") -> RewardOutcome:
    async def score() -> RewardOutcome:
        scorer = RewardScorer(RewardOptions(functions=(function,)), output=subprocess.DEVNULL)
        try:
            async with asyncio.timeout(60):
                return (await scorer.outcomes(response, json.dumps(row).encode()))[0]
        finally:
            await scorer.close()

    return asyncio.run(score())


@pytest.mark.parametrize("function", ["exact", "regex:[0-9]", "mine.py", "mine.py:second"])
def test_a_missing_answer_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def reward(response, answer): return 1.0\n\ndef second(text, gold): return 1.0\n")
    failure = outcome(function, {"prompt": "3+4", "reward_model": {"ground_truth": "7"}}, "null")
    assert failure.result is Result.ERROR
    assert "'answer', and the row has no such column (data.answer_key); it has prompt, reward_model" in failure.detail
    is_built_in = "mine" not in function
    null = outcome(function, {"prompt": "3+4", "answer": None}, "null")
    assert null.result is (Result.NOT_APPLICABLE if is_built_in else Result.OK)


def test_tests_that_are_null_do_not_apply() -> None:
    assert outcome("code", {"prompt": "1", "tests": None}).result is Result.NOT_APPLICABLE
