"""Samples of an earlier start of the run that journals have, until their prompts are opened again."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from flowrt.controller.state.slots import Group, Kept

TOO_OLD = "older than the staleness bound"
"""Why a kept sample is discarded: no step could train it within the bound."""


@dataclass(frozen=True, slots=True)
class KeptSample:
    """A sample that a journal has, complete or in part, and that may still be trained."""

    epoch: int
    prompt: int
    member: int
    oldest: int
    """The oldest version that generated a token of it."""
    journal: str


@dataclass(slots=True)
class KeptSamples:
    """The kept samples by prompt, and how many were discarded since, by reason."""

    discarded: Counter[str] = field(default_factory=Counter)
    _of: dict[tuple[int, int], dict[int, Kept]] = field(default_factory=dict)

    def add(self, samples: Iterable[KeptSample]) -> None:
        """Add what was found when the run was resumed."""
        for sample in samples:
            self._of.setdefault((sample.epoch, sample.prompt), {})[sample.member] = Kept(
                (sample.journal,), sample.oldest
            )

    def attach(self, groups: Iterable[Group]) -> None:
        """Move the samples of the prompts of these groups, which are opened, to the groups."""
        if not self._of:
            return
        for group in groups:
            if kept := self._of.pop((group.epoch, group.prompt), None):
                # A later attempt at a sample has another seed.
                first = [slot.member for slot in group.slots if not slot.attempt]
                group.kept = {member: kept[member] for member in first if member in kept}

    def put_back(self, group: Group) -> None:
        """Take back the samples of a group that is closed, and whose prompt is to be offered again."""
        if kept := {slot.member: group.kept[slot.member] for slot in group.slots if slot.has_kept and not slot.attempt}:
            self._of[group.epoch, group.prompt] = kept
