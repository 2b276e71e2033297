"""Tensors that were announced to the controller and are not this worker's to serve before it has said yes.

The yes is acted on where it is heard, not where the answer is awaited: the next message may already be the order to
serve these tensors, and whoever asked may have given up while the answer was on its way.
"""

from collections.abc import Mapping, Sequence

from flowrt.errors import LocalProtocolError
from flowrt.transport.rows import Packed
from flowrt.transport.store import Rows, TensorStore

Columns = Mapping[str, Rows]


class Promised:
    """The columns of offers and commits that are not answered yet, by request."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._offers: dict[int, Columns] = {}
        self._commits: dict[int, tuple[Sequence[int], Columns]] = {}

    def offer(self, request: int, columns: Columns) -> None:
        """These come with an offer, a row a prompt. Raises LocalProtocolError when a column does not take one."""
        if columns:
            self._check(columns)
            self._offers[request] = columns

    def commit(self, request: int, slots: Sequence[int], columns: Columns) -> None:
        """These come with a commit, a row a slot. Raises LocalProtocolError when a column does not take one."""
        self._check(columns)
        for column, rows in columns.items():
            if len(rows) != len(slots):
                raise LocalProtocolError(f"column {column!r} has {len(rows)} rows for {len(slots)} slots")
        self._commits[request] = slots, columns

    def _check(self, columns: Columns) -> None:
        for column, rows in columns.items():
            self._store.check(column, rows)
        self._store.check_room(columns)

    def opened(self, request: int, first: int) -> None:
        """The offer is open: its prompts are the groups from ``first`` on (none when it is negative)."""
        for column, rows in self._offers.pop(request, {}).items() if first >= 0 else ():
            self._store.put_rows(column, range(first, first + len(rows)), rows, promised=True)

    def committed(self, request: int, refused: Sequence[int]) -> None:
        """The commit is accepted; what was refused leaves alone what this worker may have of these slots."""
        slots, columns = self._commits.pop(request, ((), {}))
        void = set(refused)
        kept = [row for row, slot in enumerate(slots) if slot not in void]
        for column, rows in columns.items():
            if len(kept) == len(rows):
                self._store.put_rows(column, slots, rows, promised=True)
            elif kept:
                single = rows.rows() if isinstance(rows, Packed) else rows
                self._store.put_rows(column, [slots[row] for row in kept], [single[row] for row in kept], promised=True)

    def refused(self, request: int) -> None:
        """Nothing of it is needed."""
        self._offers.pop(request, None)
        self._commits.pop(request, None)
