"""Async, batch and group reward functions: what they are called with, and what happens when a call of theirs fails."""

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrt.errors import ConfigError
from flowrt.recipes.config_io import parse
from flowrt.rewards.call_forms import RewardSample
from flowrt.rewards.check import check_rewards
from flowrt.rewards.child import packed
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.outcomes import Result, RewardOutcome
from flowrt.rewards.scoring import RewardScorer
from flowrt.roles.reward import most_slots

LIMIT_S = 60.0
ROW = {"prompt": "3+4=", "answer": "7", "level": 2}


def samples(*responses: str, **facts: object) -> list[RewardSample]:
    return [RewardSample(response, json.dumps(ROW).encode(), facts) for response in responses]


def outcomes(function: Path | str, given: list[RewardSample], **options: Any) -> list[RewardOutcome]:
    """The outcomes of samples of one function, which are scored side by side."""

    async def score() -> list[RewardOutcome]:
        scorer = RewardScorer(RewardOptions(functions=(str(function),), **options), output=subprocess.DEVNULL)
        try:
            async with asyncio.timeout(LIMIT_S):
                await scorer.load()
                if scorer.of_groups:
                    return [answer[0] for answer in await scorer.outcomes_of(given)]
                answers = await asyncio.gather(*(scorer.outcomes_of([sample]) for sample in given))
            return [answer[0][0] for answer in answers]
        finally:
            await scorer.close()

    return asyncio.run(score())


def written(folder: Path, text: str) -> Path:
    file = folder / "mine.py"
    file.write_text(text)
    return file


# ---- async

TOGETHER = """
import asyncio
running = most = 0

async def reward(response, answer):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0)
    while most < {wanted}:  # until that number of calls is in progress
        await asyncio.sleep(0)
    running -= 1
    return most
"""


def test_async_calls_are_in_progress_side_by_side_up_to_the_limit(tmp_path: Path) -> None:
    reward_file = written(tmp_path, TOGETHER.format(wanted=5))
    results = outcomes(reward_file, samples(*"abcdefghijkl"), concurrency=5)
    assert [outcome.result for outcome in results] == [Result.OK] * 12
    assert max(outcome.value for outcome in results) == 5


FAULTY = """
import asyncio, os, time

async def reward(response, answer):
    await asyncio.sleep(0)
    if response == "waits": await asyncio.sleep(99)
    if response == "blocks": time.sleep(99)
    if response == "dies": os._exit(3)
    if response == "raises": raise ValueError("no")
    if response == "exits": raise SystemExit(2)
    if response == "times out": raise TimeoutError("mine")
    if response == "is text": return "1"
    return float(len(response))
"""


@pytest.mark.slow
def test_a_faulty_async_call_fails_without_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrt.rewards.async_calls.GRACE_S", 1.0)
    responses = ["a", "waits", "bb", "blocks", "ccc", "dies", "raises", "exits", "times out", "is text", "dddd"]
    results = dict(zip(responses, outcomes(written(tmp_path, FAULTY), samples(*responses), timeout_s=3.0), strict=True))
    assert [results[response].value for response in ("a", "bb", "ccc", "dddd")] == [1.0, 2.0, 3.0, 4.0]
    failed = {name: (outcome.result, outcome.line) for name, outcome in results.items() if outcome.is_failure}
    assert failed == {
        "waits": (Result.TIMEOUT, 6),
        "blocks": (Result.TIMEOUT, 7),
        "dies": (Result.DIED, 0),
        "raises": (Result.ERROR, 9),
        "exits": (Result.ERROR, 10),
        "times out": (Result.ERROR, 11),
        "is text": (Result.INVALID, 4),
    }
    assert "did not return in 3 s" in results["waits"].detail


