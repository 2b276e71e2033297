"""The ledger: one state a prompt, losses and doubles found."""

import sqlite3
from pathlib import Path

import pytest

from flowrt.controller.events import AppendLedger
from flowrt.controller.state.replay import CounterSet, GroupsOpened, WorkerJoined
from flowrt.controller.storage.ledger import Ledger
from flowrt.controller.storage.reader import LedgerReader
from flowrt.errors import FlowError


def record(prompt: int, state: str, epoch: int = 0) -> AppendLedger:
    return AppendLedger(prompt, epoch, state, step=1)


def test_the_last_state_counts_and_the_life_is_kept(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for state in ("in_flight", "ready", "leased", "trained"):
        ledger.add(record(7, state), 1.0)
    ledger.add(record(8, "in_flight"), 2.0)
    account = ledger.account(live=[(0, 8)])
    ledger.close()
    assert account.states == {"trained": 1, "in_flight": 1}
    assert (account.lost, account.trained_twice) == (0, 0)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        life = db.execute("SELECT state FROM events WHERE prompt = 7 ORDER BY id").fetchall()
    db.close()
    assert [state for (state,) in life] == ["in_flight", "ready", "leased", "trained"]


def test_a_prompt_that_nobody_carries_is_lost(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add(record(1, "in_flight"), 0.0)
    ledger.add(record(2, "leased"), 0.0)
    ledger.add(record(3, "dropped"), 0.0)  # with a reason: accounted for
    assert ledger.account(live=[]).lost == 2
    assert ledger.account(live=[(0, 1)]).lost == 1
    assert ledger.account(live=[(0, 1), (0, 2)]).lost == 0
    ledger.close()


def test_training_twice_in_one_epoch_is_found_and_two_epochs_are_fine(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for epoch in (0, 1):
        ledger.add(record(1, "trained", epoch), 0.0)
    assert ledger.account(live=[]).trained_twice == 0
    ledger.add(record(1, "trained", 1), 0.0)
    assert ledger.account(live=[]).trained_twice == 1
    ledger.close()


def test_it_survives_a_restart(tmp_path: Path) -> None:
    for prompt in range(3):
        ledger = Ledger(tmp_path / "ledger.sqlite")
        ledger.add(record(prompt, "trained"), 0.0)
        ledger.commit()
        ledger.close()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert ledger.account(live=[]).states == {"trained": 3}
    ledger.close()


def test_a_file_that_is_no_ledger_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_text("not a database, long enough to be looked at " * 100)
    with pytest.raises(FlowError, match=r"ledger.sqlite cannot be opened.*another run directory"):
        Ledger(path)


def test_what_the_disk_refuses_stays_in_the_buffer(tmp_path: Path) -> None:
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
    dead = Ledger(path)
    for state in ("in_flight", "ready", "leased", "trained"):
        dead.add(record(7, state), 1.0)
        dead.append_replay(
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
        dead.commit()
    dead.append_replay(WorkerJoined("rollout-0", "rollout"))
    dead.append_replay(CounterSet("step", 3))
    dead.commit()
    dead.add(record(8, "ready"), 2.0)  # promises nobody anything: it may be lost
    with sqlite3.connect(path) as raw:
        assert raw.execute("SELECT COUNT(*) FROM events").fetchone() == (0,), "this test needs a ledger not settled"
    raw.close()
    with LedgerReader(path) as reader:
        assert reader.states() == {"trained": 1}
        assert [event.state for event in reader.history(7, None)] == ["in_flight", "ready", "leased", "trained"]
    # Nobody closes it: its process was killed.
    next_one = Ledger(path)
    assert next_one.account(live=[]).states == {"trained": 1}
    recovered = next_one.recover()
    assert recovered is not None
    assert (recovered.members, recovered.numbers["step"], len(recovered.entries)) == ({"rollout-0": "rollout"}, 3, 4)
    next_one.close()
    dead.close()


def test_a_lease_waits_for_nobody_and_a_promise_is_behind_until_it_is_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for state, is_behind in (("ready", False), ("leased", False), ("trained", True), ("dropped", True)):
        ledger.add(record(1, state), 0.0)
        assert ledger.needs_commit() is is_behind
        ledger.commit()
        assert not ledger.needs_commit()
    ledger.append_replay(CounterSet("step", 1))
    assert ledger.needs_commit()
    ledger.flush()
    assert not ledger.needs_commit()
    ledger.close()


def test_a_long_log_is_moved_beside_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrt.controller.storage.ledger.CHECKPOINT_AT_BYTES", 1)
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    for prompt in range(100):
        ledger.add(record(prompt, "trained"), 0.0)
    before = path.stat().st_size
    ledger.compact()
    ledger._checkpointer.close()  # waits for the end of what was begun
    assert path.stat().st_size > before
    assert ledger.account(live=[]).states == {"trained": 100}
    ledger.close()
