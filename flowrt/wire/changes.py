"""The part of the protocol that is spoken when somebody comes, goes or comes back; `messages` joins it to the rest."""

from dataclasses import dataclass

from flowrt.wire.records import Column, Ints, Part, Position, Weights


@dataclass(slots=True)
class Hello:
    """worker: I am here."""

    protocol: int
    worker: str
    role: str
    host: str
    pid: int
    lanes: tuple[str, ...]  # what it can do, best first: "gloo", or "shm:PLACE" for what works in one place only
    term: int = 0  # of the controller that it was with, and all that it has is from then; 0: it is new


@dataclass(slots=True)
class Welcome:
    """controller: you are in; everything else you need to know is in here."""

    term: int  # grows each time the controller comes back
    heartbeat_s: float
    wait_s: float
    return_s: float  # how long to wait for a controller that went away
    lane_s: float  # a lane on which nothing moved for so long has failed
    lane_mb_per_s: float  # and so has one that moves less than this, once it has had so long
    store_bytes: int  # most bytes of tensors that a worker's store may hold; 0: no limit
    columns: tuple[Column, ...]
    renewable: tuple[str, ...]  # stages whose leases outlive the controller
    config: str  # the run's resolved configuration, TOML
    position: Position  # where the run goes on; only sources are told the prompts that are done with


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