WRITES = """
import os

DATA = {{
    "garbage": b"\\xc1hello",
    "nil": b"\\xc0",
    "words": b"hello",
    "a large array": b"\\xdd\\x7f\\xff\\xff\\xff",
    "a reward": {reward!r},
    "a beginning": {beginning!r},
}}

{word} reward(response):
    for fd in range(3, 1024):
        try:
            os.write(fd, DATA.get(response, b""))
        except OSError:
            pass
    return 0.5
"""


@pytest.mark.parametrize("word", ["def", "async def"])
def test_bytes_that_a_function_writes_to_its_connection_cost_its_own_sample(tmp_path: Path, word: str) -> None:
    reward = packed(["done", 0, [["ok", 1000.0, {}, "", 0]], False])
    text = WRITES.format(word=word, reward=reward, beginning=packed(["began", 0]))
    responses = ("a", "garbage", "b", "a reward", "c", "words", "nil", "a beginning", "a large array", "d")
    results = dict(zip(responses, outcomes(written(tmp_path, text), samples(*responses), retries=0), strict=True))
    for response, outcome in results.items():
        assert (outcome.result, outcome.value) == ((Result.OK, 0.5) if len(response) == 1 else (Result.DIED, 0.0))
    assert results["a reward"].detail == "it wrote to the file descriptors of its process"


def test_the_rate_of_async_calls_is_limited(tmp_path: Path) -> None:
    begun = "import time\nasync def reward(response, answer):\n    return time.monotonic()\n"
    times_s = sorted(
        outcome.value for outcome in outcomes(written(tmp_path, begun), samples(*"abcdef"), rate_per_s=20.0)
    )
    assert times_s[-1] - times_s[0] >= 5 / 20 - 0.02


def test_a_reward_worker_holds_as_many_samples_as_can_be_scored_side_by_side() -> None:
    from flowrt.rewards.call_forms import CallForm

    config = parse(["custom", "--reward", "mine.py"])
    assert most_slots(config, [CallForm(is_async=True)]) >= config.reward.concurrency
    assert most_slots(config, [CallForm("batch")]) >= config.reward.batch_size


# ---- batches

TRL = '''
def reward(prompts, completions, answer, log_metric=None, trainer_state=None, **columns):
    """The signature of TRL's reward functions."""
    assert prompts == ["3+4="] * len(completions) and answer == ["7"] * len(completions)
    assert columns["level"] == [2] * len(completions)
    assert trainer_state.global_step == 3
    assert [len(ids) for ids in columns["completion_ids"]] == [1] * len(completions)
    log_metric("in_a_call", len(completions))
    return [None if one == "none" else float(one == right) for one, right in zip(completions, answer)]
'''


def test_a_function_of_trl_runs_unchanged(tmp_path: Path) -> None:
    given = samples("7", "8", "none", "7", step=3, completion_ids=[5])
    results = outcomes(written(tmp_path, TRL), given)
    assert [outcome.detail for outcome in results] == [""] * 4
    assert [outcome.value for outcome in results] == [1.0, 0.0, 0.0, 1.0]
    assert results[2].result is Result.NOT_APPLICABLE
    assert results[0].parts == {"in_a_call": 4.0}


def test_a_function_of_trl_gets_messages_if_the_prompt_is_messages(tmp_path: Path) -> None:
    text = "def reward(completions, **columns): return [len(one[0]['content']) for one in completions]\n"
    row = json.dumps(ROW | {"prompt": [{"role": "user", "content": "3+4="}]}).encode()
    assert [outcome.value for outcome in outcomes(written(tmp_path, text), [RewardSample("abc", row)])] == [3.0]


@pytest.mark.parametrize("columns", ["level=None", "level=None, **columns"])
def test_a_column_that_some_rows_of_a_batch_lack_is_none_for_them(tmp_path: Path, columns: str) -> None:
    text = (
        f"async def reward(completions, {columns}):\n"
        "    levels = level or [None] * len(completions)\n"
        "    return [-1 if one is None else one for one in levels]\n"
    )
    rows = [json.dumps({"prompt": "1", "level": 5} if place % 2 else {"prompt": "1"}).encode() for place in range(8)]
    results = outcomes(written(tmp_path, text), [RewardSample("a", row) for row in rows])
    assert [outcome.value for outcome in results] == [-1.0, 5.0] * 4


