"""Protocols of rollout and training engines, and the records they exchange with the roles.

A custom engine is any class with these methods. Shapes: N samples, L tokens of a prompt, T tokens of a response.
"""

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from flowrt.algorithms.algorithm import Groups
from flowrt.algorithms.support import Support, join_supports
from flowrt.engines.options import SamplingOptions
from flowrt.protocol.resources import EngineUse
from flowrt.transport.weights.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first tokens of a sequence that was not completed.

    Attributes:
        tokens: [T] int32, T >= 1, on the CPU.
        logprobs: [T] float32, as `Response.logprobs`.
        spans: (version, count) pairs, flattened, whose counts sum to T.
        support: as `Response.support`.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    spans: tuple[int, ...]
    support: Support | None = None

    def after(self, start: int) -> "NewTokens":
        """What follows the first ``start`` tokens; a copy, unless that is all."""
        support = self.support
        if start:
            support = None if support is None else join_supports([support.suffix(start)])  # a copy
            return NewTokens(start, self.tokens[start:].clone(), self.logprobs[start:].clone(), self.spans, support)
        return NewTokens(0, self.tokens, self.logprobs, self.spans, support)


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The tokens of a sequence from token ``start`` on.

    Attributes:
        start: number of tokens before these.
        tokens: [T] int32, on the CPU.
        logprobs: [T] float32, as `Response.logprobs`.
        spans: of all tokens of the sequence, as `Prefix.spans`: their counts sum to start + T.
        support: of these tokens, as `Response.support`.
    """

    start: int
    tokens: torch.Tensor
    logprobs: torch.Tensor
    spans: tuple[int, ...]
    support: Support | None = None

    @property
    def end(self) -> int:
        """Number of tokens up to the last of these."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One sequence to generate.

    Attributes:
        key: identifier chosen by the caller, returned with the response; unique among running sequences.
        tokens: [L] int32, on the CPU.
        seed: of the sample's random numbers, in [0, 2^63).
        greedy: take the most likely token instead of sampling.
        sampling: how its tokens are drawn; None: with the engine's own options.
        max_new_tokens: maximum length of its response, up to the engine's; 0: the engine's.
        prefix: tokens of the response that were generated before, to an engine that `ContinuesSequences`. The response
            begins with them. Token number t of a response is drawn with random number t of the seed, as without one.
    """

    key: int
    tokens: torch.Tensor
    seed: int
    greedy: bool = False
    sampling: SamplingOptions | None = None
    prefix: Prefix | None = None
    max_new_tokens: int = 0


def sample_seed(run_seed: int, prompt: int, epoch: int, member: int, attempt: int) -> int:
    """The seed of a sample, in [0, 2^63): the same on any worker, in any order, after any restart."""
    key = struct.pack("<5q", run_seed, prompt, epoch, member, attempt)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True, slots=True)
class Response:
    """One generated sequence.

    Attributes:
        key: `Prompt.key`.
        tokens: [T] int32, T >= 1, including the token that ended the sequence.
        logprobs: [T] float32, log-probabilities in nats under the distribution that was drawn from: at the sampling
            temperature, and renormalised over ``support`` if there is one, except for responses that are not trained
            (greedy, or with `Prompt.sampling`).
        spans: (version, count) pairs, flattened: the weight version that generated each run of tokens. The counts sum
            to T.
        truncated: whether it was cut at the length limit; otherwise a stop token or a stop string ended it.
        support: the tokens that could be drawn; None if all could be (no top-k, top-p or min-p).
    """

    key: int
    tokens: torch.Tensor
    logprobs: torch.Tensor
    spans: tuple[int, ...]
    truncated: bool
    support: Support | None = None


class Interrupt(Protocol):
    """A flag that another thread sets to make the engine return early; `threading.Event` satisfies it."""

    def is_set(self) -> bool:
        """Whether the flag is set."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, at most ``timeout`` seconds. Returns whether it is set."""
        ...


class RolloutEngine(Protocol):
    """Generates many sequences at a time. Called from one thread at a time."""

    @property
    def room(self) -> int:
        """Number of sequences that `add` accepts now; 0 while the engine cannot start any."""
        ...

    @property
    def running(self) -> int:
        """Number of sequences that were added and not yet returned by `run`."""
        ...

    def add(self, prompts: Sequence[Prompt]) -> None:
        """Start sequences. Whether they advance only inside `run`, or also between its calls, is up to the engine.

        Args:
            prompts: at most `room`.

        Raises:
            EngineError: if there are more prompts than `room`.
        """
        ...

    def run(self, interrupt: Interrupt) -> list[Response]:
        """Generate until at least one sequence finishes, none is running, or the interrupt is set.

        Args:
            interrupt: checked at least after every decode step, so that the call returns soon after it is set.

        Returns:
            The finished sequences; empty if interrupted before any finished.

        Raises:
            EngineError: if the engine failed and cannot continue.
        """
        ...

    def swap(self, snapshot: Snapshot) -> None:
        """Generate with these weights from now on.

        Without in-flight updates `swap` is called only while no sequence is running. With them, running sequences
        continue with the new weights, and the spans of their responses record which version generated which tokens.

        Args:
            snapshot: the parameters in their published order and dtype, and their version.

        Raises:
            EngineError: if the weights cannot be loaded, or sequences are running and the engine does not support it.
            TransferError: if the snapshot is of a model with other parameters.
        """
        ...


