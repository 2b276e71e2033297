"""How large samples are: tokens that a trainer works on, bytes that need not be moved."""

from collections.abc import Iterable

from flowrt.controller.slots import Group, Slot
from flowrt.ids import WorkerId
from flowrt.wire.records import ITEM_BYTES, Column


class Sizes:
    """Sizes by the columns of a dataflow."""

    def __init__(self, columns: Iterable[Column], token_columns: Iterable[str]) -> None:
        self._columns = {column.name: column for column in columns}
        self._token_columns = [self._columns[name] for name in token_columns]

    def tokens(self, group: Group) -> int:
        """Tokens of all samples of the group, prompts included."""
        tokens = 0
        for column in self._token_columns:
            if column.scope == "group":
                tokens += group.tensors[column.name].length * len(group.slots)
            else:
                tokens += sum(slot.tensors[column.name].length for slot in group.slots)
        return tokens

    def held_bytes(self, slot: Slot, columns: Iterable[str], worker: WorkerId) -> int:
        """Of these columns of a slot, the bytes that the worker has or is being sent."""
        held = 0
        for name in columns:
            holding = slot.holding(name)
            if holding is not None and worker in holding.holders:
                held += holding.length * ITEM_BYTES[self._columns[name].dtype]
        return held