@pytest.mark.parametrize("columns", ["level", "level, **columns"])
def test_rows_without_a_needed_column_fail_without_the_others_of_a_batch(tmp_path: Path, columns: str) -> None:
    text = f"async def reward(completions, {columns}): return level\n"
    rows = [json.dumps({"prompt": "1", "level": 5} if place % 2 else {"prompt": "1"}).encode() for place in range(4)]
    results = outcomes(written(tmp_path, text), [RewardSample("a", row) for row in rows])
    assert [outcome.result for outcome in results] == [Result.ERROR, Result.OK] * 2
    assert "it takes 'level', and the row has no such column; it has prompt" in results[0].detail


def test_a_batch_has_at_most_the_configured_samples(tmp_path: Path) -> None:
    text = "async def reward(completions, log):\n    log('n', len(completions))\n    return [1] * len(completions)\n"
    results = outcomes(written(tmp_path, text), samples(*"abcdefgh"), batch_size=3)
    assert max(outcome.parts["n"] for outcome in results) == 3


@pytest.mark.parametrize("is_async", [False, True])
def test_only_the_sample_at_fault_fails_of_a_batch(tmp_path: Path, is_async: bool) -> None:
    text = (
        "import os, time\n"
        f"{'async ' * is_async}def reward(completions, answer):\n"
        "    if 'bad' in completions: raise ValueError('bad')\n"
        "    if 'dies' in completions: os._exit(1)\n"
        "    return [len(one) if one != 'text' else 'x' for one in completions]\n"
    )
    results = outcomes(written(tmp_path, text), samples("a", "bb", "bad", "ccc", "dies", "text", "dddd"), retries=0)
    assert [outcome.result for outcome in results] == [
        *(Result.OK, Result.OK, Result.ERROR, Result.OK, Result.DIED, Result.INVALID, Result.OK)
    ]
    assert [outcome.value for outcome in results if outcome.result is Result.OK] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("returned", ["1.0", "[1.0]", "[]", "'ab'", "{'a': 1}"])
def test_a_batch_function_that_does_not_return_a_list_of_as_many_is_invalid(tmp_path: Path, returned: str) -> None:
    text = f"def reward(completions): return {returned}\n"
    results = outcomes(written(tmp_path, text), samples("a", "b"))
    assert {outcome.result for outcome in results} == {Result.INVALID}
    assert "not a list of 2 rewards" in results[0].detail


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_the_check_refuses_a_batch_function_that_returns_one_number_for_several(tmp_path: Path, kind: str) -> None:
    text = "return [max(len(text) for text in completions)]"
    reward_file = written(tmp_path, f"{kind} reward(completions): {text}\n")
    with pytest.raises(ConfigError, match=r"it returned \[1\] \(list of 1\), not a list of 2 rewards"):
        check_rewards(RewardOptions(functions=(str(reward_file),)), [json.dumps(ROW).encode()], print)
    right = written(tmp_path, f"{kind} reward(completions): return [{{'n': len(text)}} for text in completions]\n")
    options = RewardOptions(functions=(str(right), "exact"))
    assert check_rewards(options, [json.dumps(ROW).encode()], print) == ("mine/n",)


# ---- groups

GROUP = """
def reward(group, answer, level, log):
    assert (answer, level) == ("7", 2)
    mean = sum(len(one.response) for one in group) / len(group)
    log("truncated", [float(one.truncated) for one in group])
    return [len(one.response) - mean for one in group]
"""


def test_a_group_function_gets_all_samples_of_a_prompt(tmp_path: Path) -> None:
    results = outcomes(written(tmp_path, GROUP), samples("a", "bbb", "ccccc", truncated=True))
    assert [outcome.value for outcome in results] == [-2.0, 0.0, 2.0]
    assert results[0].parts == {"truncated": 1.0}


