"""Simulated rollout, training and scoring engines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flowrt.engines.base import Interrupt, Prompt, Response, TrainingBatch
from flowrt.engines.simulated.time import SimClock, SimDevice
from flowrt.engines.simulated.workload import GenerationCost, Lengths, ScoreCost, SimulatedDecoder, TrainCost
from flowrt.engines.training.saved_state import read_tensors, write_tensors
from flowrt.errors import EngineError
from flowrt.transport.weights.snapshot import Snapshot


@dataclass(slots=True)
class _SimSequence:
    length: int
    spans: list[int]
    """(version, tokens) pairs of earlier weights, flattened."""
    span_tokens: int = 0
    """Tokens in ``spans``."""


class SimulatedRollout:
    """Up to ``rows`` sequences at a time, which advance between calls of `run` too, as on a server.

    Args:
        cost: durations of generation.
        lengths: lengths of responses.
        clock: simulated time.
        rows: maximum number of running sequences.
        in_flight: allow `swap` while sequences run; they keep their tokens and continue.
    """

    def __init__(
        self,
        cost: GenerationCost,
        lengths: Lengths,
        clock: SimClock,
        *,
        rows: int,
        in_flight: bool = False,
    ) -> None:
        self._cost = cost
        self._lengths = lengths
        self._clock = clock
        self._rows = rows
        self._in_flight = in_flight
        self.version = 0
        self._decoder = SimulatedDecoder(cost, clock.now())
        self._sequences: dict[int, _SimSequence] = {}
        self._finished: list[Response] = []

    @property
    def running(self) -> int:
        return len(self._sequences) + len(self._finished)

    @property
    def room(self) -> int:
        return self._rows - self.running

    @property
    def row_s(self) -> float:
        """Total simulated seconds that rows have been in use, summed over rows."""
        return self._decoder.row_s

    def add(self, prompts: Sequence[Prompt]) -> None:
        if len(prompts) > self.room:
            raise EngineError(f"{len(prompts)} prompts for {self.room} free rows; add at most `room` prompts")
        self._catch_up()
        # Samples of a group share a prompt, which is prefilled once.
        distinct = {prompt.tokens.numpy().tobytes(): len(prompt.tokens) for prompt in prompts}
        for prompt in prompts:
            length = self._lengths.draw(prompt.tokens.numpy().tobytes(), prompt.seed)
            self._sequences[prompt.key] = _SimSequence(length, [])
            self._decoder.add(prompt.key, length)
        self._decoder.stall(self._cost.prefill_token_s * sum(distinct.values()))

    def run(self, interrupt: Interrupt) -> list[Response]:
        while self._sequences and not self._finished:
            self._clock.wait_until(self._decoder.next_finish(), interrupt)
            self._catch_up()
            if interrupt.is_set():
                break
        finished, self._finished = self._finished, []
        return finished

    def swap(self, snapshot: Snapshot) -> None:
        if self.running and not self._in_flight:
            raise EngineError(f"{self.running} sequences are running; weights are swapped between sequences")
        self._catch_up()
        for key, sequence in self._sequences.items():
            count = self._decoder.tokens_of(key) - sequence.span_tokens
            if count:
                sequence.spans += [self.version, count]
                sequence.span_tokens += count
        self.version = snapshot.version
        self._decoder.stall(self._cost.load_s)
        self._clock.wait_until(self._clock.now() + self._cost.load_s)

    def _catch_up(self) -> None:
        """Finish the sequences that have ended by now."""
        for key, _ in self._decoder.advance(self._clock.now()):
            sequence = self._sequences.pop(key)
            left = sequence.length - sequence.span_tokens
            spans = (*sequence.spans, self.version, left) if left else tuple(sequence.spans)
            tokens = torch.zeros(sequence.length, dtype=torch.int32)
            self._finished.append(Response(key, tokens, torch.zeros(sequence.length), spans, truncated=False))


class SimulatedTrainer:
    """Takes the time of training. All its weights, float32 of ``parameter_bytes`` bytes, equal the number of steps."""

    def __init__(self, cost: TrainCost, clock: SimClock, parameter_bytes: int = 4096) -> None:
        self._cost = cost
        self._device = SimDevice(clock)
        self._copies = SimDevice(clock)
        self._batches = 0
        self._tokens = 0
        self._weights = {"weight": torch.zeros(max(1, parameter_bytes // 4))}

    @property
    def worked_s(self) -> float:
        """Simulated seconds spent on training, without snapshots."""
        return self._device.worked_s

    def accumulate(self, batch: TrainingBatch) -> None:
        tokens = _tokens(batch.prompts, batch.responses)
        self._batches += 1
        self._tokens += tokens
        self._device.work(self._cost.accumulate(tokens))

    def step(self) -> dict[str, float]:
        if not self._batches:
            return {}
        tokens = self._tokens
        self.discard()
        self._device.work(self._cost.optimizer_s)
        self._weights["weight"] += 1
        return {"trained_tokens": float(tokens)}

    def snapshot(self, version: int) -> Snapshot:
        """Take a snapshot of the weights, which takes the time of a copy to host memory."""
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
        self._batches = self._tokens = 0


class SimulatedScorer:
    """Takes the time of a forward pass (a reference) or of a reward function."""

    def __init__(self, cost: ScoreCost, clock: SimClock) -> None:
        self._cost = cost
        self._device = SimDevice(clock)

    @property
    def worked_s(self) -> float:
        """Simulated seconds spent on scoring."""
        return self._device.worked_s

    def logprobs(self, prompts: Sequence[torch.Tensor], responses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Log-probabilities [T] of each response, all zero."""
        self._device.work(self._cost.score(_tokens(prompts, responses), len(responses)))
        return [torch.zeros(len(response)) for response in responses]

    def rewards(self, responses: Sequence[torch.Tensor]) -> list[float]:
        """A reward of 1 for responses of odd length, otherwise 0."""
        self._device.work(self._cost.score(_tokens(responses), len(responses)))
        return [float(len(response) % 2) for response in responses]


def _tokens(*columns: Sequence[torch.Tensor]) -> int:
    return sum(len(tensor) for column in columns for tensor in column)
