"""The groups that are ready for a stage of whole groups, in order of issue, by the oldest version of their samples.

The oldest version and the number of tokens of a group do not change while it is ready. A group that loses a sample is
added again.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping

from flowrt.controller.state.slots import Group
from flowrt.ids import GroupId

TokensOf = Callable[[Group], int]


class ReadyGroups:
    """Ready groups by number. Reading the first k in order costs O(k), however many are ready."""

    def __init__(self, groups: Iterable[Group] = ()) -> None:
        self._groups: dict[GroupId, Group] = {}
        self._version: dict[GroupId, int | None] = {}
        self._by_version: dict[int | None, list[GroupId]] = {}
        self._sizes: dict[GroupId, tuple[int, int]] = {}  # tokens and rows of the groups that the totals count
        self._uncounted: dict[GroupId, None] = {}
        self._rows = self._total = 0
        self.add(groups)

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group: object) -> bool:
        return group in self._groups

    def __iter__(self) -> Iterator[GroupId]:
        return iter(self._groups)

    def __getitem__(self, group: GroupId) -> Group:
        return self._groups[group]

    @property
    def by_version(self) -> Mapping[int | None, list[GroupId]]:
        """The numbers of the groups, ascending, by the oldest version of their samples."""
        return self._by_version

    def values(self) -> Iterable[Group]:
        return self._groups.values()

    def in_order(self) -> Iterator[Group]:
        """The groups in order of issue."""
        return map(self._groups.__getitem__, heapq.merge(*self._by_version.values()))

    def version(self, group: GroupId) -> int | None:
        """The oldest version of the samples of a group; None if none is generated."""
        return self._version[group]

    def tokens(self, group: GroupId, tokens_of: TokensOf) -> int:
        """The tokens of a group."""
        if group in self._uncounted:
            self._count(group, tokens_of)
        return self._sizes[group][0]

    def totals(self, tokens_of: TokensOf) -> tuple[int, int]:
        """The tokens and the rows of all groups."""
        for group in list(self._uncounted):
            self._count(group, tokens_of)
        return self._total, self._rows

    def add(self, groups: Iterable[Group]) -> None:
        """Add groups that have become ready; those that are ready already are counted again."""
        for group in groups:
            self.discard(group.id)
            version = self._version[group.id] = group.oldest_version()
            self._groups[group.id] = group
            self._uncounted[group.id] = None
            same = self._by_version.get(version)
            if same is None:
                self._by_version[version] = [group.id]
            else:
                insort(same, group.id)

    def discard(self, group: GroupId) -> None:
        """Remove a group that is no longer ready, if it was."""
        if self._groups.pop(group, None) is None:
            return
        version = self._version.pop(group)
        same = self._by_version[version]
        del same[bisect_left(same, group)]
        if not same:
            del self._by_version[version]
        if group in self._uncounted:
            del self._uncounted[group]
        else:
            tokens, rows = self._sizes.pop(group)
            self._total -= tokens
            self._rows -= rows

    def _count(self, number: GroupId, tokens_of: TokensOf) -> None:
        del self._uncounted[number]
        group = self._groups[number]
        tokens, rows = self._sizes[number] = tokens_of(group), len(group.slots)
        self._total += tokens
        self._rows += rows
