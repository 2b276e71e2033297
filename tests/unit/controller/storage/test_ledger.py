"""The ledger: one state per prompt; lost prompts and prompts trained twice are detected."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from flowrt.controller.events import AppendLedger
from flowrt.controller.state.controller_restart import (
    CounterSet,
    DrainEnded,
    GroupsOpened,
    RunPreempted,
    WorkerDrained,
    WorkerJoined,
)
from flowrt.controller.storage.integrity import LEDGER
from flowrt.controller.storage.ledger import Ledger
from flowrt.controller.storage.ledger_reader import LedgerReader
from flowrt.errors import FlowError


def record(prompt: int, state: str, epoch: int = 0) -> AppendLedger:
    return AppendLedger(prompt, epoch, state, step=1)


def test_the_last_state_counts_and_the_history_is_kept(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for state in ("in_flight", "ready", "leased", "trained"):
        ledger.add(record(7, state), 1.0)
    ledger.add(record(8, "in_flight"), 2.0)
    account = ledger.account(live=[(0, 8)])
    ledger.close()
    assert account.states == {"trained": 1, "in_flight": 1}
    assert (account.lost, account.trained_twice) == (0, 0)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        history = db.execute("SELECT state FROM events WHERE prompt = 7 ORDER BY id").fetchall()
    db.close()
    assert [state for (state,) in history] == ["in_flight", "ready", "leased", "trained"]


def test_an_unfinished_prompt_without_a_live_group_is_lost(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add(record(1, "in_flight"), 0.0)
    ledger.add(record(2, "leased"), 0.0)
    ledger.add(record(3, "dropped"), 0.0)  # with a reason: accounted for
    assert ledger.account(live=[]).lost == 2
    assert ledger.account(live=[(0, 1)]).lost == 1
    assert ledger.account(live=[(0, 1), (0, 2)]).lost == 0
    ledger.close()


def test_training_twice_is_counted_only_within_one_epoch(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for epoch in (0, 1):
        ledger.add(record(1, "trained", epoch), 0.0)
    assert ledger.account(live=[]).trained_twice == 0
    ledger.add(record(1, "trained", 1), 0.0)
    assert ledger.account(live=[]).trained_twice == 1
    ledger.close()


def test_the_ledger_survives_restarts(tmp_path: Path) -> None:
    for prompt in range(3):
        ledger = Ledger(tmp_path / "ledger.sqlite")
        ledger.add(record(prompt, "trained"), 0.0)
        ledger.commit()
        ledger.close()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert ledger.account(live=[]).states == {"trained": 3}
    ledger.close()


def test_a_file_that_is_not_a_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_text("not a database, long enough to be looked at " * 100)
    with pytest.raises(FlowError, match=r"ledger.sqlite cannot be opened.*another run directory"):
        Ledger(path)


def test_records_stay_in_the_buffer_when_a_commit_fails(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add(record(1, "trained"), 0.0)
    blocker = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
    ledger._db.execute("PRAGMA busy_timeout=10")
    blocker.execute("BEGIN EXCLUSIVE")
    with pytest.raises(FlowError, match="is locked by another process"):
        ledger.commit()
    blocker.execute("ROLLBACK")
    blocker.close()
    assert ledger.account(live=[]).states == {"trained": 1}
    ledger.close()


def test_pending_writes_are_seen_by_readers_and_applied_by_the_next_controller(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    killed = Ledger(path)
    for state in ("in_flight", "ready", "leased", "trained"):
        killed.add(record(7, state), 1.0)
        killed.append_restart_log(
            GroupsOpened(
                owner="source",
                request=1,
                flow="",
                prompts=(7,),
                epoch=0,
                members=1,
                at_least=1,
                lengths=(),
                tags=(),
                group=7,
                slot=7,
            )
        )
        killed.commit()
    killed.append_restart_log(WorkerJoined("rollout-0", "rollout"))
    killed.append_restart_log(CounterSet("step", 3))
    killed.commit()
    killed.add(record(8, "ready"), 2.0)  # not committed: it may be lost
    with sqlite3.connect(path) as raw:
        assert raw.execute("SELECT COUNT(*) FROM events").fetchone() == (0,), "this test needs pending writes"
    raw.close()
    with LedgerReader(path) as reader:
        assert reader.states() == {"trained": 1}
        assert [event.state for event in reader.history(7, None)] == ["in_flight", "ready", "leased", "trained"]
    # It is not closed: its process was killed.
    reopened = Ledger(path)
    assert reopened.account(live=[]).states == {"trained": 1}
    recovered = reopened.recover()
    assert recovered is not None
    assert (recovered.members, recovered.numbers["step"], len(recovered.entries)) == ({"rollout-0": "rollout"}, 3, 4)
    reopened.close()
    killed.close()


def test_only_final_states_and_replay_records_need_a_commit(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for state, needs_commit in (("ready", False), ("leased", False), ("trained", True), ("dropped", True)):
        ledger.add(record(1, state), 0.0)
        assert ledger.needs_commit() is needs_commit
        ledger.commit()
        assert not ledger.needs_commit()
    ledger.append_restart_log(CounterSet("step", 1))
    assert ledger.needs_commit()
    ledger.flush()
    assert not ledger.needs_commit()
    ledger.close()


def test_a_long_log_is_checkpointed_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrt.controller.storage.ledger.CHECKPOINT_AT_BYTES", 1)
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    for prompt in range(100):
        ledger.add(record(prompt, "trained"), 0.0)
    before = path.stat().st_size
    ledger.compact()
    ledger._checkpointer.close()  # waits for the checkpoint in progress
    assert path.stat().st_size > before
    assert ledger.account(live=[]).states == {"trained": 100}
    ledger.close()


@pytest.mark.parametrize(
    ("table", "query"),
    [
        ("prompts", Ledger.passed),
        ("prompts", Ledger.outcomes),
        ("prompt_words", lambda ledger: ledger.position(1)),
        ("prompts", lambda ledger: ledger.account(())),
        ("steps", lambda ledger: ledger.step_lines(1)),
        ("evaluations", Ledger.evaluation_lines),
        ("run_attempts", lambda ledger: ledger.run_attempt),
    ],
)
def test_a_query_that_fails_names_the_ledger(tmp_path: Path, table: str, query: Callable[[Ledger], object]) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    with closing(sqlite3.connect(tmp_path / LEDGER, isolation_level=None)) as other:
        other.execute(f"DROP TABLE {table}")
    with pytest.raises(FlowError, match=rf"{LEDGER} cannot be read: .*{table}"):
        query(ledger)
    ledger.close()


def test_orders_are_recovered_until_they_end(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    orders = (WorkerDrained("rollout-0", by_operator=True), RunPreempted("interrupted (SIGTERM)", 143, 2))
    entries = (WorkerJoined("source", "source"), *orders, WorkerDrained("reward-0", by_operator=False))
    for entry in entries:
        ledger.append_restart_log(entry)
    ledger.commit()
    ledger.append_restart_log(DrainEnded("reward-0"))
    ledger.append_restart_log(RunPreempted("interrupted (SIGTERM)", 143, 2, 5))
    ledger.flush()
    ledger.close()
    ledger = Ledger(tmp_path / LEDGER)
    recovered = ledger.recover()
    assert recovered is not None
    assert recovered.orders == (orders[0], RunPreempted("interrupted (SIGTERM)", 143, 2, 5))
    ledger.resume(0, 0.0)
    ledger.append_restart_log(WorkerJoined("source", "source"))
    ledger.flush()
    recovered = ledger.recover()
    assert recovered is not None
    assert recovered.orders == ()
    ledger.close()
