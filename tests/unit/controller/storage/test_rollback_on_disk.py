"""What a run goes back to: positions, the ledger, the journal; who is restarted, and who holds the lock."""

import json
import os
import random
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.cli import main
from flowrt.controller.events import AppendLedger, LogEvent, Persist, StepClosed
from flowrt.controller.storage.ledger import Account, Ledger
from flowrt.controller.storage.run_metrics import RunMetrics
from flowrt.errors import ConfigError, RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.launcher.supervision import RestartPolicy
from flowrt.protocol import messages as m
from flowrt.protocol.codec import encode
from flowrt.protocol.messages import LARGEST_PROMPT, Passed, Position, pack, unpack
from flowrt.recipes.run_dir import checkpoint_steps
from flowrt.runtime.files import RunLock
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import offer_one

# ---- positions


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 700) | st.integers(0, LARGEST_PROMPT))))
def test_positions_are_packed_and_unpacked(pairs: set[tuple[int, int]]) -> None:
    found = unpack(pack(pairs))
    assert {(epoch, prompt) for epoch, prompts in found.items() for prompt in prompts} == pairs


@pytest.mark.parametrize(
    "passed",
    [
        Passed(0, (0,), (1,), (-1,)),
        Passed(0, (0,), (2**62,), (1,)),
        Passed(0, (0,), (), (1,)),
        Passed(0, (-1,), (1,), (1,)),
    ],
)
def test_words_that_nobody_packs_are_refused(passed: Passed) -> None:
    with pytest.raises(RemoteProtocolError, match="not packed"):
        unpack((passed,))


def test_the_size_of_prompt_numbers_costs_nothing() -> None:
    """As a hash of the prompt's text would have it."""
    chosen = random.Random(0)
    prompts = {chosen.randrange(LARGEST_PROMPT + 1) for _ in range(10_000)} | {2**62, LARGEST_PROMPT}
    [passed] = packed = pack((0, prompt) for prompt in prompts)
    assert unpack(packed) == {0: prompts}
    assert len(encode(m.Welcome(1, *(1.0,) * 5, 0, (), (), "", Position(0, packed)))) < 25 * len(prompts) + 1000
    assert len(passed.words) <= len(prompts)


def test_a_million_prompts_are_a_small_message() -> None:
    [passed] = pack((0, prompt) for prompt in range(1_000_000))
    assert len(encode(m.Welcome(1, *(1.0,) * 5, 0, (), (), "", Position(0, (passed,))))) < 140_000


# ---- the ledger


def enter(ledger: Ledger, prompt: int, *states: tuple[str, int]) -> None:
    for state, step in states:
        ledger.add(AppendLedger(prompt, 0, state, step), 1.0)


def query(path: Path, words: str) -> list[tuple[Any, ...]]:
    database = sqlite3.connect(path)
    try:
        return database.execute(words).fetchall()
    finally:
        database.close()


def test_the_ledger_takes_every_prompt_number_there_is(tmp_path: Path) -> None:
    ledger, prompts = Ledger(tmp_path / "ledger.sqlite"), {0, 2**62, LARGEST_PROMPT}
    for prompt in prompts:
        enter(ledger, prompt, ("in_flight", 0))
    assert unpack(ledger.passed()) == {0: prompts}
    for prompt in prompts:
        enter(ledger, prompt, ("trained", 1))
    ledger.flush()
    assert unpack(ledger.position(1).passed) == {0: prompts}
    assert ledger.account(()) == Account({"trained": 3}, 0, 0)
    ledger.close()


def test_the_ledger_goes_back_and_says_so(tmp_path: Path) -> None:
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


def test_only_what_is_trained_twice_in_the_history_that_is_left_counts(tmp_path: Path) -> None:
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


def test_going_back_again_changes_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    enter(ledger, 0, ("trained", 0))
    enter(ledger, 1, ("trained", 1))
    first = ledger.resume(1, 5.0)
    states, events = ledger.account(live=[]), query(tmp_path / "ledger.sqlite", "SELECT COUNT(*) FROM events")
    assert ledger.resume(1, 6.0) == first
    assert ledger.account(live=[]) == states
    assert query(tmp_path / "ledger.sqlite", "SELECT COUNT(*) FROM events") == events
    ledger.close()


# ---- the journal


def closed(step: int, reward: float) -> StepClosed:
    return StepClosed(
        step=step, groups=1, samples=2, tokens=10, lags=(0, 1), inline_means=(("reward", reward),), metrics=()
    )


