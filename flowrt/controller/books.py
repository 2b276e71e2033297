"""The files that a run is told by, written together: patient with a lock, final about a disk that refuses."""

from flowrt.controller.journal import Journal
from flowrt.controller.ledger import Ledger, LedgerBusy
from flowrt.errors import FlowError


class Books:
    """The ledger and the journal of one run."""

    def __init__(self, ledger: Ledger, journal: Journal) -> None:
        self._ledger = ledger
        self._journal = journal
        self._busy_since_s: float | None = None

    def write(self, now: float, patience_s: float) -> bool:
        """Make what was recorded durable; False while another process has the ledger locked.

        Raises FlowError when a file cannot be written, or was locked for longer than ``patience_s`` seconds.
        """
        self._journal.check()
        try:
            self._ledger.commit()
        except LedgerBusy as error:
            since_s = self._busy_since_s = now if self._busy_since_s is None else self._busy_since_s
            if now - since_s < patience_s:
                return False
            raise FlowError(f"{error}, for {now - since_s:.0f} s; let go of it, and start again") from error
        self._busy_since_s = None
        return True
