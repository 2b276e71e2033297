"""Result of a pull: leased slots with their tensors and inline values."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from flowrt.protocol.messages import Grant
from flowrt.transport.samples.row_blocks import Packed


class Columns(Mapping[str, list[torch.Tensor]]):
    """Tensor columns, one 1-D tensor for each slot; rows of a packed column are created on first access."""

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
        """All rows of a column in one flat tensor: without a copy if they arrived together."""
        rows = self._columns[column]
        if not isinstance(rows, Packed):
            rows = self._columns[column] = Packed(torch.cat(list(rows)), tuple(map(len, rows)))
        return rows


class Numbers(dict[str, list[float]]):
    """Inline columns, a number for each slot."""

    def __missing__(self, column: str) -> list[float]:
        there_is = ", ".join(map(repr, self)) or "none"
        raise KeyError(
            f"the batch has no numbers {column!r}; there is {there_is}: a stage receives the columns and tags of its "
            "needs"
        )


@dataclass(slots=True)  # not frozen: construction of a frozen one takes three times as long
class Batch:
    """Leased slots in issue order; slots of one group are adjacent.

    Example:
        batch = await session.pull("reward", slots=8)
        for row, response in enumerate(batch.tensors["response"]):
            print(batch.slots[row], response, batch.inline["length"][row])
    """

    grant: Grant
    tensors: Columns
    """``tensors[column][row]`` is a 1-D tensor; slots of a group share the tensor of a group column."""
    inline: Numbers
    """``inline[column][row]`` is a number."""

    def __len__(self) -> int:
        return len(self.grant.slots)

    @property
    def closed(self) -> bool:
        """Whether no more slots will be ready: of this step (train stage), or of the stream."""
        return self.grant.closed

    @property
    def slots(self) -> Sequence[int]:
        """The leased slots; row r of the columns belongs to ``slots[r]``."""
        return self.grant.slots

    @property
    def leases(self) -> Sequence[int]:
        """The lease on each slot, for `Session.commit`."""
        return (self.grant.lease,) * len(self.grant.slots)

    @property
    def refused(self) -> Sequence[int]:
        """Leases of the batch that the pull reported as done, if they had ended before; its slots are granted again."""
        return self.grant.refused

    @property
    def flows(self) -> Sequence[str]:
        """The flow of each slot."""
        flows = self.grant.flows
        return flows if len(flows) != 1 else flows * len(self.grant.slots)

    @property
    def groups(self) -> Sequence[int]:
        """The group of each slot."""
        return self.grant.groups

    def versions(self, row: int) -> torch.Tensor:
        """The policy version that generated each response token of a row (1-D, int64)."""
        span = torch.tensor(self.grant.spans[row])
        return span[::2].repeat_interleave(span[1::2])

    def oldest_version(self, row: int) -> int:
        """The oldest policy version that generated a token of a row."""
        return min(self.grant.spans[row][::2])
