"""Models of simulated work: lengths of responses, times in simulated seconds, and continuous batching.

- A distribution maps a quantile in (0, 1) to a length in tokens. Draws for samples of one prompt are correlated: part
  of the quantile comes from the prompt, so a prompt with long responses in one epoch tends to have them in the next.
- Continuous batching is simulated from event to event: an event is the end of one of the sequences that run together.
"""

import hashlib
import heapq
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple, Protocol

from flowrt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GenerationCost:
    """Generation on one worker.

    A decoding step of b sequences takes max(base_s, b per_row_s) seconds: the time to read the weights, or the time to
    compute all rows if it is longer.

    Attributes:
        base_s: seconds of a step that is bound by reading the weights.
        per_row_s: seconds per sequence of a step that is bound by computation.
        prefill_token_s: seconds per token of a new prompt, during which decoding pauses.
        load_s: seconds to load new weights, during which decoding pauses.
    """

    base_s: float
    per_row_s: float = 0.0
    prefill_token_s: float = 0.0
    load_s: float = 0.0

    def step_s(self, rows: int) -> float:
        """Duration (s) of a step of ``rows`` sequences; 0 for none."""
        return max(self.base_s, rows * self.per_row_s) if rows else 0.0


@dataclass(frozen=True, slots=True)
class ScoreCost:
    """Duration of forward passes or of a reward function: seconds per token, per sample and per pass.

    A pass has at most ``pass_samples`` samples.
    """

    token_s: float = 0.0
    sample_s: float = 0.0
    pass_s: float = 0.0
    pass_samples: int = 16

    def score(self, tokens: int, samples: int) -> float:
        """Duration (s) of one call."""
        passes = math.ceil(samples / self.pass_samples)
        return passes * self.pass_s + tokens * self.token_s + samples * self.sample_s


@dataclass(frozen=True, slots=True)
class TrainCost:
    """Duration of training: seconds per token, and per pass of at most ``pass_tokens`` tokens."""

    token_s: float
    pass_s: float = 0.0
    pass_tokens: int = 16384
    optimizer_s: float = 0.0
    """Duration (s) of the optimiser step."""
    snapshot_s: float = 0.0
    """Duration (s) of copying the weights to host memory before they are published."""

    def accumulate(self, tokens: int) -> float:
        """Duration (s) of the forward and backward passes over a micro-batch of ``tokens`` tokens."""
        return tokens * self.token_s + math.ceil(tokens / self.pass_tokens) * self.pass_s


NORMAL = NormalDist()


class Distribution(Protocol):
    """A distribution of lengths of at least one token."""

    def quantile(self, share: float) -> int:
        """The length in tokens that a fraction ``share``, in (0, 1), of the responses does not exceed."""
        ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal with a median in tokens, truncated at ``longest``."""

    median: float
    sigma: float
    longest: int

    def quantile(self, share: float) -> int:
        return _clamp(self.median * math.exp(self.sigma * NORMAL.inv_cdf(share)), self.longest)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform from ``shortest`` to ``longest``, both included."""

    shortest: int
    longest: int

    def quantile(self, share: float) -> int:
        return _clamp(self.shortest + share * (self.longest + 1 - self.shortest), self.longest)


