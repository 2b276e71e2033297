"""The outcome of a run by its files alone, read without any code of flowrt."""

import json
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

LEDGER = "ledger.sqlite"
FILTERED = "filtered: "
"""Beginning of the reasons of prompts that the group filter has dropped."""
Prompt = tuple[int, int]
"""Epoch and number."""


@dataclass(frozen=True, slots=True)
class Account:
    """Numbers of prompts that were lost or trained twice; `fault` describes all other errors, empty if none."""

    lost: int
    doubled: int
    fault: str


@dataclass(slots=True)
class PromptHistory:
    """One prompt in the ledger: its row, its last event, and how often it was trained since the last rollback."""

    state: str = ""
    last_event: str = ""
    trained: int = 0
    reason: str = ""

    @property
    def is_filtered(self) -> bool:
        """Whether the group filter has dropped the prompt for good."""
        return self.state == "dropped" and self.reason.startswith(FILTERED)


def account(run_dir: Path, prompts: int, steps: int, complete: bool, filtered: int = 0) -> Account:
    """Check that every prompt was trained exactly once, or at most once if the run is not ``complete``.

    Args:
        run_dir: directory of the run.
        prompts: number of prompts in the data.
        steps: number of steps of the run.
        complete: whether the run ended successfully; if not, only prompts trained twice are counted.
        filtered: prompts that the group filter drops in each step; these are not trained.
    """
    if not (run_dir / LEDGER).exists():
        return Account(0, 0, "there is no ledger" if complete else "")
    try:
        with _copy_of(run_dir / LEDGER) as ledger:
            histories, unsettled = _histories(ledger)
            of_steps = ledger.execute(
                "SELECT step, COUNT(*) FROM prompts WHERE state = 'trained' GROUP BY step ORDER BY step"
            ).fetchall()
    except (sqlite3.Error, ValueError) as error:
        return Account(0, 0, f"the ledger cannot be read: {error}")
    doubled = sum(
        history.trained > 1 or (history.trained == 1 and history.is_filtered) for history in histories.values()
    )
    if not complete:
        return Account(0, doubled, "")
    once = {prompt for prompt, history in histories.items() if history.trained == 1 and history.state == "trained"}
    dropped = {prompt for prompt, history in histories.items() if filtered and history.is_filtered}
    lost = len({(0, prompt) for prompt in range(prompts)} - once - dropped)
    trained = prompts - steps * filtered
    wrong = [] if len(histories) == prompts else [f"{len(histories)} prompts in the ledger, {prompts} in the data"]
    if unsettled:
        wrong.append(f"{unsettled} transactions were never entered in the tables of the ledger")
    other = sorted(prompt for prompt, history in histories.items() if history.state != history.last_event)
    if other:
        wrong.append(f"the history of prompts {other} ends in another state than that of their rows")
    if len(dropped) != steps * filtered:
        wrong.append(f"{len(dropped)} prompts were filtered, not {steps * filtered}")
    if not (lost or doubled or wrong) and of_steps != [(step, trained // steps) for step in range(steps)]:
        wrong.append(f"prompts trained by step, in the ledger: {of_steps}")
    wrong += _wrong_steps(run_dir / "metrics.jsonl", trained, steps)
    return Account(lost, doubled, "; ".join(wrong))


def wrong_summary(run_dir: Path, expected: dict[str, Any]) -> list[str]:
    """Differences of summary.json from ``expected``, a sentence each; a key such as ``prompts.trained`` is nested."""
    try:
        summary: Any = json.loads((run_dir / "summary.json").read_text())
    except (OSError, ValueError) as error:
        return [f"there is no summary: {error}"]
    wrong = []
    for key, value in expected.items():
        actual = summary
        for part in key.split("."):
            actual = actual.get(part) if isinstance(actual, dict) else None
        if actual != value:
            wrong.append(f"{key} is {actual} in the summary, not {value}")
    return wrong


@contextmanager
def _copy_of(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection to a copy of the ledger and its log: opening a ledger changes its -wal and -shm files."""
    with tempfile.TemporaryDirectory(prefix="flowrt-verdict-") as place:
        for name in (path.name, f"{path.name}-wal"):
            if path.with_name(name).exists():
                shutil.copy2(path.with_name(name), place)
        with closing(sqlite3.connect(Path(place, path.name))) as ledger:
            yield ledger


def _histories(ledger: sqlite3.Connection) -> tuple[dict[Prompt, PromptHistory], int]:
    """The history of each prompt, and the number of pending transactions, whose events it includes."""
    histories: dict[Prompt, PromptHistory] = {}
    for epoch, prompt, state, reason in ledger.execute("SELECT epoch, prompt, state, reason FROM prompts").fetchall():
        histories[epoch, prompt] = PromptHistory(state=state, reason=reason)
    events = ledger.execute("SELECT epoch, prompt, state FROM events ORDER BY id").fetchall()
    # A killed controller leaves its last transactions in pending_writes, not in the tables.
    unsettled = ledger.execute("SELECT data FROM pending_writes ORDER BY id").fetchall()
    for (data,) in unsettled:
        records: list[tuple[float, int, int, str, int, str, float | None]] = msgpack.unpackb(data, use_list=False)[0]
        for _, epoch, prompt, state, _, reason, _ in records:
            events.append((epoch, prompt, state))
            history = histories.setdefault((epoch, prompt), PromptHistory())
            history.state, history.reason = state, reason
    for epoch, prompt, state in events:
        history = histories.setdefault((epoch, prompt), PromptHistory())
        history.last_event = state
        if state == "trained":
            history.trained += 1
        elif state == "unread":
            history.trained = 0  # a rollback has undone the training
    return histories, len(unsettled)


def _wrong_steps(path: Path, prompts: int, steps: int) -> list[str]:
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        numbers = [line["step"] for line in lines]
        groups = Counter(line["groups"] for line in lines)
    except (ValueError, TypeError, KeyError) as error:
        return [f"metrics.jsonl cannot be read: {type(error).__name__}: {error}"]
    if numbers != list(range(steps)):
        return [f"steps {numbers} in the metrics, not {steps}"]
    if set(groups) != {prompts // steps}:
        return [f"groups {[line['groups'] for line in lines]} in the steps"]
    return []
