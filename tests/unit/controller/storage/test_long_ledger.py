"""What a start and the summary read of a ledger: bitmaps and what is unfinished, however long the run is."""

import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.controller.events import AppendLedger
from flowrt.controller.state.controller_restart import WorkerJoined
from flowrt.controller.storage import integrity, ledger, prompt_words
from flowrt.controller.storage.integrity import (
    LEDGER,
    IntegrityCheck,
    check_not_behind_checkpoint,
    last_step,
    ledger_bytes,
)
from flowrt.controller.storage.ledger import Ledger
from flowrt.controller.storage.ledger_reader import LedgerReader
from flowrt.controller.storage.pending_writes import add_records
from flowrt.controller.storage.prompt_words import Record, count, finished, not_unread
from flowrt.controller.storage.schema import create_tables
from flowrt.errors import FlowError
from flowrt.protocol.messages import WORD_BITS, pack, unpack
from flowrt.runtime.time_limits import controller_start_s

DEADLINE_S = 60.0
IN_STEP = 8
STATES = ("in_flight", "ready", "leased", "trained")
CHANGES = st.tuples(
    st.sampled_from([*STATES, "trained", "dropped", "unread"]),
    st.integers(0, 1),
    st.sampled_from([0, 1, WORD_BITS - 1, WORD_BITS, 5 * WORD_BITS]),
)
TRAINED_TWICE = """
SELECT COUNT(*) FROM (
    SELECT 1 FROM events LEFT JOIN
        (SELECT epoch, prompt, MAX(id) AS last FROM events WHERE state = 'unread' GROUP BY epoch, prompt)
        USING (epoch, prompt)
    WHERE state = 'trained' AND id > COALESCE(last, 0) GROUP BY epoch, prompt HAVING COUNT(*) > 1
)
"""


@given(st.lists(st.lists(CHANGES, max_size=6), max_size=8))
def test_figures_of_the_words_are_those_of_all_prompts(
    transactions: list[list[tuple[str, int, int]]],
) -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        create_tables(db)
        for changes in transactions:
            records: list[Record] = [(0.0, epoch, prompt, state, 0, "", None) for state, epoch, prompt in changes]
            add_records(db, records)
        rows = db.execute("SELECT epoch, prompt, state FROM prompts").fetchall()
        counts = count(
            db.execute("SELECT trained, dropped, unread, trained_twice FROM prompt_words"),
            [state for _, _, state in db.execute(prompt_words.UNFINISHED)],
        )
        assert counts.states == dict(db.execute("SELECT state, COUNT(*) FROM prompts GROUP BY state"))
        assert (counts.trained_twice,) == db.execute(TRAINED_TWICE).fetchone()
        assert not_unread(db) == pack((epoch, prompt) for epoch, prompt, state in rows if state != "unread")
        done = [(epoch, prompt) for epoch, prompt, state in rows if state in ("trained", "dropped")]
        assert finished(db) == pack(done)


def train(path: Path, steps: int) -> None:
    with closing(Ledger(path)) as written:
        written.resume(0, 0.0)
        for step in range(steps):
            for prompt in range(IN_STEP * step, IN_STEP * (step + 1)):
                for state in STATES:
                    written.add(AppendLedger(prompt, 0, state, step), float(step))
        written.add(AppendLedger(IN_STEP * steps, 0, "in_flight", steps), float(steps))
        written.flush()