@dataclass(frozen=True, slots=True)
class Trace:
    """The empirical distribution of measured lengths, which are in ascending order."""

    lengths: tuple[int, ...]

    @classmethod
    def from_file(cls, path: Path) -> "Trace":
        """Read one length per line. Raises ConfigError if the file cannot be read, is empty, or has no such lengths."""
        try:
            lengths = tuple(sorted(int(line) for line in path.read_text().split()))
        except (OSError, ValueError) as error:
            raise ConfigError(f"lengths in {path} cannot be read: {error}; write one whole number a line") from error
        if not lengths or lengths[0] < 1:
            raise ConfigError(f"{path} has no lengths, or one below 1; write one whole number above 0 a line")
        return cls(lengths)

    def quantile(self, share: float) -> int:
        return self.lengths[min(int(share * len(self.lengths)), len(self.lengths) - 1)]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Draws from a distribution; ``correlation``, from 0 to 1, is between the normal scores of samples of one prompt.

    Raises ConfigError if the correlation is not from 0 to 1.
    """

    distribution: Distribution
    correlation: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.correlation <= 1:
            raise ConfigError(f"correlation of lengths is {self.correlation}; use a value from 0 to 1")

    def draw(self, prompt: bytes, sample: int) -> int:
        """The length of a sample in tokens; ``prompt`` identifies the prompt, ``sample`` is the sample's seed."""
        of_prompt, own = _normal(self.seed, b"prompt", prompt), _normal(self.seed, b"sample", struct.pack("<q", sample))
        score = math.sqrt(self.correlation) * of_prompt + math.sqrt(1.0 - self.correlation) * own
        return self.distribution.quantile(min(max(NORMAL.cdf(score), 1e-9), 1.0 - 1e-9))


def _normal(seed: int, kind: bytes, key: bytes) -> float:
    """A pseudorandom standard normal number, a function of the arguments."""
    digest = hashlib.blake2b(kind + struct.pack("<q", seed) + key, digest_size=8).digest()
    return NORMAL.inv_cdf((int.from_bytes(digest, "little") + 0.5) / 2.0**64)


def _clamp(length: float, longest: int) -> int:
    return max(1, min(int(length), longest))


class Finish(NamedTuple):
    """A complete sequence, and the simulated time of its last token."""

    key: int
    at_s: float


class SimulatedDecoder:
    """Running sequences, each of which advances by one token in ``cost.step_s(running)`` seconds.

    The number of sequences is constant between two events, so time advances from event to event, not step by step.
    """

    def __init__(self, cost: GenerationCost, now_s: float = 0.0) -> None:
        self._cost = cost
        self._now_s = now_s
        self._stalled_until_s = now_s
        self._progress = 0.0  # tokens of a sequence that has run since construction
        self._ends: list[tuple[float, int]] = []  # heap: the progress at which a running sequence ends, and its key
        self._started_at: dict[int, float] = {}
        self.row_s = 0.0
        """Total simulated seconds that rows have been in use, summed over rows."""

    @property
    def running(self) -> int:
        """Number of running sequences."""
        return len(self._ends)

    def add(self, key: int, length: int) -> None:
        """Start a sequence of ``length`` tokens at the current time, to which `advance` was called."""
        self._started_at[key] = self._progress
        heapq.heappush(self._ends, (self._progress + length, key))

    def stall(self, seconds: float) -> None:
        """Pause decoding for ``seconds``, after the pauses that have not ended yet."""
        self._stalled_until_s = max(self._stalled_until_s, self._now_s) + seconds

    def next_finish(self) -> float:
        """The time at which the next sequence ends; infinity if none runs."""
        if not self._ends:
            return float("inf")
        left = self._ends[0][0] - self._progress
        return max(self._now_s, self._stalled_until_s) + left * self._cost.step_s(self.running)

    def advance(self, now_s: float) -> list[Finish]:
        """Advance the time to ``now_s``. Returns the sequences that end until then, in order of their end."""
        finished = []
        while (at_s := self.next_finish()) <= now_s:
            end = self._ends[0][0]
            self._advance_to(at_s)
            self._progress = end  # exactly, without rounding errors
            while self._ends and self._ends[0][0] <= end:
                key = heapq.heappop(self._ends)[1]
                del self._started_at[key]
                finished.append(Finish(key, at_s))
        self._advance_to(now_s)
        return finished

    def tokens_of(self, key: int) -> int:
        """Number of tokens that a running sequence has."""
        return int(self._progress - self._started_at[key])

    def _advance_to(self, until_s: float) -> None:
        if until_s <= self._now_s:
            return
        decoding_s = until_s - min(max(self._now_s, self._stalled_until_s), until_s)
        if self._ends:
            self._progress += decoding_s / self._cost.step_s(self.running)
        self.row_s += self.running * (until_s - self._now_s)
        self._now_s = until_s
