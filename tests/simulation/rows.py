"""Data of simulated workers: rows of grants, tensors by key, turns of lanes."""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from flowrt.protocol import messages as m
from flowrt.protocol.journals import SampleKey
from flowrt.protocol.messages import NO_VERSION, LaneTurn, Part, Weights
from tests.simulation.scenario import GROUP_COLUMNS, Scenario, leases_of

Key = tuple[str, int]
LaneId = tuple[str, str, str, int]
Packet = tuple[Part, ...] | Weights
"""The content of one turn of a lane: parts of samples, or a version of the weights."""
Turns = dict[LaneId, deque[tuple[LaneTurn, Packet]]]


@dataclass(frozen=True, slots=True)
class Row:
    """A leased slot; ``needs`` are the tensors that the work reads."""

    stage: str
    slot: int
    lease: int
    group: int
    member: int
    prompt: int
    epoch: int
    spans: tuple[int, ...]
    needs: tuple[Key, ...]
    exact: int = NO_VERSION
    attempt: int = 0
    kept: str = ""  # the journal that may have tokens of it


@dataclass(frozen=True, slots=True)
class Written:
    """What a simulated journal has of a sample."""

    spans: tuple[int, ...]
    is_complete: bool


@dataclass(slots=True)
class Job:
    """Rows that a worker processes together."""

    rows: list[Row]
    begun: int = -1  # the version that generation began with
    kept: Written | None = None  # what a journal has of its row


@dataclass(slots=True)
class Evaluation:
    """A group that the source has offered for an evaluation of one version."""

    source: str
    version: int
    members: int
    is_closed: bool = False  # the source was ordered to free its columns


@dataclass(slots=True)
class Shared:
    """The state that the workers of one simulation share."""

    scenario: Scenario
    rng: random.Random
    latest: Callable[[], int]  # the newest version that was published
    sent: Turns = field(default_factory=lambda: defaultdict(deque))
    broken: set[LaneId] = field(default_factory=set)
    broken_links: set[tuple[str, str]] = field(default_factory=set)  # pairs of workers all of whose lanes break
    evals_offered: int = 0
    contents: int = 0  # number of commits that made tensors
    payloads: dict[LaneTurn, dict[Key, int]] = field(default_factory=dict)  # contents of the tensors of a turn
    spans: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)  # of a response, by (content, slot)
    evaluations: dict[int, Evaluation] = field(default_factory=dict)  # of one version, by group
    answers: dict[int, dict[int, Row]] = field(default_factory=lambda: defaultdict(dict))  # by group and slot
    response_of: dict[tuple[int, int], int] = field(default_factory=dict)  # the response, by (content, slot)
    passed: dict[int, frozenset[int]] = field(default_factory=dict)  # prompts that need no further training, by epoch
    journals: dict[str, dict[SampleKey, Written]] = field(default_factory=lambda: defaultdict(dict))
    taken: Counter[str] = field(default_factory=Counter)  # kept samples that a worker took over, by what was kept


def lane_of(turn: LaneTurn) -> LaneId:
    return (turn.sender, turn.receiver, turn.kind, turn.incarnation)


def keys_of(parts: Iterable[Part]) -> dict[Key, int]:
    """The lengths of tensors by (column, id)."""
    return {(part.column, item): length for part in parts for item, length in zip(part.ids, part.lengths, strict=True)}


def rows_of(grant: m.Grant, stage: str) -> Iterator[Row]:
    """The leased slots of a grant; asserts that its columns have as many rows as it has slots."""
    ids = zip(grant.slots, leases_of(grant), grant.groups, grant.members, grant.prompts, grant.epochs, strict=True)
    assert len(grant.attempts) == len(grant.slots)
    assert len(grant.kept) in (0, len(grant.slots))
    assert len(grant.spans) in (0, len(grant.slots))
    assert all(len(values.values) == len(grant.slots) for values in grant.inline)
    granted = keys_of(grant.parts)
    count = len(grant.slots)
    for (slot, lease, group, member, prompt, epoch), spans, exact, attempt, kept in zip(
        ids,
        grant.spans or [()] * count,
        grant.exact or [NO_VERSION] * count,
        grant.attempts,
        grant.kept or [""] * count,
        strict=True,
    ):
        needs = tuple((part.column, group if part.column in GROUP_COLUMNS else slot) for part in grant.parts)
        assert all(need in granted for need in needs), f"grant of slot {slot} has no part for one of {needs}"
        yield Row(
            stage=stage,
            slot=slot,
            lease=lease,
            group=group,
            member=member,
            prompt=prompt,
            epoch=epoch,
            spans=spans,
            needs=needs,
            exact=exact,
            attempt=attempt,
            kept=kept,
        )
