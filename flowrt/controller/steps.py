"""The training window: which groups belong to the optimiser step in progress.

A step takes a fixed number of groups. Finished groups are taken oldest first, but places are kept for groups that
would be too old for the next step: whoever lets a fast answer take the place of a slow one drops slow answers,
and with them the long ones.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from flowrt.controller.admission import Admission
from flowrt.controller.batchers import Batcher
from flowrt.controller.slots import Group
from flowrt.ids import GroupId


@dataclass(slots=True)
class TrainingWindow:
    """State of the step in progress; ``waiting`` are the live groups that no trainer has taken."""

    groups_per_step: int
    steps: int
    in_order: bool  # take groups strictly in issue order (deterministic runs)
    step: int = 0
    taken: dict[GroupId, Group] = field(default_factory=dict)
    waiting: list[GroupId] = field(default_factory=list)
    exhausted: bool = False  # no further prompts will come
    changed: bool = False  # since whoever waits for something of it was last looked at

    @property
    def live(self) -> int:
        return len(self.taken) + len(self.waiting)

    @property
    def over(self) -> bool:
        """No step is left to train."""
        return self.step >= self.steps or (self.exhausted and self.live == 0)

    @property
    def quota(self) -> int:
        """Groups of this step; the last one may be smaller when the prompts run out."""
        return min(self.groups_per_step, self.live) if self.exhausted else self.groups_per_step

    @property
    def places(self) -> int:
        return self.quota - len(self.taken)

    def enough_opened(self) -> bool:
        """The live groups complete all remaining steps: no more prompts are needed."""
        return self.live >= (self.steps - self.step) * self.groups_per_step

    def enter(self, groups: Iterable[Group]) -> None:
        for group in groups:
            insort(self.waiting, group.id)
        self.changed = True

    def exhaust(self) -> None:
        """No further prompts will come."""
        self.exhausted = self.changed = True

    def leave(self, group: Group) -> None:
        """Out of the window: dropped."""
        self.changed = True
        if self.taken.pop(group.id, None) is None:
            del self.waiting[bisect_left(self.waiting, group.id)]

    def take(self, groups: Iterable[Group]) -> None:
        for group in groups:
            del self.waiting[bisect_left(self.waiting, group.id)]
            self.taken[group.id] = group
        self.changed = True

    def put_back(self, group: Group) -> None:
        if self.taken.pop(group.id, None) is not None:
            insort(self.waiting, group.id)
        self.changed = True

    def expected_step(self, group: Group) -> int:
        """The step that will train this group if everything ahead of it is trained first."""
        if group.id in self.taken:
            return self.step
        ahead = len(self.taken) + bisect_left(self.waiting, group.id)
        return self.step + ahead // self.groups_per_step

    def close(self) -> list[Group]:
        """The optimiser has stepped: hand over what was trained, begin the next step."""
        trained = list(self.taken.values())
        self.taken.clear()
        self.step += 1
        self.changed = True
        return trained

    def why(self, step: int, ready: int) -> str:
        """What a trainer waits for that works on ``step``, when so many groups are ready."""
        if step > self.step:
            return f"the end of step {self.step}"
        return f"a full micro-batch of step {self.step}: {ready} of {self.places} groups complete"

    def choose(
        self,
        ready: Iterable[Group],
        unready: Callable[[], Iterable[Group]],
        admission: Admission,
        batcher: Batcher,
        tokens_of: Callable[[Group], int],
    ) -> list[Group]:
        """The next micro-batch of this step; empty while it is not full yet."""

        def deadline(group: Group) -> int | None:
            """The last step that may train it, as far as steps ahead matter; None while nothing is generated."""
            oldest = group.oldest_version()
            if oldest is None:
                return None
            horizon = self.step + self.live // self.groups_per_step + 1
            return next((s for s in range(self.step, horizon) if not admission.may_train(s + 1, oldest)), None)

        ready = list(ready)
        if len(ready) < self.places and not self._full(ready, batcher, tokens_of):
            return []
        deadlines = {group.id: deadline(group) for group in [*ready, *unready()]}
        candidates = sorted(ready, key=lambda group: (deadlines[group.id] != self.step, group.id))
        if self.in_order:
            candidates = self._unbroken(candidates)
        chosen: list[Group] = []
        for group in candidates:
            if len(chosen) == self.places or self._full(chosen, batcher, tokens_of):
                break
            if self.in_order or self._leaves_room(group, chosen, deadlines):
                chosen.append(group)
        complete = len(chosen) == self.places or self._full(chosen, batcher, tokens_of)
        return chosen if complete else []

    @staticmethod
    def _full(groups: Sequence[Group], batcher: Batcher, tokens_of: Callable[[Group], int]) -> bool:
        return batcher.full(len(groups), sum(map(tokens_of, groups)), sum(len(group.slots) for group in groups))

    def _leaves_room(self, group: Group, chosen: list[Group], deadlines: dict[GroupId, int | None]) -> bool:
        """Whether all others can still be trained by their deadlines when this one takes a place of this step."""
        gone = {one.id for one in chosen} | {group.id}
        others = sorted(last for one, last in deadlines.items() if last is not None and one not in gone)
        mine = deadlines[group.id]
        free = self.places - len(gone)
        return all(
            rank <= free + (last - self.step) * self.groups_per_step
            for rank, last in enumerate(others, 1)
            if mine is None or last < mine
        )

    def _unbroken(self, candidates: list[Group]) -> list[Group]:
        """The candidates up to the first waiting group that is not ready."""
        by_id = {group.id: group for group in candidates}
        unbroken = []
        for group_id in self.waiting:
            if group_id not in by_id:
                break
            unbroken.append(by_id[group_id])
        return unbroken