def test_the_journal_is_cut_and_counts_the_whole_run(tmp_path: Path) -> None:
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


def test_what_the_run_is_done_with_is_refused() -> None:
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


def test_only_whole_checkpoints_count(tmp_path: Path) -> None:
    for name in ("step-000010", "step-000002", ".step-000012.part", ".step-000001.old", "step-x", "step-1000000"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert checkpoint_steps(tmp_path) == [2, 10, 1_000_000]
    assert checkpoint_steps(tmp_path / "nothing") == []


def test_one_at_a_time_in_a_run_directory(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from flowrt.runtime.files import RunLock; RunLock(Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    lock = RunLock(tmp_path)
    with pytest.raises(ConfigError, match="still in progress"):
        RunLock(tmp_path)
    assert subprocess.run(command, capture_output=True, timeout=60).returncode != 0
    lock.release()
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    RunLock(tmp_path).release()
    with pytest.raises(ConfigError, match="cannot be opened"):
        RunLock(tmp_path / "nowhere")


def end(run_dir: Path, reason: str, *, steps: int = 9, since: int = 6, code: int = 1) -> None:
    (run_dir / "summary.json").write_text(
        json.dumps({"reason": reason, "exit_code": code, "steps": steps, "resumed_from": since})
    )


def a_life(run_dir: Path, most: int) -> RestartPolicy:
    """Restarts of a run whose present life began after step 6."""
    (run_dir / "checkpoints" / "step-000006").mkdir(parents=True, exist_ok=True)
    restarts = RestartPolicy(run_dir, most)
    restarts.begin()
    return restarts


def test_a_lost_trainer_is_restarted_so_often_and_no_more(tmp_path: Path) -> None:
    restarts = a_life(tmp_path, 3)
    end(tmp_path, "trainer-1: its connection is closed; see its log")
    assert [restarts.back_off_s(1) for _ in range(4)] == [1.0, 4.0, 16.0, None]
    assert a_life(tmp_path, 0).back_off_s(-9) is None


def test_what_would_fail_again_is_not_restarted(tmp_path: Path) -> None:
    assert a_life(tmp_path, 3).back_off_s(-9) is None  # without a summary it was the controller that died
    end(tmp_path, "trainer: EngineError: no causal LM", steps=6)
    assert a_life(tmp_path, 3).back_off_s(1) is None
    assert a_life(tmp_path, 3).back_off_s(-9) == 1.0
    end(tmp_path, "rollout-0 was killed by SIGKILL")
    assert a_life(tmp_path, 3).back_off_s(1) is None
    end(tmp_path, "the run is complete", code=0)
    assert a_life(tmp_path, 3).back_off_s(0) is None


def test_a_trainer_that_is_lost_after_its_controller_came_back_is_restarted(tmp_path: Path) -> None:
    restarts = a_life(tmp_path, 3)
    end(tmp_path, "trainer-0: WaitExpired: the controller did not come back", steps=7, since=7)
    assert restarts.back_off_s(1) == 1.0, "this life has closed a step, before its controller died"


def test_a_complete_run_whose_summary_is_missing_is_told_once(tmp_path: Path) -> None:
    restarts = a_life(tmp_path, 1)
    assert not restarts.lacks_only_summary(7)
    assert [restarts.lacks_only_summary(6), restarts.lacks_only_summary(6)] == [True, False]
    end(tmp_path, "the run is complete", code=0)
    assert not a_life(tmp_path, 1).lacks_only_summary(6)


# ---- bad input


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["resume"], "flowrt resume takes a run directory [--steps N]"),
        (["resume", "a", "b"], "flowrt resume takes a run directory"),
        (["resume", "RUN"], "is not a run directory: it has no config.toml"),
        (["resume", "RUN", "--steps", "3"], "is not a run directory: it has no config.toml"),
        (["ledger", "RUN"], "ledger.sqlite is not there"),
        (["ledger", "RUN", "--prompt", "many"], "--prompt: 'many' is not a whole number"),
        (["ledger", "RUN", "--stops=3"], "flowrt ledger takes no '--stops=3'"),
        (["ledger", "RUN", "--prompt"], "--prompt: expected one argument"),
    ],
)
def test_bad_words_are_one_clear_line(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path) if word == "RUN" else word for word in words]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1
    assert os.listdir(tmp_path) == []
