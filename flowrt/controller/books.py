"""The books of a run: what the mind says is written down, the ledger's part and the journal's together."""

from flowrt.controller.events import Command, Record, StepClosed
from flowrt.controller.journal import Journal
from flowrt.controller.ledger import Ledger
from flowrt.wire.messages import Report


class Books:
    """Entered as the run goes; `persist` makes them outlast the machine."""

    def __init__(self, ledger: Ledger, journal: Journal) -> None:
        self._ledger = ledger
        self._journal = journal

    def enter(self, command: Command, now: float) -> None:
        """Write down what has happened; commands that order something are none of our business."""
        match command:
            case Record():
                self._ledger.add(command, now)
                if command.state == "in_flight":
                    self._journal.training_began(now)
            case StepClosed():
                self._journal.step(command, now)

    def report(self, worker: str, role: str, report: Report, step: int) -> None:
        """What a worker did; its numbers are kept for whoever goes on with the run after ``step``."""
        self._journal.report(worker, role, report)
        for name, value in report.numbers:
            self._ledger.note(name, value, step)

    def persist(self) -> None:
        """Raises FlowError or OSError when the disk refuses."""
        self._ledger.persist()
        self._journal.persist()