class Counted:
    """Instructions of SQLite's virtual machine in connections that are opened meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.instructions = 0
        connect: Callable[..., sqlite3.Connection] = sqlite3.connect

        def counting(*arguments: Any, **options: Any) -> sqlite3.Connection:
            database = connect(*arguments, **options)
            database.set_progress_handler(self._note, 10)
            return database

        monkeypatch.setattr(sqlite3, "connect", counting)

    def _note(self) -> int:
        self.instructions += 10
        return 0


def use(path: Path, steps: int) -> None:
    """What a restarted or resumed controller and its summary read."""
    check_not_behind_checkpoint(path, steps - 1, require_intact_wal=True)
    with closing(Ledger(path)) as opened:
        opened.recover()
        opened.passed()
        assert len(unpack(opened.resume(steps - 1, 0.0).passed)[0]) == IN_STEP * (steps - 1)
        account = opened.account(())
        assert account.states == {"trained": IN_STEP * (steps - 1), "unread": IN_STEP + 1}


def test_a_start_and_the_summary_cost_the_same_after_eight_times_as_many_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integrity, "CHECKED_AT_ONCE_BYTES", 0)
    monkeypatch.setattr(IntegrityCheck, "start", lambda _: None)
    cost = {}
    for steps in (50, 400):
        path = tmp_path / f"{steps}.sqlite"
        train(path, steps)
        with monkeypatch.context() as patched:
            counted = Counted(patched)
            use(path, steps)
            cost[steps] = counted.instructions
    added = IN_STEP * (400 - 50)
    assert cost[400] - cost[50] < added, "less than one instruction for each trained prompt"


@pytest.mark.parametrize("query", [prompt_words.UNFINISHED, prompt_words.LAST_STEP, ledger._ROLLED_BACK])
def test_queries_of_a_start_read_prompts_through_an_index(query: str) -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        create_tables(db)
        plan = [line for *_, line in db.execute(f"EXPLAIN QUERY PLAN {query}", {"step": 1})]
    reads = [line for line in plan if " prompts" in line]
    assert reads
    assert all("INDEX" in line and "SORT" not in line.upper() for line in plan if line in reads), plan


def damage(path: Path, table: str) -> None:
    """Overwrite the root page of a table."""
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        [(root,)] = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchall()
        [(size,)] = db.execute("PRAGMA page_size").fetchall()
    with path.open("r+b") as file:
        file.seek((root - 1) * size)
        file.write(os.urandom(size))


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / LEDGER
    train(path, 50)
    monkeypatch.setattr(integrity, "CHECKED_AT_ONCE_BYTES", 0)
    monkeypatch.setattr(integrity, "CHECK_AFTER_S", 0.0)
    return path


def test_damage_of_a_large_ledger_ends_the_run_after_its_start(large: Path) -> None:
    damage(large, "events")
    with closing(Ledger(large)) as opened:
        end_s = time.monotonic() + DEADLINE_S
        while not opened._integrity.damage:
            assert time.monotonic() < end_s
            os.sched_yield()
        with pytest.raises(FlowError, match=rf"{LEDGER} is damaged: .*; restore it from a copy"):
            opened.check_present()


def test_damage_of_what_a_start_reads_is_found_before_it(large: Path) -> None:
    damage(large, "prompt_words")
    before = large.read_bytes()
    with pytest.raises(FlowError, match=r"cannot be opened: .*; it was not changed"):
        Ledger(large)
    assert large.read_bytes() == before


def test_an_intact_large_ledger_stays_open(large: Path) -> None:
    with closing(Ledger(large)) as opened:
        thread = opened._integrity._thread
        assert thread is not None
        thread.join(DEADLINE_S)
        opened.check_present()
        assert opened.term == 2


def test_the_check_of_a_large_ledger_waits_for_the_run_to_start(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "CHECK_AFTER_S", 1000.0)
    damage(large, "events")
    with closing(Ledger(large)) as opened:
        opened.check_present()


def test_pending_writes_are_read_without_a_copy_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / LEDGER
    train(path, 3)
    killed = Ledger(path)
    killed.add(AppendLedger(0, 1, "in_flight", 3), 3.0)
    killed.add(AppendLedger(0, 1, "trained", 3), 3.0)
    killed.add(AppendLedger(IN_STEP * 3, 0, "dropped", 3, "a reason"), 3.0)
    killed.commit()
    opened = []
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect

    def noting(database: str, *arguments: Any, **options: Any) -> sqlite3.Connection:
        opened.append(database)
        return connect(database, *arguments, **options)

    monkeypatch.setattr(sqlite3, "connect", noting)
    with LedgerReader(path) as reader:
        assert reader.states() == {"trained": 3 * IN_STEP + 1, "dropped": 1}
        assert [event.state for event in reader.history(0, 1)] == ["in_flight", "trained"]
        assert [event.state for event in reader.history(IN_STEP * 3, None)] == ["in_flight", "dropped"]
        assert reader.states_of(0) == {0: "trained", 1: "trained"}
        assert (reader.reasons(), reader.last_step()) == ({"a reason": 1}, 3)
    assert last_step(path) == 3
    assert all(str(uri).startswith("file:") for uri in opened)
    killed.close()


def test_reasons_of_dropped_prompts_are_counted_for_a_restarted_controller(tmp_path: Path) -> None:
    path = tmp_path / LEDGER
    for attempt in range(2):
        with closing(Ledger(path)) as opened:
            opened.resume(0, 0.0)
            opened.append_restart_log(WorkerJoined("rollout-0", "rollout"))
            for prompt in range(3 + attempt):
                opened.add(AppendLedger(prompt, 0, "dropped", 0, "lost; by rollout-0"), 0.0)
            opened.commit()
        with closing(Ledger(path)) as restarted:
            recovered = restarted.recover()
            assert recovered is not None
            assert dict(recovered.dropped) == {"lost": 3 + attempt}, "of this start of the run"


def test_the_time_limit_of_a_start_follows_the_size_of_the_ledger(tmp_path: Path) -> None:
    assert ledger_bytes(tmp_path) == 0
    train(tmp_path / LEDGER, 1)
    unclosed = Ledger(tmp_path / LEDGER)
    unclosed.add(AppendLedger(0, 1, "in_flight", 1), 1.0)
    unclosed.flush()
    sizes = [path.stat().st_size for path in tmp_path.glob(f"{LEDGER}*") if not path.name.endswith("-shm")]
    assert ledger_bytes(tmp_path) == sum(sizes)
    assert len(sizes) == 2
    unclosed.close()
    assert controller_start_s(0) < controller_start_s(2_000_000_000) < controller_start_s(20_000_000_000)
