"""Lengths of simulated responses: distributions, and draws for a prompt and a sample.

A distribution maps a quantile in (0, 1) to a length in tokens. Draws for samples of one prompt are correlated: part of
the quantile comes from the prompt, so a prompt with long responses in one epoch tends to have them in the next.
"""

import hashlib
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

from flowrt.errors import ConfigError

NORMAL = NormalDist()


class Distribution(Protocol):
    """A distribution of lengths of at least one token."""

    def quantile(self, share: float) -> int:
        """The length that this share of responses does not exceed."""
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
class Pareto:
    """Pareto: P(length > x) = (shortest / x) ** alpha, truncated at ``longest``."""

    shortest: float
    alpha: float
    longest: int

    def quantile(self, share: float) -> int:
        return _clamp(self.shortest * (1.0 - share) ** (-1.0 / self.alpha), self.longest)


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
        """Read one length per line. Raises ConfigError if a line is not a positive integer, or there is none."""
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
    """Draws from a distribution; ``correlation`` is that of the normal scores of two samples of one prompt."""

    distribution: Distribution
    correlation: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.correlation <= 1:
            raise ConfigError(f"correlation of lengths is {self.correlation}; use a value from 0 to 1")

    def draw(self, prompt: bytes, sample: int) -> int:
        """The length of a sample; ``prompt`` identifies the prompt, ``sample`` is the sample's seed."""
        of_prompt, own = _normal(self.seed, b"prompt", prompt), _normal(self.seed, b"sample", struct.pack("<q", sample))
        score = math.sqrt(self.correlation) * of_prompt + math.sqrt(1.0 - self.correlation) * own
        return self.distribution.quantile(min(max(NORMAL.cdf(score), 1e-9), 1.0 - 1e-9))


def _normal(seed: int, kind: bytes, key: bytes) -> float:
    """A pseudorandom standard normal number, a function of the arguments."""
    digest = hashlib.blake2b(kind + struct.pack("<q", seed) + key, digest_size=8).digest()
    return NORMAL.inv_cdf((int.from_bytes(digest, "little") + 0.5) / 2.0**64)


def _clamp(length: float, longest: int) -> int:
    return max(1, min(int(length), longest))
