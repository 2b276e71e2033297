"""Stored samples of real runs: failed rewards, evaluations, tokens, killed and resumed runs."""

import asyncio
import json
import shutil
import stat
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from time import monotonic
from typing import Any

import pytest

from flowrt import api
from flowrt.controller.storage.sample_store import SAMPLES, SampleStore
from flowrt.observability.json_text import to_json
from flowrt.observability.run_reader import RunReader
from flowrt.observability.stored_samples import ANY_EVALUATION, Sample, SampleFilter, SampleReader, SampleRow
from flowrt.protocol.messages import SampleRecords
from flowrt.runtime.waits import pause
from tests.integration.conftest import Launch
from tests.integration.helpers.forked import run_flowrt
from tests.run_page import unpacked

ROWS = 48
REWARD_SOURCE = """
import time

def mine(response, answer, prompt):
    if len(response) % 5 == 1 and response != answer:
        time.sleep(99)
    if len(response) % 5 == 2:
        raise ValueError("no such \\x1b[31m thing")
    return len(response) / 10
"""
STEPS, PROMPTS, GROUP, EVAL_PROMPTS = 4, 4, 4, 6
CHECKPOINT_EVERY = 20
STORE_ALL = [
    *("--prompts-per-step", str(PROMPTS), "--group-size", str(GROUP), "--samples.per-step", str(PROMPTS * GROUP)),
]

pytestmark = pytest.mark.slow


