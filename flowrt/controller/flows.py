"""What follows from a dataflow: which stages a group goes through, which come after which, what each needs."""

from collections.abc import Iterable, Sequence

from flowrt.controller.slots import Group
from flowrt.wire.records import ITEM_BYTES, Column, Stage


class Flows:
    """Columns and stages by name, and what is asked of them for every slot."""

    def __init__(self, columns: Sequence[Column], stages: Sequence[Stage]) -> None:
        self.columns = {column.name: column for column in columns}
        self.item_bytes = {column.name: ITEM_BYTES[column.dtype] for column in columns}
        self.stages = {stage.name: stage for stage in stages}
        self.bits = {stage.name: 1 << index for index, stage in enumerate(stages)}
        self.after = {s.name: [t for t in stages if set(s.makes) & set(t.needs)] for s in stages}
        self.fetched = {s.name: [need for need in s.needs if need in self.columns] for s in stages}
        self.inline = {s.name: [need for need in s.needs if need not in self.columns] for s in stages}
        self._of: dict[str, tuple[list[Stage], int]] = {}

    def of(self, flow: str) -> list[Stage]:
        """The stages that groups of this flow go through."""
        return self._found(flow)[0]

    def all_bits(self, flow: str) -> int:
        """What `Slot.done` is when every stage of the flow is done."""
        return self._found(flow)[1]

    def complete(self, groups: Iterable[Group]) -> list[Group]:
        """Those of these groups of which every stage of their flow is done on every slot."""
        found = []
        flow, bits = "", 0
        for group in groups:
            if group.flow != flow:
                flow, bits = group.flow, self.all_bits(group.flow)
            for slot in group.slots:
                if slot.done != bits:
                    break
            else:
                found.append(group)
        return found

    def _found(self, flow: str) -> tuple[list[Stage], int]:
        found = self._of.get(flow)
        if found is None:
            stages = [stage for stage in self.stages.values() if stage.flow in ("", flow)]
            found = self._of[flow] = stages, sum(self.bits[stage.name] for stage in stages)
        return found
