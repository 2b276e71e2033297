"""The books of a run: what the mind says is written down, the ledger's part and the journal's together.

They are patient with a lock, and final about a disk that refuses.
"""

import logging

from flowrt.controller.events import Command, Keep, Record, StepClosed
from flowrt.controller.journal import Journal
from flowrt.controller.ledger import Ledger, LedgerBusy
from flowrt.controller.tally import unfit
from flowrt.errors import FlowError
from flowrt.wire.gate import Complaints
from flowrt.wire.messages import Report

log = logging.getLogger(__name__)


class Books:
    """Entered as the run goes; `write` makes them outlast this process, or the machine."""

    def __init__(self, ledger: Ledger, journal: Journal) -> None:
        self._ledger = ledger
        self._journal = journal
        self._busy_since_s: float | None = None
        self._complaints = Complaints()

    def enter(self, command: Command, now: float) -> None:
        """Write down what has happened; commands that order something are none of our business."""
        match command:
            case Record():
                self._ledger.add(command, now)
                if command.state == "in_flight":
                    self._journal.training_began(now)
            case Keep(entry):
                self._ledger.keep(entry)
            case StepClosed():
                self._journal.step(command, now)

    def report(self, worker: str, role: str, report: Report, step: int) -> None:
        """What a worker did; its numbers are kept for whoever goes on with the run after ``step``."""
        numbers = report.numbers
        if fault := unfit(numbers, self._journal.numbers):
            self._complaints.say("left out the numbers that %s has reported: %s", worker, fault)
            numbers = ()
        self._journal.report(worker, role, report.spans, numbers)
        for name, value in numbers:
            self._ledger.note(name, value, step)

    def tidy(self, ended: bool = False) -> None:
        """Drop what no controller that comes back would need; of a run that has ended, that is all."""
        try:
            if ended:
                self._ledger.forget_walk()
            else:
                self._ledger.trim()
        except LedgerBusy:
            pass  # `write` knows for how long, and has the patience
        except FlowError as error:
            log.warning("%s; what is not needed any more stays there for now", error)

    def write(self, now: float, patience_s: float, lasting: bool = False) -> bool:
        """Commit what was entered (``lasting``: it outlasts the machine too); False while the ledger is locked.

        Raises FlowError or OSError when the disk refuses, or the lock is held for longer than ``patience_s`` seconds.
        """
        self._journal.check()
        try:
            if lasting:
                self._ledger.persist()
                self._journal.persist()
            else:
                self._ledger.commit()
        except LedgerBusy as error:
            since_s = self._busy_since_s = now if self._busy_since_s is None else self._busy_since_s
            if now - since_s < patience_s:
                return False
            raise FlowError(f"{error}, for {now - since_s:.0f} s; let go of it, and start again") from error
        self._busy_since_s = None
        return True
