"""What a pull brings: leased slots, their tensors and numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flowrt.wire.messages import Grant


@dataclass(frozen=True, slots=True)
class Batch:
    """Leased slots in issue order; slots of one group stand together.

    ``tensors[column][i]`` is the 1-D tensor of slot i (slots of a group share a group column's tensor), and
    ``inline[column][i]`` its number. ``closed`` says that nothing more will come: of this step for the train stage.
    """

    grant: Grant
    tensors: dict[str, list[torch.Tensor]]
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
    def flows(self) -> Sequence[str]:
        """The flow of each slot."""
        flows = self.grant.flows
        return flows if len(flows) != 1 else flows * len(self.grant.slots)

    @property
    def groups(self) -> Sequence[int]:
        return self.grant.groups

    def oldest_version(self, row: int) -> int:
        """The oldest policy version that made a token of this sample."""
        return min(self.grant.spans[row][::2])
