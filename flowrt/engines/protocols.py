"""What a rollout engine and a training engine must be able to do; bring your own by having these methods."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from flowrt.transport.weights import Snapshot


@dataclass(frozen=True, slots=True)
class Prompt:
    """One sequence to generate; ``key`` is the caller's and comes back with the result."""

    key: int
    tokens: torch.Tensor  # [L] int32
    seed: int
    greedy: bool = False


@dataclass(frozen=True, slots=True)
class Response:
    """One generated sequence: tokens [T] int32, their log-probabilities [T] float32 at the sampling temperature.

    ``spans`` are (version, tokens) pairs, flattened: which weights made how many of the tokens.
    """

    key: int
    tokens: torch.Tensor
    logprobs: torch.Tensor
    spans: tuple[int, ...]


class Interrupt(Protocol):
    """Set by another thread when the engine should come back early (threading.Event has this)."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most ``timeout`` seconds; returns whether it is."""
        ...


class RolloutEngine(Protocol):
    """Generates, many sequences at a time; used from one thread at a time."""

    @property
    def room(self) -> int:
        """How many more sequences it would take now."""
        ...

    @property
    def running(self) -> int:
        """Sequences begun and not finished."""
        ...

    def add(self, prompts: Sequence[Prompt]) -> None: ...

    def run(self, interrupt: Interrupt) -> list[Response]:
        """Generate until some sequence finishes or the interrupt is set; returns what finished."""
        ...

    def swap(self, snapshot: Snapshot) -> None:
        """Use these weights from now on.

        Called while nothing is running, unless the worker was told to swap in flight: such an engine goes on with what
        it has begun, and each response's spans tell which of its tokens were made by which weights. An engine may have
        a method ``prepare(snapshot)`` for that: called between two runs, it returns work to be done on another thread
        beside the next ones, and is asked again after that; None when it is time to swap.
        """
        ...


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A micro-batch of N samples; lists hold one 1-D tensor a sample."""

    prompts: Sequence[torch.Tensor]
    responses: Sequence[torch.Tensor]
    rollout_logprobs: Sequence[torch.Tensor]
    reference_logprobs: Sequence[torch.Tensor] | None
    advantages_N: torch.Tensor
    weights_N: torch.Tensor  # how much each sample counts
    ages: Sequence[torch.Tensor] | None = None  # of each response token: versions between what made it and what trains


class TrainEngine(Protocol):
    """Trains; the gradient must not depend on how a step's samples are cut into micro-batches or ranks.

    With several ranks each has an engine, and all methods but `accumulate` are called on all of them, in one order.
    """

    def accumulate(self, batch: TrainingBatch) -> None:
        """Add the gradient of the *sum* of the batch's token losses."""
        ...

    def step(self) -> dict[str, float]:
        """Divide by the step's global token count, update; returns metrics. A step without tokens changes nothing."""
        ...

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The weights to publish, by name, in a fixed order; only those of rank 0 are looked at."""
        ...

    def save(self, directory: Path) -> None:
        """Write all that the next steps depend on into a directory that exists: weights, optimiser, RNG, step count.

        All ranks call it together. When it returns on rank 0, what every rank had to write is there.
        """
        ...

    def load(self, directory: Path) -> None:
        """Take up what `save` wrote; the steps that follow are those that would have followed, bit for bit.

        All ranks call it together. Raises EngineError when the directory holds no state of this model.
        """
        ...

    def discard(self) -> None:
        """Forget the gradient that was accumulated for the present step."""
        ...

    def export(self, directory: Path) -> None:
        """Write the model into a new directory, where `from_pretrained` finds it; rank 0 writes."""
        ...
