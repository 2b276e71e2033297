"""Lookup tables of a dataflow: the stages of each flow, their order and columns, and the sizes of samples."""

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from flowrt.controller.state.slots import Group
from flowrt.protocol.messages import ITEM_BYTES, Column, Stage


class Sizes:
    """Sizes of samples in tokens."""

    def __init__(self, columns: Iterable[Column], token_columns: Iterable[str]) -> None:
        by_name = {column.name: column for column in columns}
        self._token_columns = [by_name[name] for name in token_columns]

    def tokens(self, group: Group) -> int:
        """Tokens of all samples of the group, prompts included."""
        tokens = 0
        for column in self._token_columns:
            if column.scope == "group":
                tokens += group.tensors[column.name].length * len(group.slots)
            else:
                tokens += sum(slot.tensors[column.name].length for slot in group.slots)
        return tokens


class Makes(NamedTuple):
    """The columns that a stage makes, sorted: tensor columns, and inline columns, which are part of the commit."""

    tensors: list[str]
    numbers: list[str]

    @classmethod
    def of(cls, stage: Stage, columns: Container[str]) -> "Makes":
        """The columns of a stage, given the names of all tensor columns."""
        names = sorted(stage.makes)
        return cls([name for name in names if name in columns], [name for name in names if name not in columns])


class Flows:
    """Columns and stages by name, and lookup tables of them.

    Attributes:
        bits: the bit of each stage in `Slot.done`.
        makes, makers: the columns that a stage makes, and the stage that makes a column.
        after: the stages that need a column which the stage makes.
        fetched, inline: the tensor columns and the inline columns that a stage needs. A worker that generates also
            fetches all other group columns: a generated sample is then complete without its source, which may die.
        named: the flows that stages name.
        of_groups: the stages that take whole groups.
    """

    def __init__(self, columns: Sequence[Column], stages: Sequence[Stage]) -> None:
        self.columns = {column.name: column for column in columns}
        self.item_bytes = {column.name: ITEM_BYTES[column.dtype] for column in columns}
        self.stages = {stage.name: stage for stage in stages}
        self.bits = {stage.name: 1 << index for index, stage in enumerate(stages)}
        self.makes = {stage.name: Makes.of(stage, self.columns) for stage in stages}
        self.makers = {column: stage.name for stage in stages for column in stage.makes}
        self.group_columns = {column.name: column for column in columns if column.scope == "group"}
        self.generating = [stage.name for stage in stages if stage.generates]
        self.after = {s.name: [t for t in stages if set(s.makes) & set(t.needs)] for s in stages}
        self.fetched = {s.name: [need for need in s.needs if need in self.columns] for s in stages}
        for name in self.generating:
            self.fetched[name] += [column for column in self.group_columns if column not in self.fetched[name]]
        self.inline = {s.name: [need for need in s.needs if need not in self.columns] for s in stages}
        self.named = sorted({stage.flow for stage in stages if stage.flow})
        self.of_groups = frozenset(stage.name for stage in stages if stage.whole_groups)
        self._of: dict[str, tuple[list[Stage], int]] = {}

    def is_known(self, flow: str) -> bool:
        """Whether a stage takes groups of this flow; if no stage names a flow, every flow is known."""
        return bool(flow) and (not self.named or flow in self.named)

    def of(self, flow: str) -> list[Stage]:
        """The stages that groups of this flow go through."""
        return self._found(flow)[0]

    def all_bits(self, flow: str) -> int:
        """The value of `Slot.done` when every stage of the flow is done."""
        return self._found(flow)[1]

    def undone_with(self, stage: str) -> list[str]:
        """The stage, and all stages that need its columns directly or indirectly: they are undone together."""
        names: dict[str, None] = {}
        pending = [stage]
        while pending:
            name = pending.pop()
            if name not in names:
                names[name] = None
                pending += [after.name for after in self.after[name]]
        return list(names)

    def undone_for_group(self, undone: Iterable[str]) -> list[str]:
        """The stages to undo for the other slots of a group when the stages ``undone`` are undone for one slot.

        A stage of whole groups is done for all slots of a group or for none, because its result depends on all.
        """
        return list(
            dict.fromkeys(name for stage in undone if stage in self.of_groups for name in self.undone_with(stage))
        )

    def complete(self, groups: Iterable[Group]) -> list[Group]:
        """The groups for all of whose slots every stage of their flow is done."""
        complete_groups = []
        flow, bits = "", 0
        for group in groups:
            if group.flow != flow:
                flow, bits = group.flow, self.all_bits(group.flow)
            for slot in group.slots:
                if slot.done != bits:
                    break
            else:
                complete_groups.append(group)
        return complete_groups

    def _found(self, flow: str) -> tuple[list[Stage], int]:
        stages_and_bits = self._of.get(flow)
        if stages_and_bits is None:
            stages = [stage for stage in self.stages.values() if stage.flow in ("", flow)]
            stages_and_bits = self._of[flow] = stages, sum(self.bits[stage.name] for stage in stages)
        return stages_and_bits
