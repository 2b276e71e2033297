"""Tables of the ledger's SQLite file, and their version (``PRAGMA user_version``)."""

import sqlite3

from flowrt.controller.storage.prompt_words import INDEXES, PROMPT_WORDS
from flowrt.errors import FlowError

SCHEMA_VERSION = 6
_TABLES = f"""{PROMPT_WORDS}
CREATE TABLE prompts (
    epoch INTEGER NOT NULL, prompt INTEGER NOT NULL, state TEXT NOT NULL, step INTEGER NOT NULL,
    reason TEXT NOT NULL, reward REAL, at_s REAL NOT NULL, PRIMARY KEY (epoch, prompt)
) WITHOUT ROWID;
{INDEXES}CREATE TABLE dropped_reasons (reason TEXT PRIMARY KEY, prompts INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE events (
    id INTEGER PRIMARY KEY, at_s REAL NOT NULL, epoch INTEGER NOT NULL, prompt INTEGER NOT NULL,
    state TEXT NOT NULL, step INTEGER NOT NULL, reason TEXT NOT NULL, reward REAL
);
CREATE TABLE run_attempts (
    after_event INTEGER NOT NULL, step INTEGER NOT NULL, at_s REAL NOT NULL, at_unix_s REAL NOT NULL
);
CREATE TABLE summary_values (name TEXT PRIMARY KEY, value REAL NOT NULL, step INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE steps (step INTEGER PRIMARY KEY, line TEXT NOT NULL);
CREATE TABLE evaluations (
    name TEXT NOT NULL, version INTEGER NOT NULL, line TEXT NOT NULL, PRIMARY KEY (name, version)
) WITHOUT ROWID;
CREATE TABLE pending_writes (id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE replay_log (id INTEGER PRIMARY KEY, kind INTEGER NOT NULL, entry BLOB NOT NULL);
CREATE TABLE members (worker TEXT PRIMARY KEY, role TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE orders (name TEXT PRIMARY KEY, entry BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""


def is_empty(database: sqlite3.Connection) -> bool:
    """True for a new file: no tables yet. Raises sqlite3.Error."""
    return database.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None


def create_tables(database: sqlite3.Connection) -> None:
    """Create all tables of an empty file in one transaction. Raises sqlite3.Error."""
    database.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT")


def check_version(database: sqlite3.Connection) -> None:
    """Raises FlowError for a file with tables of another schema version, and sqlite3.Error."""
    [(version,)] = database.execute("PRAGMA user_version").fetchall()
    if version != SCHEMA_VERSION and not (version == 0 and is_empty(database)):
        raise FlowError(
            f"it has schema version {version}, and this flowrt reads {SCHEMA_VERSION} (use the flowrt that wrote it)"
        )