@runtime_checkable
class SupportsInFlightUpdate(Protocol):
    """Optional method of a rollout engine: work that shortens an in-flight weight update, done while it generates."""

    def prepare(self, snapshot: Snapshot) -> Callable[[], None] | None:
        """The next piece of background work before `swap`. Called between two calls of `run`.

        The caller runs the work on another thread, concurrently with further calls of `run` and `add`, and calls
        `prepare` again when it is complete.

        Args:
            snapshot: the weights that `swap` is going to be called with.

        Returns:
            The work, or None if it is time to swap. The work raises EngineError if it fails.

        Raises:
            EngineError: if the engine failed and cannot continue.
        """
        ...


@runtime_checkable
class ContinuesSequences(Protocol):
    """Optional method of a rollout engine that continues sequences from `Prompt.prefix`."""

    def new_tokens(self, starts: Mapping[int, int]) -> dict[int, NewTokens]:
        """What is generated of the running sequences from these tokens on, by key. Called between two calls of `run`.

        Its cost is that of the new tokens: it is called at each `rollout.journal_s`, and sequences are long. Sequences
        without new tokens are left out. The sequences go on.

        Args:
            starts: number of tokens that the caller has already, by key; 0 for keys that are not in it.

        Raises:
            EngineError: if the engine failed and cannot continue.
        """
        ...


@runtime_checkable
class ReportsUse(Protocol):
    """Optional method of a rollout engine that knows what it has generated, and how full its cache is."""

    def use(self) -> EngineUse:
        """What the engine has done, and what it has in use. Called at any time, on any thread; returns at once."""
        ...


@runtime_checkable
class ExternalEngine(Protocol):
    """Optional methods of a rollout engine that generates in a process of its own."""

    def start(self) -> None:
        """Start or find the process; returns when it can generate. Called once, before all other methods.

        Raises:
            EngineError: if it did not start in time.
        """
        ...

    def close(self) -> None:
        """End the process if this engine started it. Calls of this engine that wait on other threads end or raise."""
        ...


@runtime_checkable
class AppliesSupports(Protocol):
    """Optional attribute of a training engine, set on its class; without it truncated sampling is refused."""

    applies_supports: bool
    """Whether `TrainingBatch.supports` is applied: log-probabilities are over the tokens that could be drawn."""


