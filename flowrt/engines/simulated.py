"""Engines that take time and compute nothing: schedules and policies can be measured without a model or a device.

Times are simulated seconds of a `Pace`: real ones scaled down, or a driven clock's for tests. What the engines return
has the right shapes and sizes (all zeros), so stores and lanes carry real bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from flowrt.engines.costs import DecodeCost, ScoreCost, TrainCost
from flowrt.engines.decoder import SimulatedDecoder
from flowrt.engines.lengths import Lengths
from flowrt.engines.pace import Device, Pace
from flowrt.engines.protocols import Interrupt, Prompt, Response, TrainingBatch
from flowrt.engines.state import read_tensors, write_tensors
from flowrt.errors import EngineError
from flowrt.transport.weights import Snapshot


class Failure(Protocol):
    """Which sequences an engine fails at."""

    def fails(self, begun: int, seed: int) -> bool:
        """Whether it fails at the sequence of this seed, the ``begun``-th that it was given (from 1)."""
        ...


@dataclass(frozen=True, slots=True)
class NoFailure:
    """It never does."""

    def fails(self, begun: int, seed: int) -> bool:  # noqa: ARG002
        return False


@dataclass(frozen=True, slots=True)
class FailEvery:
    """Fails at each ``sequences``-th sequence."""

    sequences: int

    def fails(self, begun: int, seed: int) -> bool:  # noqa: ARG002
        return begun % self.sequences == 0


@dataclass(frozen=True, slots=True)
class FailAtRandom:
    """Fails at a share of the sequences: the same ones on any worker, for a sample's seed decides."""

    probability: float

    def fails(self, begun: int, seed: int) -> bool:  # noqa: ARG002
        return seed % 1_000_003 < self.probability * 1_000_003


@dataclass(slots=True)
class _Sequence:
    length: int
    doomed: bool  # the engine fails when it ends
    spans: list[int]  # version, tokens, version, tokens, … of the weights before the present ones
    counted: int = 0  # tokens in spans


class SimulatedRollout:
    """Up to ``rows`` sequences together, which go on while nobody looks, as those of an engine in a process of its own.

    With ``in_flight``, new weights may be put into use while sequences run: those go on with what they have.
    """

    def __init__(
        self,
        cost: DecodeCost,
        lengths: Lengths,
        pace: Pace,
        *,
        rows: int,
        in_flight: bool = False,
        failure: Failure | None = None,
        version: int = 0,
    ) -> None:
        self._cost = cost
        self._lengths = lengths
        self._pace = pace
        self._rows = rows
        self._in_flight = in_flight
        self._failure = failure or NoFailure()
        self.version = version
        self._decoder = SimulatedDecoder(cost, pace.now())
        self._sequences: dict[int, _Sequence] = {}
        self._finished: list[Response] = []
        self._begun = 0
        self._broken = False

    @property
    def running(self) -> int:
        return len(self._sequences) + len(self._finished)

    @property
    def room(self) -> int:
        return self._rows - self.running

    @property
    def row_s(self) -> float:
        """Seconds that all sequences together have spent in rows."""
        return self._decoder.row_s

    def add(self, prompts: Sequence[Prompt]) -> None:
        if len(prompts) > self.room:
            raise EngineError(f"{len(prompts)} prompts for {self.room} free rows; pull no more than there is room for")
        self._catch_up()
        # The members of a group share a prompt, which is prefilled once.
        distinct = {prompt.tokens.numpy().tobytes(): len(prompt.tokens) for prompt in prompts}
        for prompt in prompts:
            length = self._lengths.draw(prompt.tokens.numpy().tobytes(), prompt.seed)
            self._begun += 1
            self._sequences[prompt.key] = _Sequence(length, self._failure.fails(self._begun, prompt.seed), [])
            self._decoder.add(prompt.key, length)
        self._decoder.stall(self._cost.prefill_token_s * sum(distinct.values()))

    def run(self, interrupt: Interrupt) -> list[Response]:
        while self._sequences and not self._finished:
            self._pace.wait_until(self._decoder.next_finish(), interrupt)
            self._catch_up()
            if interrupt.is_set():
                break
        if self._broken:
            raise EngineError("a sequence was to fail here, and did; simulated engines fail when they are told to")
        finished, self._finished = self._finished, []
        return finished

    def swap(self, snapshot: Snapshot) -> None:
        if self.running and not self._in_flight:
            raise EngineError(f"{self.running} sequences are running; weights are swapped between sequences")
        self._catch_up()
        for key, sequence in self._sequences.items():
            made = self._decoder.tokens_of(key) - sequence.counted
            if made:
                sequence.spans += [self.version, made]
                sequence.counted += made
        self.version = snapshot.version
        self._decoder.stall(self._cost.load_s)
        self._pace.wait_until(self._pace.now() + self._cost.load_s)

    def _catch_up(self) -> None:
        """Take out what has ended by now."""
        for key, _ in self._decoder.advance(self._pace.now()):
            sequence = self._sequences.pop(key)
            self._broken = self._broken or sequence.doomed
            left = sequence.length - sequence.counted
            spans = (*sequence.spans, self.version, left) if left else tuple(sequence.spans)
            tokens = torch.zeros(sequence.length, dtype=torch.int32)
            self._finished.append(Response(key, tokens, torch.zeros(sequence.length), spans))


