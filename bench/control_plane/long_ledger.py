"""A ledger of many prompt-epochs: how long a controller needs to start on it, and to read its summary.

``ledger_10m_start_s``: what a restarted controller does with the ledger before it listens, and the welcome of a new
source; ``ledger_10m_summary_s``: the account of the summary; ``ledger_10m_rss_mb``: memory that both add.
Each measurement is made in a process of its own, with the file in the page cache.
"""

import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from common.memory import status_bytes

from flowrt.controller.storage.integrity import LEDGER, check_not_behind_checkpoint
from flowrt.controller.storage.ledger import Ledger
from flowrt.protocol.messages import pack, unpack

PROMPTS = 10_000_000
EPOCHS = 10
IN_STEP = 512
# As the ledger writes it, but in few statements: through `Ledger.add` it takes half an hour.
_NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :prompts) "
_EVENTS = (
    _NUMBERS + "INSERT INTO events (at_s, epoch, prompt, state, step, reason, reward) "
    "SELECT i, i / :of_epoch, i % :of_epoch, state, i / :in_step, '', iif(state = 'trained', 0.5, NULL) "
    "FROM n CROSS JOIN (SELECT 'in_flight' AS state UNION ALL VALUES ('ready'), ('leased'), ('trained'))"
)
_PROMPTS = (
    "INSERT INTO prompts (epoch, prompt, state, step, reason, reward, at_s) "
    "SELECT epoch, prompt, state, step, reason, reward, at_s FROM events WHERE state = 'trained'"
)
_STEPS = _NUMBERS + "INSERT INTO steps SELECT i, '{}' FROM n WHERE i <= (:prompts - 1) / :in_step"


def write(path: Path, prompts: int) -> int:
    """Write a ledger of this many trained prompt-epochs; returns the number of its steps."""
    ledger = Ledger(path)
    ledger.resume(0, 0.0)
    ledger.close()
    values = {"prompts": prompts, "of_epoch": prompts // EPOCHS, "in_step": IN_STEP}
    with closing(sqlite3.connect(path)) as database:
        for statement in (_EVENTS, _PROMPTS, _STEPS):
            database.execute(statement, values)
        for epoch in range(EPOCHS):
            [passed] = pack((epoch, prompt) for prompt in range(values["of_epoch"]))
            rows = [(epoch, word, bits, 0, 0, bits, 0) for word, bits in enumerate(passed.words)]
            database.executemany("INSERT INTO prompt_words VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        database.commit()
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return (prompts - 1) // IN_STEP + 1


def start(path: str, steps: int) -> dict[str, float]:
    """In a process of its own: the times of a start and a summary, and the memory that they add."""
    before = status_bytes("VmRSS")
    begin_s = time.perf_counter()
    check_not_behind_checkpoint(Path(path), steps, require_intact_wal=True)
    ledger = Ledger(Path(path))
    ledger.recover()
    ledger.step_lines(steps)
    position = ledger.resume(steps, 0.0)
    consumed = unpack(position.passed)
    ledger.passed()
    start_s = time.perf_counter() - begin_s
    begin_s = time.perf_counter()
    account = ledger.account(())
    summary_s = time.perf_counter() - begin_s
    after = status_bytes("VmRSS")
    assert sum(map(len, consumed.values())) == account.states["trained"]
    assert (account.lost, account.trained_twice) == (0, 0)
    ledger.close()
    return {"start_s": start_s, "summary_s": summary_s, "rss_mb": (after - before) / 1e6}


@contextmanager
def written(prompts: int = PROMPTS) -> Iterator[tuple[str, int]]:
    """The path of a ledger of this many prompt-epochs, and the number of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / LEDGER
        yield str(path), write(path, prompts)
