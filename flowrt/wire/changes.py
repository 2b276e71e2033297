"""The part of the protocol that is spoken when somebody comes, goes or comes back; `messages` joins it to the rest."""

from dataclasses import dataclass

from flowrt.wire.records import Ints, Part, Weights


@dataclass(slots=True)
class Finished:
    """worker: my part of the run is complete."""


@dataclass(slots=True)
class Bye:
    """worker: leaving; ``error`` is empty when all is well."""

    error: str


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