class SimulatedTrainer:
    """Takes the time of training; its weights (``parameter_bytes`` in all) are the number of steps that it has made."""

    def __init__(self, cost: TrainCost, pace: Pace, parameter_bytes: int = 4096) -> None:
        self._cost = cost
        self._device = Device(pace)
        self._copies = Device(pace)
        self._tokens = 0
        self._weights = {"weight": torch.zeros(max(1, parameter_bytes // 4))}

    @property
    def worked_s(self) -> float:
        """Simulated seconds spent on training so far, snapshots apart."""
        return self._device.worked_s

    def accumulate(self, batch: TrainingBatch) -> None:
        tokens = _tokens(batch.prompts, batch.responses)
        self._tokens += tokens
        self._device.work(self._cost.accumulate(tokens))

    def step(self) -> dict[str, float]:
        if not self._tokens:
            return {}
        tokens, self._tokens = self._tokens, 0
        self._device.work(self._cost.optimizer_s)
        self._weights["weight"] += 1
        return {"trained_tokens": float(tokens)}

    def snapshot(self, version: int) -> Snapshot:
        """A copy of the weights, in the time that it takes to get them off the device."""
        self._copies.work(self._cost.snapshot_s)
        return Snapshot.take(version, self._weights)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self._weights

    def save(self, directory: Path) -> None:
        write_tensors(directory, self._weights)

    def export(self, directory: Path) -> None:
        directory.mkdir()
        self.save(directory)

    def load(self, directory: Path) -> None:
        self._weights["weight"].copy_(read_tensors(directory)["weight"])
        self.discard()

    def discard(self) -> None:
        self._tokens = 0


class SimulatedScorer:
    """Takes the time of a forward pass (a reference) or of a reward function."""

    def __init__(self, cost: ScoreCost, pace: Pace) -> None:
        self._cost = cost
        self._device = Device(pace)

    @property
    def worked_s(self) -> float:
        """Simulated seconds spent on scoring so far."""
        return self._device.worked_s

    def logprobs(self, prompts: Sequence[torch.Tensor], responses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Log-probabilities of each response: zeros."""
        self._device.work(self._cost.score(_tokens(prompts, responses), len(responses)))
        return [torch.zeros(len(response)) for response in responses]

    def rewards(self, responses: Sequence[torch.Tensor]) -> list[float]:
        """One for every other response, by its length."""
        self._device.work(self._cost.score(_tokens(responses), len(responses)))
        return [float(len(response) % 2) for response in responses]


def _tokens(*columns: Sequence[torch.Tensor]) -> int:
    return sum(len(tensor) for column in columns for tensor in column)
