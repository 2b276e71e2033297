"""Rollback to a checkpoint: positions, the ledger, the metrics; restarts, and the lock of the run directory."""

import json
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.cli import main
from flowrt.controller.events import AppendLedger, EvaluationClosed, EventKind, LogEvent, Persist, StepClosed
from flowrt.controller.storage.event_log import END_TEXT, EVENTS, EventLog
from flowrt.controller.storage.ledger import Account, Ledger
from flowrt.controller.storage.run_metrics import RunMetrics
from flowrt.errors import ConfigError, RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.launcher.supervision import RestartPolicy, recorded_end
from flowrt.protocol import messages as m
from flowrt.protocol.codec import encode
from flowrt.protocol.messages import LARGEST_PROMPT, Passed, Position, pack, unpack
from flowrt.recipes.run_dir import checkpoint_steps
from flowrt.runtime.files import RunLock
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import offer_one

# ---- positions


def sets(passed: Iterable[Passed]) -> dict[int, set[int]]:
    return {epoch: set(prompts) for epoch, prompts in unpack(passed).items()}


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 700) | st.integers(0, LARGEST_PROMPT))))
def test_positions_are_packed_and_unpacked(pairs: set[tuple[int, int]]) -> None:
    unpacked = unpack(pack(pairs))
    assert {(epoch, prompt) for epoch, prompts in unpacked.items() for prompt in prompts} == pairs


@pytest.mark.parametrize(
    "passed",
    [
        Passed(0, (0,), (1,), (-1,)),
        Passed(0, (0,), (2**62,), (1,)),
        Passed(0, (0,), (), (1,)),
        Passed(0, (-1,), (1,), (1,)),
    ],
)
def test_invalid_packed_positions_are_refused(passed: Passed) -> None:
    with pytest.raises(RemoteProtocolError, match="not packed"):
        unpack((passed,))


def test_the_size_of_a_position_is_bounded_for_large_prompt_numbers() -> None:
    """Prompt numbers may be hashes of the prompts' texts."""
    rng = random.Random(0)
    prompts = {rng.randrange(LARGEST_PROMPT + 1) for _ in range(10_000)} | {2**62, LARGEST_PROMPT}
    [passed] = packed = pack((0, prompt) for prompt in prompts)
    assert sets(packed) == {0: prompts}
    assert len(encode(m.Welcome(1, *(1.0,) * 5, 0, (), (), "", Position(0, packed)))) < 25 * len(prompts) + 1000
    assert len(passed.words) <= len(prompts)


def test_a_million_prompts_are_a_small_message() -> None:
    [passed] = pack((0, prompt) for prompt in range(1_000_000))
    assert len(encode(m.Welcome(1, *(1.0,) * 5, 0, (), (), "", Position(0, (passed,))))) < 150_000


# ---- the ledger


def enter(ledger: Ledger, prompt: int, *states: tuple[str, int]) -> None:
    for state, step in states:
        ledger.add(AppendLedger(prompt, 0, state, step), 1.0)


def query(path: Path, sql: str) -> list[tuple[Any, ...]]:
    database = sqlite3.connect(path)
    try:
        return database.execute(sql).fetchall()
    finally:
        database.close()


def test_the_ledger_accepts_the_whole_range_of_prompt_numbers(tmp_path: Path) -> None:
    ledger, prompts = Ledger(tmp_path / "ledger.sqlite"), {0, 2**62, LARGEST_PROMPT}
    for prompt in prompts:
        enter(ledger, prompt, ("in_flight", 0))
    assert sets(ledger.passed()) == {0: prompts}
    for prompt in prompts:
        enter(ledger, prompt, ("trained", 1))
    ledger.flush()
    assert sets(ledger.position(1).passed) == {0: prompts}
    assert ledger.account(()) == Account({"trained": 3}, 0, 0)
    ledger.close()


