"""Tables of samples.sqlite.

- ``samples`` has a row a sample. A text is TEXT as it is, or a BLOB: zlib over its UTF-8 bytes (``surrogatepass``).
- ``attempts`` has a row for each start or resume of the run: the step from which it went on. Samples of an earlier life
  with that step or a later one were rolled back.
- ``left_out`` counts the samples that were not stored, by reason.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

SAMPLES = "samples.sqlite"
"""File name of the sample store in the run directory."""
SAMPLES_VERSION = 1
_TABLES = """
CREATE TABLE samples (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, life INTEGER NOT NULL, flow TEXT NOT NULL,
    eval_name TEXT NOT NULL, epoch INTEGER NOT NULL, prompt INTEGER NOT NULL, member INTEGER NOT NULL,
    attempt INTEGER NOT NULL, reward REAL, parts TEXT NOT NULL, finish TEXT NOT NULL, reason TEXT NOT NULL,
    version_min INTEGER, version_max INTEGER, spans TEXT NOT NULL, tokens INTEGER NOT NULL, prompt_text, completion,
    ids BLOB, logprobs BLOB, trainer_logprobs BLOB, advantage REAL, generate_s REAL, reward_s REAL,
    flagged INTEGER NOT NULL
);
CREATE UNIQUE INDEX trained_sample ON samples (epoch, prompt, member, attempt, life) WHERE flow = 'train';
CREATE UNIQUE INDEX evaluated_sample ON samples (eval_name, step, prompt, member, life) WHERE flow = 'eval';
CREATE INDEX samples_by_step ON samples (step, flagged);
CREATE TABLE attempts (life INTEGER PRIMARY KEY, step INTEGER NOT NULL, unix_s REAL NOT NULL);
CREATE TABLE left_out (reason TEXT PRIMARY KEY, samples INTEGER NOT NULL) WITHOUT ROWID;
"""


def create_sample_file(path: Path) -> None:
    """Create the file with all its tables, unless there is one. Raises sqlite3.Error and OSError.

    It gets its name when it is whole, so that a reader never finds one without tables.
    """
    if path.is_file() and path.stat().st_size:
        return
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    new.touch(mode=0o600)  # SQLite would make it readable for all users; its log gets the same rights
    with closing(sqlite3.connect(new, isolation_level=None)) as database:
        database.execute("PRAGMA auto_vacuum=INCREMENTAL")
        database.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {SAMPLES_VERSION}; COMMIT")
    new.replace(path)