def test_the_check_finds_functions_of_groups(tmp_path: Path) -> None:
    reward_file = written(tmp_path, GROUP)
    options = RewardOptions(functions=(f"mine={reward_file}", "exact"))
    parts = check_rewards(options, [json.dumps(ROW).encode()], print)
    assert parts == ("mine/", "mine/truncated")
    assert RewardOptions(parts=parts).of_groups == ("mine",)


def test_the_check_refuses_functions_of_which_only_those_of_weight_0_apply(tmp_path: Path) -> None:
    reward_file = written(tmp_path, "def none(response): return None\ndef logged(response): return 1.0\n")
    options = RewardOptions(functions=(f"{reward_file}:none", f"{reward_file}:logged:0"))
    with pytest.raises(ConfigError, match=r"function none .* returned None for the first 2 rows"):
        check_rewards(options, [json.dumps(ROW).encode()] * 2, print)


def test_the_check_reports_how_long_a_limited_rate_makes_it_take(tmp_path: Path) -> None:
    reward_file = written(tmp_path, "async def reward(response): return 1.0\ndef other(response): return 1.0\n")
    options = RewardOptions(functions=(str(reward_file), f"{reward_file}:other"), rate_per_s=0.01)
    notes: list[str] = []
    check_rewards(options, [json.dumps(ROW).encode()], notes.append)
    assert "up to 4 calls of mine begin within 400 s: 0.01 in a second (reward.rate_per_s)" in notes


def test_a_column_called_group_is_a_column_of_a_function_of_single_samples(tmp_path: Path) -> None:
    reward_file = written(tmp_path, "def reward(response, answer, group): return float(group)\n")
    row = json.dumps(ROW | {"group": 5}).encode()
    assert outcomes(reward_file, [RewardSample("a", row)])[0].value == 5.0


@pytest.mark.slow
def test_functions_of_all_forms_score_a_run_and_its_evaluation(
    launch: Callable[..., Any], tmp_path: Path, untrained_model: Path
) -> None:
    forms = (
        "def group(group, answer):\n"
        "    mean = sum(len(one.response) for one in group) / len(group)\n"
        "    return {'a': 1}.get('b') if not group else [len(one.response) - mean for one in group]\n\n"
        "async def single(response, answer, step, finish_reason, completion_ids, tokenizer, prefix, truncated, log):\n"
        "    assert prefix == '' and (finish_reason == 'length') == truncated and step >= 0\n"
        "    log('tokens', len(tokenizer.decode(completion_ids)) > -1)\n"
        "    return 0.1 * len(completion_ids)\n\n"
        "def batch(completions, answer, **columns): return [0.5] * len(completions)\n"
    )
    reward_file = written(tmp_path, forms)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": "7"}) + "\n" for n in range(40)))
    launched = launch(
        *("--recipe", "custom", "--data", str(data), "--model", str(untrained_model), "--steps", "3"),
        *(word for name in ("group", "single", "batch") for word in ("--reward", f"{reward_file}:{name}")),
        *("--prompts-per-step", "4", "--group-size", "4", "--rollout.max-new-tokens", "8", "--data.eval-prompts", "4"),
        *("--algorithm.kl.coef", "0", "--checkpoint.every", "0", "--algorithm.filter.zero-variance", "True"),
        *("--reward.load-timeout-s", "300"),  # the tokenizer's library takes long on a busy machine
    )
    assert launched.wait(240.0) == 0, launched.output
    metrics = [json.loads(line) for line in (launched.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 3
    for line in metrics:
        assert line["reward/group"] == pytest.approx(0.0, abs=1e-5)
        assert line["reward/batch"] == 0.5
        assert line["reward/single"] > 0
        assert line["reward/single/tokens"] == 1.0
        assert sum(value for name, value in line.items() if name.startswith("reward_failures/")) == 0
    launched.assert_gone(10.0)