def test_rollback_marks_later_prompts_unread_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    enter(ledger, 0, ("in_flight", 0), ("ready", 0), ("leased", 0), ("trained", 0))
    enter(ledger, 1, ("in_flight", 0), ("trained", 2))
    enter(ledger, 2, ("in_flight", 1), ("dropped", 1))
    enter(ledger, 3, ("in_flight", 2), ("dropped", 2))
    for prompt, state in ((4, "in_flight"), (5, "ready"), (6, "leased")):
        enter(ledger, prompt, (state, 2))
    ledger.add_summary_value("eval_first", 0.25, step=0)
    ledger.add_summary_value("eval_last", 0.5, step=3)
    position = ledger.resume(2, 5.0)
    assert position == Position(2, pack([(0, 0), (0, 2)]), (("eval_first", 0.25),))
    assert dict(query(path, "SELECT prompt, state FROM prompts")) == {
        0: "trained",
        2: "dropped",
        **dict.fromkeys((1, 3, 4, 5, 6), "unread"),
    }
    reasons = dict(query(path, "SELECT prompt, reason FROM events WHERE state = 'unread'"))
    assert reasons[1] == "rolled back: trained in step 2"
    assert reasons[4] == "rolled back: in_flight in step 2"
    assert ledger.account(live=[]) == Account({"trained": 1, "dropped": 1, "unread": 5}, 0, 0)
    ledger.close()


def test_trained_twice_ignores_rolled_back_history(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for prompt in range(3):
        enter(ledger, prompt, ("trained", 4))
    ledger.resume(3, 5.0)
    enter(ledger, 0, ("trained", 3))
    assert ledger.account(live=[]).trained_twice == 0
    enter(ledger, 0, ("trained", 4))
    enter(ledger, 1, ("trained", 4))
    assert ledger.account(live=[]).trained_twice == 1
    ledger.close()


def test_a_repeated_rollback_changes_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    enter(ledger, 0, ("trained", 0))
    enter(ledger, 1, ("trained", 1))
    first = ledger.resume(1, 5.0)
    states, events = ledger.account(live=[]), query(tmp_path / "ledger.sqlite", "SELECT COUNT(*) FROM events")
    assert ledger.resume(1, 6.0) == first
    assert ledger.account(live=[]) == states
    assert query(tmp_path / "ledger.sqlite", "SELECT COUNT(*) FROM events") == events
    ledger.close()


# ---- the metrics


def closed(step: int, reward: float) -> StepClosed:
    return StepClosed(
        step=step, groups=1, samples=2, tokens=10, lags=(0, 1), inline_means=(("reward", reward),), metrics=()
    )


def test_rollback_truncates_the_metrics_and_the_summary_covers_the_whole_run(tmp_path: Path) -> None:
    first = RunMetrics(tmp_path, 100.0)
    first.on_training_started(101.0)
    texts = [first.write_step(closed(step, step / 10), 102.0 + step) for step in range(4)]
    first.persist()
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 4, "wal')  # of a controller that was killed while it wrote
    second = RunMetrics(tmp_path, 7.0, Position(2), lines=texts[:2])
    second.on_training_started(8.0)
    second.write_step(closed(2, 0.9), 9.0)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["reward"]) for line in lines] == [(0, 0.0), (1, 0.1), (2, 0.9)]
    assert [line["wall_s"] for line in lines] == [2.0, 3.0, 7.0]
    summary = second.summary(Account({}, 0, 0), 1, {}, 9.5)
    second.close()
    assert (summary["steps"], summary["samples"]) == (3, 6)
    assert (summary["staleness_mean"], summary["staleness_max"]) == (0.5, 1)
    assert (summary["reward_first"], summary["reward_last"], summary["resumed_from"]) == (0.0, 0.9, 2)
    assert summary["training_s"] == pytest.approx(3.0, abs=0.01)
    assert summary["wall_s"] == pytest.approx(7.5)


# ---- the core


def test_an_offer_of_a_completed_prompt_is_rejected_after_a_resume() -> None:
    driver = CoreDriver()
    assert driver.core.env.passed == {}
    resumed = CoreDriver(position=Position(3, pack([(0, 5)])), steps=6)
    offer = offer_one(request=1, prompt=5, members=1)
    [(_, refused)] = resumed.sent(resumed.send("source0", offer), m.Rejected)
    assert "which the run is done with" in refused.reason
    assert resumed.sent(resumed.offer(prompt=6), m.OfferAccepted)
    assert resumed.core.state.window.step == 3


def test_a_checkpoint_of_another_step_is_illegal() -> None:
    driver = CoreDriver()
    logged, persist = driver.send("trainer0", m.CheckpointWritten(1, 0))
    assert isinstance(logged, LogEvent)
    assert (logged.kind, persist) == ("checkpoint", Persist(WorkerId("trainer0"), 1))
    driver.assert_illegal("trainer0", m.CheckpointWritten(2, 1))


