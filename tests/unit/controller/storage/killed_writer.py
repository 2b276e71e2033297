"""A process that kills itself while it writes a transaction to a ledger that exceeds SQLite's cache."""

import os
import signal
import sys
from pathlib import Path

from flowrt.controller.events import AppendLedger
from flowrt.controller.storage.ledger import Ledger

PROMPTS = 1000
REASON = "a reason of the length that the names of workers and stages give it in a run of some size " * 4


def main() -> None:
    ledger = Ledger(Path(sys.argv[1]))
    for prompt in range(PROMPTS):
        ledger.add(AppendLedger(prompt, 0, "trained", 0), 1.0)
        if prompt % 100 == 99:
            ledger.flush()
    ledger._db.execute("BEGIN IMMEDIATE")
    for _ in range(2):  # the second time overwrites frames of the log
        ledger._db.executemany(
            "INSERT OR REPLACE INTO prompts (at_s, epoch, prompt, state, step, reason) VALUES (0, ?, ?, ?, 0, ?)",
            ((1 + prompt % 50, prompt * 7919 % 20_000, "in_flight", REASON) for prompt in range(20_000)),
        )
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
