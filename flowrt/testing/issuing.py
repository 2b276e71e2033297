"""Groups and slots without a board, numbered in order of issue as the board does."""

from dataclasses import dataclass

from flowrt.controller.slots import Group, Slot
from flowrt.ids import GroupId, SlotId


@dataclass(slots=True)
class Issuing:
    """What the next group and the next slot are called."""

    groups: int = 0
    slots: int = 0

    def group(self, members: int = 1, prompt: int = 0, epoch: int = 0) -> Group:
        """A new group and its slots."""
        group = Group(GroupId(self.groups), "train", prompt, epoch, 0)
        self.groups += 1
        group.slots = [Slot(SlotId(self.slots + member), group, member) for member in range(members)]
        self.slots += members
        return group

    def many(self, groups: int, members: int = 1) -> list[Slot]:
        """The slots of so many new groups, each of a prompt of its own."""
        return [slot for _ in range(groups) for slot in self.group(members, prompt=self.groups).slots]
