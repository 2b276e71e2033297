"""The part of the protocol that is spoken when somebody comes, goes or comes back; `messages` joins it to the rest."""

from dataclasses import dataclass

from flowrt.wire.records import Ints, Part, Weights


@dataclass(slots=True)
class Locate:
    """source: which prompts of this flow have been opened before? Asked by one that begins, perhaps not the first."""

    request: int
    flow: str


@dataclass(slots=True)
class Position:
    """controller: do not offer these again: runs of ``counts`` prompts from ``starts`` on, each of one epoch."""

    request: int
    epochs: Ints
    starts: Ints
    counts: Ints


@dataclass(slots=True)
class Drain:
    """observer: let this worker leave, with no sample lost; worker: I have to leave; controller: you are to leave."""

    request: int
    worker: str


@dataclass(slots=True)
class Renew:
    """worker, to a controller that has come back: I still work on these slots, under a lease of before."""

    lease: int
    stage: str
    step: int
    slots: Ints
    attempts: Ints


@dataclass(slots=True)
class Holds:
    """worker, to a controller that has come back: all that I still have. It has said everything else before."""

    parts: tuple[Part, ...]
    weights: tuple[Weights, ...]
