"""Sets of prompts as bitmaps, a row for 62 prompts: what a start of the controller and the summary read of a run.

``prompts`` has a row for each prompt of each epoch, and ``events`` several; reading them takes minutes in a long run.
The table ``prompt_words`` is updated in the transaction that changes ``prompts``, so both always agree.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flowrt.protocol.messages import WORD_BITS, Passed, pack_words

PROMPT_WORDS = """
CREATE TABLE prompt_words (
    epoch INTEGER NOT NULL, word INTEGER NOT NULL,
    trained INTEGER NOT NULL, dropped INTEGER NOT NULL, unread INTEGER NOT NULL,
    ever_trained INTEGER NOT NULL, trained_twice INTEGER NOT NULL, PRIMARY KEY (epoch, word)
) WITHOUT ROWID;
"""
"""The first three columns: prompts that are in this state now; the others: prompts trained once or more, and twice or
more, since they were last unread."""
_READ = "SELECT trained, dropped, unread, ever_trained, trained_twice FROM prompt_words WHERE epoch = ? AND word = ?"
_WRITE = "INSERT OR REPLACE INTO prompt_words VALUES (?, ?, ?, ?, ?, ?, ?)"
INDEXES = """
CREATE INDEX unfinished ON prompts (state) WHERE state IN ('in_flight', 'ready', 'leased');
CREATE INDEX finished ON prompts (step) WHERE state IN ('trained', 'dropped');
"""
"""A query with one of these conditions reads no other prompts."""
UNFINISHED = "SELECT epoch, prompt, state FROM prompts WHERE state IN ('in_flight', 'ready', 'leased')"
LAST_STEP = (
    "SELECT step FROM prompts WHERE state IN ('trained', 'dropped') AND state = 'trained' ORDER BY step DESC LIMIT 1"
)
Record = tuple[float, int, int, str, int, str, float | None]
"""A row of ``events`` without its id."""
_Words = tuple[int, int, int, int, int]


def add_states(db: sqlite3.Connection, records: Sequence[Record]) -> None:
    """Apply changes of state, in order, within the caller's transaction. Raises sqlite3.Error."""
    before: dict[tuple[int, int], _Words] = {}
    after: dict[tuple[int, int], _Words] = {}
    for _, epoch, prompt, state, *_ in records:
        word, bit = divmod(prompt, WORD_BITS)
        key = epoch, word
        if key not in before:
            row: _Words | None = db.execute(_READ, key).fetchone()
            before[key] = after[key] = row or (0, 0, 0, 0, 0)
        after[key] = _with_state(after[key], 1 << bit, state)
    db.executemany(_WRITE, [(*key, *words) for key, words in after.items() if words != before[key]])


def _with_state(words: _Words, bit: int, state: str) -> _Words:
    trained, dropped, unread, ever, twice = words
    if state not in ("trained", "dropped", "unread"):
        if not (trained | dropped | unread) & bit:
            return words
        return trained & ~bit, dropped & ~bit, unread & ~bit, ever, twice
    trained, dropped, unread = trained & ~bit, dropped & ~bit, unread & ~bit
    if state == "trained":
        return trained | bit, dropped, unread, ever | bit, twice | ever & bit
    if state == "dropped":
        return trained, dropped | bit, unread, ever, twice
    return trained, dropped, unread | bit, ever & ~bit, twice & ~bit


def finished(db: sqlite3.Connection) -> tuple[Passed, ...]:
    """Prompts that are trained or dropped. Raises sqlite3.Error."""
    return pack_words(db.execute("SELECT epoch, word, trained | dropped FROM prompt_words"))


def not_unread(db: sqlite3.Connection) -> tuple[Passed, ...]:
    """Prompts in any state but unread. Raises sqlite3.Error."""
    words = [*db.execute("SELECT epoch, word, trained | dropped FROM prompt_words")]
    for epoch, prompt, _ in db.execute(UNFINISHED):
        word, bit = divmod(prompt, WORD_BITS)
        words.append((epoch, word, 1 << bit))
    return pack_words(words)


class PromptCounts(NamedTuple):
    """Number of prompts by state, and of those that were trained more than once since they were last unread."""

    states: dict[str, int]
    trained_twice: int


def count(words: Iterable[tuple[int, int, int, int]], unfinished: Iterable[str]) -> PromptCounts:
    """Count the prompts of rows (trained, dropped, unread, trained_twice), and of these unfinished states."""
    states = Counter(unfinished)
    twice = 0
    for trained, dropped, unread, again in words:
        states["trained"] += trained.bit_count()
        states["dropped"] += dropped.bit_count()
        states["unread"] += unread.bit_count()
        twice += again.bit_count()
    return PromptCounts({state: number for state, number in states.items() if number}, twice)
