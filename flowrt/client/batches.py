"""What a pull brings: leased slots, their tensors and numbers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from flowrt.transport.rows import Packed
from flowrt.wire.messages import Grant


class Columns(Mapping[str, list[torch.Tensor]]):
    """Tensor columns, a 1-D tensor for each slot; rows of a packed column are made when first asked for."""

    def __init__(self, columns: Mapping[str, Sequence[torch.Tensor] | Packed]) -> None:
        self._columns = dict(columns)
        self._rows: dict[str, list[torch.Tensor]] = {}

    def __getitem__(self, column: str) -> list[torch.Tensor]:
        if column not in self._rows:
            rows = self._columns[column]
            self._rows[column] = list(rows.rows() if isinstance(rows, Packed) else rows)
        return self._rows[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def packed(self, column: str) -> Packed:
        """All rows of a column end to end: as they arrived where they came together, else a copy."""
        rows = self._columns[column]
        if not isinstance(rows, Packed):
            rows = self._columns[column] = Packed(torch.cat(list(rows)), tuple(map(len, rows)))
        return rows


@dataclass(slots=True)  # not frozen: one is made for every pull, and that takes three times as long
class Batch:
    """Leased slots in issue order; slots of one group stand together.

    ``tensors[column][i]`` is the 1-D tensor of slot i (slots of a group share a group column's tensor),
    ``tensors.packed(column)`` all of them end to end, and ``inline[column][i]`` its number. ``closed`` says that
    nothing more will come: of this step for the train stage.
    """

    grant: Grant
    tensors: Columns
    inline: dict[str, list[float]]

    def __len__(self) -> int:
        return len(self.grant.slots)

    @property
    def closed(self) -> bool:
        return self.grant.closed

    @property
    def slots(self) -> Sequence[int]:
        return self.grant.slots

    @property
    def leases(self) -> Sequence[int]:
        """The lease on each slot, for `Session.commit`."""
        return (self.grant.lease,) * len(self.grant.slots)

    @property
    def refused(self) -> Sequence[int]:
        """Leases of earlier batches that this one's pull said were done, and that had ended before."""
        return self.grant.refused

    @property
    def flows(self) -> Sequence[str]:
        """The flow of each slot."""
        flows = self.grant.flows
        return flows if len(flows) != 1 else flows * len(self.grant.slots)

    @property
    def groups(self) -> Sequence[int]:
        return self.grant.groups

    def versions(self, row: int) -> torch.Tensor:
        """The policy version that made each token of this sample (int64)."""
        span = torch.tensor(self.grant.spans[row])
        return span[::2].repeat_interleave(span[1::2])

    def oldest_version(self, row: int) -> int:
        """The oldest policy version that made a token of this sample."""
        return min(self.grant.spans[row][::2])