@dataclass(slots=True)
class Capture:
    """Numbers of a trained sample that is stored (`flowrt samples`); a training engine may fill them in.

    Attributes:
        advantage: overwritten by the engine if the algorithm's credit has scope "step".
        logprobs_T: [T] on the CPU, in nats, under the policy before the step, or, if the engine does not compute
            these, the policy of the first pass over the sample; None if the engine records none.
    """

    advantage: float
    logprobs_T: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A micro-batch of N samples on the CPU. L and T differ from sample to sample.

    Attributes:
        prompts: N tensors [L] int32.
        responses: N tensors [T] int32; T may be less than was generated, if the step is cut to a number of tokens.
        rollout_logprobs: N tensors [T] float32, in nats, under the weights that generated the tokens.
        reference_logprobs: N tensors [T] float32, in nats, under the reference model; None without a KL term.
        advantages_N: [N] float32, one for all tokens of a sample.
        weights_N: [N] float32, factor of a sample's policy loss; 1 unless `algorithm.staleness_weight` is set.
        groups_N: [N] int64, group of each sample; all samples of a group are in one batch.
        ages: N tensors [T] int64, staleness of each token in versions: version being trained minus version that
            generated it; None: divergence by staleness is not measured.
        credit: the arguments of `Algorithm.credit` for these N samples. Given if the algorithm has scope "step": the
            engine then computes the advantages at the end of the step, in place of `advantages_N`.
        supports: the tokens that could be drawn at each position of each sample, over which the policy's
            log-probabilities are to be renormalised (`flowrt.algorithms.support`); None: all tokens could be.
        captures: records of the samples that are stored, None for a sample that is not; None: no sample is stored.
    """

    prompts: Sequence[torch.Tensor]
    responses: Sequence[torch.Tensor]
    rollout_logprobs: Sequence[torch.Tensor]
    reference_logprobs: Sequence[torch.Tensor] | None
    advantages_N: torch.Tensor
    weights_N: torch.Tensor
    groups_N: torch.Tensor
    ages: Sequence[torch.Tensor] | None = None
    credit: Groups | None = None
    supports: Sequence[Support] | None = None
    captures: Sequence[Capture | None] | None = None

    @classmethod
    def joined(cls, batches: Sequence["TrainingBatch"]) -> "TrainingBatch":
        """The samples of all batches. Raises ValueError if a column is in some of them only."""
        if not batches:
            none = torch.zeros(0)
            return cls([], [], [], None, none, none, none.long())
        return cls(**_joined_columns(batches))

    def only(self, rows: Sequence[int]) -> "TrainingBatch":
        """The samples of these rows, without `credit`, whose arguments are of all samples."""
        chosen: dict[str, Any] = {}
        for name, column in _columns(self).items():
            if name == "credit" or column is None:
                chosen[name] = None
            else:
                chosen[name] = column[list(rows)] if isinstance(column, torch.Tensor) else [column[row] for row in rows]
        return TrainingBatch(**chosen)


def _columns(table: TrainingBatch | Groups) -> dict[str, Any]:
    return {field.name: getattr(table, field.name) for field in fields(table)}


def _joined_columns(tables: Sequence[TrainingBatch] | Sequence[Groups]) -> dict[str, Any]:
    """The columns of all tables, one after the other. Raises ValueError if a column is in some of them only."""
    joined: dict[str, Any] = {}
    for name in _columns(tables[0]):
        parts = [part for table in tables if (part := getattr(table, name)) is not None]
        if 0 < len(parts) < len(tables):
            raise ValueError(f"{len(parts)} of {len(tables)} micro-batches have {name}; give it with all or with none")
        if not parts:
            joined[name] = None
        elif isinstance(parts[0], Groups):
            joined[name] = Groups(**_joined_columns(parts))
        elif isinstance(parts[0], torch.Tensor):
            joined[name] = torch.cat(parts)
        else:
            joined[name] = [value for part in parts for value in part]
    return joined


class TrainEngine(Protocol):
    """Trains a policy. The gradient must not depend on how a step's samples are split over micro-batches or ranks.

    Each data-parallel rank has one engine. All methods except `accumulate` are collective: every rank calls them, in
    the same order.
    """

    def accumulate(self, batch: TrainingBatch) -> None:
        """Add the samples to the current step: their gradient, or, if the algorithm has several updates a step or
        statistics of a whole step, what `step` needs to train on them.

        Args:
            batch: on the CPU; each rank has its own batches, and any number of them.

        Raises:
            EngineError: if the batch cannot be trained on.
            WaitExpired: if the passes of the ranks are in lock step and another rank is lost.
        """
        ...

    def step(self) -> dict[str, float]:
        """Update the weights, once or as often as the algorithm's plan says, and start the next step.

        Gradients are divided by global counts over all ranks.

        Returns:
            Metrics of the step by name: per-token means in nats (KL and others), ``loss`` divided as the algorithm
            says, ``grad_norm`` before clipping (mean over the step's updates), ``lr``, ``response_length`` in tokens.
            If no sample was trained: ``loss`` and ``grad_norm`` of 0 and ``lr``; the weights are then unchanged.
            Empty if no rank accumulated a batch.

        Raises:
            EngineError: if the gradient is not finite; the weights are then those before that update.
            WaitExpired: if the passes of the ranks are in lock step and another rank is lost.
        """
        ...

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The weights to publish.

        Returns:
            Floating-point tensors by name, in a fixed order, on any device. Only rank 0's are used. They may be live
            parameters: the caller copies them before the next step.

        Raises:
            EngineError: if they cannot be assembled, such as adapters that cannot be merged.
        """
        ...

    def save(self, directory: Path) -> None:
        """Write all state that later steps depend on: weights, optimiser, RNG, step count.

        Args:
            directory: exists and is empty; the same on all ranks. When the call returns on rank 0, the files of all
                ranks are written.

        Raises:
            OSError, SafetensorError, CheckpointException: if writing fails; the caller reports it.
        """
        ...

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote; the following steps are bit-equal to those without the interruption.

        Args:
            directory: written by `save`, on the same number of ranks or, if the engine allows it, another.

        Raises:
            EngineError: if the directory has no state of this model, or it cannot be read.
        """
        ...

    def discard(self) -> None:
        """Discard the gradient that was accumulated for the current step.

        Raises:
            WaitExpired: if the passes of the ranks are in lock step and another rank is lost.
        """
        ...

    def export(self, directory: Path) -> None:
        """Write the model in the format of `from_pretrained`. Rank 0 writes.

        Args:
            directory: created by the call; its parent exists.

        Raises:
            OSError, SafetensorError: if writing fails; the caller reports it.
        """
        ...