def run_samples(run_dir: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run_flowrt(["samples", str(run_dir), *arguments], variables={"COLUMNS": "160"})


def samples_output(run_dir: Path, *arguments: str) -> str:
    done = run_samples(run_dir, *arguments)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    return done.stdout


def all_rows(run_dir: Path, eval_name: str = "") -> tuple[SampleRow, ...]:
    return SampleReader(run_dir).query(SampleFilter(eval_name=eval_name), "oldest", 1_000_000).samples


def full_samples(run_dir: Path) -> list[Sample]:
    reader = SampleReader(run_dir)
    return [sample for row in all_rows(run_dir) if (sample := reader.get(row.id)) is not None]


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def faulty_reward_flags(tmp_path: Path, untrained_model: Path) -> list[str]:
    """A run whose reward hangs or raises for some responses, with evaluations."""
    data, reward_file = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": "7"}) + "\n" for n in range(ROWS)))
    reward_file.write_text(REWARD_SOURCE)
    return [
        *("--recipe", "custom", "--data", str(data), "--model", str(untrained_model), "--steps", str(STEPS)),
        *(*STORE_ALL, "--rollout.max-new-tokens", "8", "--algorithm.kl.coef", "0", "--rollout.workers", "1"),
        *("--max-staleness", "0", "--trainer.lr", "1e-4", "--trainer.warmup-steps", "1"),
        *("--data.eval-prompts", str(EVAL_PROMPTS), "--eval.interval", "2", "--checkpoint.every", "0"),
        *("--reward", f"{reward_file}:mine", "--reward.timeout-s", "1", "--reward.workers", "4"),
        *("--reward.max-failures", "1"),
    ]


def test_stored_samples_match_the_metrics_and_evaluations_of_a_run(
    launch: Callable[..., Any], faulty_reward_flags: list[str]
) -> None:
    run = launch(*faulty_reward_flags)
    assert run.wait(240.0) == 0, run.output
    rows = all_rows(run.run_dir)
    by_step = defaultdict(list)
    for row in rows:
        by_step[row.step].append(row)
    metrics = read_metrics(run.run_dir)
    assert {step: len(samples) for step, samples in by_step.items()} == dict.fromkeys(range(STEPS), PROMPTS * GROUP)
    for step, samples in by_step.items():
        assert fmean(row.reward or 0.0 for row in samples) == pytest.approx(metrics[step]["reward"], abs=1e-5)
        failed = sum(row.reason.startswith("timeout") for row in samples) / len(samples)
        assert failed == pytest.approx(metrics[step]["reward_failures/timeout"], abs=1e-5)
    assert all(row.prompt_text.rstrip().endswith("+1=") for row in rows)
    assert all(row.advantage is not None and row.staleness == 0 for row in rows)
    assert all(row.generate_s and row.reward_s is not None for row in rows)
    assert_tokens_match_trainer_metrics(run.run_dir, metrics)
    assert_groups_and_distributions_match(run.run_dir, metrics, rows)

    worst = samples_output(run.run_dir, "--worst", "2", "--tokens")
    assert worst.count("completion:") == 2
    assert "log-prob, trainer" in worst
    assert "timeout" in samples_output(run.run_dir, "--reason", "timeout")
    raised = samples_output(run.run_dir, "--reason", "error", "--newest", "1")
    assert "ValueError: no such \\x1b[31m thing" in " ".join(raised.split())
    evaluated = all_rows(run.run_dir, ANY_EVALUATION)
    versions = [
        line["version"] for line in map(json.loads, (run.run_dir / "evaluations.jsonl").read_text().splitlines())
    ]
    assert sorted({row.step for row in evaluated}) == sorted(versions)
    assert len(evaluated) == EVAL_PROMPTS * len(versions)
    assert all(row.version_min == row.version_max == row.step and row.eval_name == "held_out" for row in evaluated)
    assert f"held_out:{EVAL_PROMPTS - 1}" in samples_output(run.run_dir, "--eval", "held_out", "--newest", "100")

    output = samples_output(run.run_dir, "--eval", "held_out", "--prompt", "held_out:2", "--step", str(max(versions)))
    assert "1 of 1 samples" in output
    assert samples_output(run.run_dir, "--eval", "held_out", "--prompt", "2", "--step", str(max(versions))) == output
    table = run.run_dir / "table.jsonl"
    samples_output(run.run_dir, "--jsonl", str(table))
    written = [json.loads(line) for line in table.read_text().splitlines()]
    assert [list(line) for line in written] == [["step", "prompt", "completion", "mine", "advantage"]] * len(rows)
    assert [(line["step"], line["completion"], line["advantage"]) for line in written] == [
        (row.step, row.completion, row.advantage) for row in rows
    ]
    assert stat.S_IMODE(table.stat().st_mode) == stat.S_IMODE((run.run_dir / SAMPLES).stat().st_mode) == 0o600
    assert_bad_input_is_refused(run.run_dir)
    run.assert_gone(10.0)


def assert_groups_and_distributions_match(
    run_dir: Path, metrics: list[dict[str, Any]], rows: tuple[SampleRow, ...]
) -> None:
    """They are those of the rows and of the metrics, on the page, in run.html and in the terminal alike."""
    reader = RunReader(run_dir)
    groups = reader.groups({"order": "-reward"}, 200)["groups"]
    by_prompt = defaultdict(list)
    for row in rows:
        by_prompt[row.epoch, row.prompt].append(row)
    assert len(groups) == len(by_prompt) == STEPS * PROMPTS
    for group in groups:
        of = by_prompt[group["epoch"], group["prompt"]]
        rewards = [row.reward or 0.0 for row in of]
        assert group["size"] == GROUP
        assert group["reward"] == pytest.approx(fmean(rewards))
        assert group["spread"] == pytest.approx(stdev(rewards))
        assert group["right"] == sum(reward >= 1 for reward in rewards)
        # The algorithm of the run: GRPO, (reward - mean) / (spread + eps).
        for row in of:
            expected = ((row.reward or 0.0) - fmean(rewards)) / (stdev(rewards) + 1e-6)
            assert row.advantage == pytest.approx(expected, abs=1e-4)
    for step in range(STEPS):
        distributions = reader.distributions({"step": str(step)})
        assert distributions["samples"] == PROMPTS * GROUP
        assert distributions["sets"][0]["reward"] == pytest.approx(metrics[step]["reward"], abs=1e-5)
        assert distributions["sets"][0]["tokens"] == pytest.approx(metrics[step]["length_mean"], abs=1e-3)
        assert distributions["truncated"] / distributions["samples"] == pytest.approx(
            metrics[step]["truncated"], abs=1e-5
        )
    embedded = unpacked((run_dir / "run.html").read_text())
    assert embedded["api/distributions"] == json.loads(to_json(reader.distributions({})))
    assert embedded["api/groups?order=newest"] == json.loads(to_json(reader.groups({}, 100)))
    in_group = [path for path in embedded if path.startswith("api/samples?group=")]
    assert in_group
    assert all(embedded[path]["total"] == GROUP for path in in_group)
    best = groups[0]
    line = next(
        splitline
        for splitline in samples_output(run_dir, "--by", "group", "--best", "1").splitlines()
        if " of 4 " in splitline
    )
    assert line.split()[2:4] == [f"{best['reward']:.4g}", f"{best['spread']:.4g}"]
    assert f"{STEPS * PROMPTS * GROUP} samples of steps 0 to {STEPS - 1}" in samples_output(run_dir, "--by", "length")


def is_readable(run_dir: Path) -> bool:
    done = run_samples(run_dir, "--worst", "3")
    assert done.returncode == 0, done.stderr
    return True


def last_stored_step(run_dir: Path) -> int:
    """The last step with a stored sample, or -1."""
    steps = SampleReader(run_dir).steps()
    return -1 if steps is None else steps[1]


def assert_tokens_match_trainer_metrics(run_dir: Path, metrics: list[dict[str, Any]]) -> None:
    """Means over the stored log-probabilities equal the trainer's metrics of the step, up to float16 rounding."""
    of_step: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for sample in full_samples(run_dir):
        assert len(sample.ids) == len(sample.logprobs) == len(sample.trainer_logprobs) == sample.row.tokens
        of_step[sample.row.step] += zip(sample.logprobs, sample.trainer_logprobs, strict=True)
    for step, pairs in of_step.items():
        assert -fmean(trainer for _, trainer in pairs) == pytest.approx(metrics[step]["nll"], rel=1e-3)
        k1 = fmean(rollout - trainer for rollout, trainer in pairs)
        assert k1 == pytest.approx(metrics[step]["mismatch_kl_k1"], abs=2e-3)


def assert_bad_input_is_refused(run_dir: Path) -> None:
    for arguments, sentence in (
        (("--step", "99"), f"no sample of step 99 is stored; stored are some of steps 0 to {STEPS - 1}"),
        (("--grep", "("), "is not a regular expression"),
        (("--reason", "memory"), "no stored sample has the reason 'memory'; there is"),
        (("--eval", "other"), "there are answers on held_out"),
        (("--prompt", "4711"), "no sample of prompt 4711 is stored"),
        (("--worst", "0"), "give at least 1"),
        (("--steps", "3:1"), "is not A:B"),
        (("--tokens", "--jsonl", "x"), "takes --tokens without --jsonl"),
        (("--jsonl", "/proc/none/x"), "cannot be written"),
        (("--parquet", "-"), "--parquet needs a file"),
    ):
        done = run_samples(run_dir, *arguments)
        assert done.returncode == 2, (arguments, done.stdout)
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.long
def test_no_samples_are_stored_with_samples_per_step_zero(
    launch: Callable[..., Any], faulty_reward_flags: list[str]
) -> None:
    run = launch(
        *faulty_reward_flags,
        "--samples.per-step",
        "0",
        "--steps",
        "2",
        "--data.eval-prompts",
        "0",
        "--eval.interval",
        "0",
    )
    assert run.wait(180.0) == 0, run.output
    assert not list(run.run_dir.glob(f"{SAMPLES}*"))
    done = run_samples(run.run_dir)
    assert done.returncode == 2
    assert "stores no samples (samples.per_step 0)" in done.stderr


def test_samples_are_readable_during_a_run_after_sigkill_and_after_resume(
    launch: Callable[..., Any], tmp_path: Path, untrained_model: Path, request: pytest.FixtureRequest
) -> None:
    """The store is read during writes, after SIGKILL, as a copy, as a truncated copy, and after a resume."""
    run = launch(
        *("--model", str(untrained_model), "--rollout.max-new-tokens", "8", *STORE_ALL),
        *("--rollout.workers", "1", "--algorithm.kl.coef", "0"),
        *("--steps", "5000", "--checkpoint.every", str(CHECKPOINT_EVERY), "--data.eval-prompts", "8"),
    )
    run.wait_for((run.run_dir / SAMPLES).is_file, "a sample store", 120.0)
    checkpoint = run.run_dir / "checkpoints" / f"step-{CHECKPOINT_EVERY:06}"
    run.wait_for(lambda: is_readable(run.run_dir), "samples that can be read")
    run.wait_for(checkpoint.is_dir, "a checkpoint", 120.0)
    # The store is ahead of the checkpoint, and the next checkpoint is many steps away.
    run.wait_for(lambda: last_stored_step(run.run_dir) > CHECKPOINT_EVERY, "a sample beyond the checkpoint")
    run.kill_all()
    before = all_rows(run.run_dir)
    assert len({row.step for row in before}) >= 4
    assert max(row.step for row in before) > CHECKPOINT_EVERY
    assert "completion:" in samples_output(run.run_dir)

    copy = tmp_path / "copy"
    copy.mkdir()
    for path in run.run_dir.glob(f"{SAMPLES}*"):
        shutil.copy(path, copy)
    assert {row.id for row in all_rows(copy)} == {row.id for row in before}
    cut = tmp_path / "cut"
    cut.mkdir()
    data = (run.run_dir / SAMPLES).read_bytes()
    (cut / SAMPLES).write_bytes(data[: len(data) // 2])
    done = run_samples(cut)
    assert done.returncode in (0, 2)
    assert "Traceback" not in done.stderr

    steps = read_metrics(run.run_dir)[-1]["step"] + 4
    again = Launch(["--steps", str(steps)], tmp_path / "again", resume=run.run_dir)
    request.addfinalizer(again.close)
    assert again.wait(180.0) == 0, again.output
    rows = all_rows(run.run_dir)
    attempts = SampleReader(run.run_dir).run_attempts()
    assert [attempt for attempt, _ in attempts] == [1, 2]
    resume_step = attempts[1][1]
    assert resume_step > 0
    assert resume_step % CHECKPOINT_EVERY == 0
    assert {row.id for row in before} <= {row.id for row in rows}
    assert all(row.rolled_back == (row.run_attempt == 1 and row.step >= resume_step) for row in rows)
    valid = [row for row in rows if not row.rolled_back]
    for step in range(resume_step, steps):
        assert len([row for row in valid if row.step == step and row.advantage is not None]) == PROMPTS * GROUP
    if any(row.rolled_back and row.step == resume_step for row in rows):
        assert "rolled back" in samples_output(run.run_dir, "--step", str(resume_step), "--newest", "100")


def test_malformed_samples_are_counted_and_the_worker_stays(tmp_path: Path) -> None:
    async def scenario() -> None:
        flow = api.Dataflow((), (api.Stage("work", needs=(), makes=()),), "", "", token_columns=())
        policies = api.Policies(api.StrictLag(1), api.Fifo(), api.TokenBudget(64), api.DelayedUpdate())
        observability = api.Observability(samples=SampleStore(tmp_path / SAMPLES, per_step=32, max_bytes=1 << 30))
        async with api.controller(flow, api.Settings(), policies, tmp_path, observability=observability) as (
            server,
            address,
        ):
            session = await api.connect(address, "reward", "reward", 60)
            for records in ((b"garbage",), (b"", b"s", b"t\xc1"), (bytes(200_000), bytes(200_000)), ()):
                session.send(SampleRecords(records))
            end_s = monotonic() + 20.0
            while not (tmp_path / SAMPLES).is_file() or not SampleReader(tmp_path).left_out():
                assert monotonic() < end_s
                await pause(0.1)
            assert "reward" in server.status()["workers"]
            session.finished()
            await session.close()
        assert SampleReader(tmp_path).left_out() == {"malformed": 6}
        assert SampleReader(tmp_path).count == 0

    asyncio.run(scenario())