# ---- checkpoints, the lock, restarts


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    for name in ("step-000010", "step-000002", ".step-000012.part", ".step-000001.old", "step-x", "step-1000000"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert checkpoint_steps(tmp_path) == [2, 10, 1_000_000]
    assert checkpoint_steps(tmp_path / "nothing") == []


def test_a_run_directory_is_locked_by_one_process(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from flowrt.runtime.files import RunLock; RunLock(Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    lock = RunLock(tmp_path)
    with pytest.raises(ConfigError, match="still in progress"):
        RunLock(tmp_path)
    assert subprocess.run(command, capture_output=True, timeout=600).returncode != 0
    lock.release()
    assert subprocess.run(command, capture_output=True, timeout=600).returncode == 0
    RunLock(tmp_path).release()
    with pytest.raises(ConfigError, match=r"cannot be locked: .*No such file"):
        RunLock(tmp_path / "nowhere")


def write_summary(run_dir: Path, reason: str, *, steps: int = 9, since: int = 6, code: int = 1) -> None:
    (run_dir / "summary.json").write_text(
        json.dumps({"reason": reason, "exit_code": code, "steps": steps, "resumed_from": since})
    )


WINDOW_S = 1000.0


def restart_policy(run_dir: Path, most: int, at_s: Sequence[float] = (0.0,)) -> RestartPolicy:
    """The restart policy of a run that was resumed after step 6; the first item of ``at_s`` is the present time."""
    (run_dir / "checkpoints" / "step-000006").mkdir(parents=True, exist_ok=True)
    restarts = RestartPolicy(run_dir, most, WINDOW_S, lambda: next(iter(at_s)))
    restarts.begin()
    return restarts


def test_a_lost_trainer_is_restarted_a_limited_number_of_times(tmp_path: Path) -> None:
    restarts = restart_policy(tmp_path, 3)
    write_summary(tmp_path, "trainer-1: its connection is closed; see its log")
    assert [restarts.back_off_s(1) for _ in range(4)] == [1.0, 4.0, 16.0, None]
    assert restart_policy(tmp_path, 0).back_off_s(-9) is None


def test_a_run_of_a_month_is_restarted_whenever_it_was_healthy_for_a_window(tmp_path: Path) -> None:
    at_s = [0.0]
    restarts = restart_policy(tmp_path, 3, at_s)
    write_summary(tmp_path, "trainer-1: its connection is closed; see its log")
    for _ in range(30):  # one failure in a window: each is as the first
        assert restarts.back_off_s(-9) == 1.0
        assert restarts.describe(1.0) == "restart 1 of 3 in 1 s, from step 6"
        at_s[0] += WINDOW_S + 1.0
    delays_s = []
    for _ in range(4):  # a window that slides: the first of these has left it when the last comes
        delays_s.append(restarts.back_off_s(-9))
        at_s[0] += WINDOW_S / 3 + 1.0
    assert delays_s == [1.0, 4.0, 16.0, 16.0]
    assert [restarts.back_off_s(-9), restarts.back_off_s(-9)] == [16.0, None]


def write_events(run_dir: Path, *kinds: EventKind) -> None:
    log = EventLog(run_dir, 0.0)
    for kind in kinds:
        log.add(kind, f"{END_TEXT}trainer was killed by SIGKILL", 7, 0.0, code=1)
    log.close()


def test_an_end_that_only_the_events_have_restarts_the_run(tmp_path: Path) -> None:
    # The controller was killed between the end of the run and its summary.
    restarts = restart_policy(tmp_path, 3)
    write_events(tmp_path, "started", "ended")
    assert recorded_end(tmp_path) == {"exit_code": 1, "reason": "trainer was killed by SIGKILL", "steps": 7}
    assert restarts.back_off_s(-9) == 1.0
    assert restarts.reason() == "trainer was killed by SIGKILL"
    write_summary(tmp_path, "rollout-0: EngineError")
    assert restarts.back_off_s(-9) is None  # the summary is later


@pytest.mark.parametrize("later", ["resumed", "controller_restarted", "started"])
def test_an_end_of_an_earlier_start_is_none_of_this_one(tmp_path: Path, later: EventKind) -> None:
    write_events(tmp_path, "started", "ended", later)
    assert recorded_end(tmp_path) is None
    assert restart_policy(tmp_path, 3).back_off_s(-9) is None


def test_events_that_cannot_be_read_record_no_end(tmp_path: Path) -> None:
    assert recorded_end(tmp_path) is None
    (tmp_path / EVENTS).write_bytes(b'{"kind": "ended", "code": "1"}\n[]\nx\n{"kind": "ended"\n')
    assert recorded_end(tmp_path) is None


def test_errors_that_would_repeat_are_not_restarted(tmp_path: Path) -> None:
    assert restart_policy(tmp_path, 3).back_off_s(-9) is None  # without a summary it was the controller that died
    write_summary(tmp_path, "trainer: EngineError: no causal LM", steps=6)
    assert restart_policy(tmp_path, 3).back_off_s(1) is None
    assert restart_policy(tmp_path, 3).back_off_s(-9) == 1.0
    write_summary(tmp_path, "rollout-0 was killed by SIGKILL")
    assert restart_policy(tmp_path, 3).back_off_s(1) is None
    write_summary(tmp_path, "the run is complete", code=0)
    assert restart_policy(tmp_path, 3).back_off_s(0) is None


def test_a_trainer_lost_after_a_controller_restart_is_restarted(tmp_path: Path) -> None:
    restarts = restart_policy(tmp_path, 3)
    write_summary(tmp_path, "trainer-0: WaitExpired: the controller did not come back", steps=7, since=7)
    assert restarts.back_off_s(1) == 1.0, "a step was closed since the resume, before the controller died"


def test_a_complete_run_that_lacks_only_its_summary_is_reported_once(tmp_path: Path) -> None:
    restarts = restart_policy(tmp_path, 1)
    assert not restarts.lacks_only_summary(7)
    assert [restarts.lacks_only_summary(6), restarts.lacks_only_summary(6)] == [True, False]
    write_summary(tmp_path, "the run is complete", code=0)
    assert not restart_policy(tmp_path, 1).lacks_only_summary(6)


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["resume"], "flowrt resume takes a run directory [--steps N]"),
        (["resume", "a", "b"], "flowrt resume takes a run directory"),
        (["resume", "RUN"], "is not a run directory: it has no config.toml"),
        (["resume", "RUN", "--steps", "3"], "is not a run directory: it has no config.toml"),
        (["ledger", "RUN"], "ledger.sqlite is not there"),
        (["ledger", "RUN", "--prompt", "many"], "--prompt: 'many' is not a whole number"),
        (["ledger", "RUN", "--epoch", "9" * 20], "has 20 digits; give a number of at most 18"),
        (["samples", "RUN", "--worst", "9" * 5000], "has 5000 digits; give a number of at most 18"),
        (["ledger", "RUN", "--stops=3"], "flowrt ledger takes no '--stops=3'"),
        (["ledger", "RUN", "--prompt"], "--prompt: expected one argument"),
    ],
)
def test_invalid_arguments_print_one_line(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path) if argument == "RUN" else argument for argument in arguments]) == 2
    output = capsys.readouterr().err
    assert expected in output
    assert len(output.splitlines()) == 1
    assert os.listdir(tmp_path) == []


def test_a_resumed_run_reports_the_evaluations_that_no_line_has(tmp_path: Path) -> None:
    first = RunMetrics(tmp_path, 0.0)
    first.write_evaluation(EvaluationClosed("test", 0, (("avg@1", 0.25),)), 1.0)
    texts = [first.write_step(closed(0, 0.5), 2.0)]
    results = {
        (name, version): first.write_evaluation(EvaluationClosed(name, version, (("avg@1", value),)), 3.0)
        for name, version, value in (("test", 1, 0.5), ("bench", 1, 0.75))
    }
    first.close()
    second = RunMetrics(tmp_path, 0.0, Position(1), lines=texts, evaluations=results)
    for step in (1, 2):
        second.write_step(closed(step, 0.5), 4.0 + step)
    second.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line.get("eval/test/version"), line.get("eval/test/avg@1")) for line in lines] == [
        (0, 0.25),
        (1, 0.5),
        (None, None),
    ]
    assert [line.get("eval/bench/avg@1") for line in lines] == [None, 0.75, None]
