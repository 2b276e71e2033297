"""How long simulated responses are: distributions as values, and draws that belong to a prompt and a sample.

A distribution maps a quantile in (0, 1) to a length in tokens. Draws for samples of one prompt are correlated: part of
the quantile comes from the prompt, so what was long in one epoch tends to be long in the next.
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
    """Lengths of at least one token."""

    def quantile(self, share: float) -> int:
        """The length that this share of responses does not exceed."""
        ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Half of the responses are longer than ``median`` tokens; none is longer than ``longest``: it is cut there."""

    median: float
    sigma: float
    longest: int

    def quantile(self, share: float) -> int:
        return _within(self.median * math.exp(self.sigma * NORMAL.inv_cdf(share)), self.longest)


@dataclass(frozen=True, slots=True)
class Pareto:
    """At least ``shortest`` tokens; a share (shortest / x) ** alpha is longer than x, cut at ``longest``."""

    shortest: float
    alpha: float
    longest: int

    def quantile(self, share: float) -> int:
        return _within(self.shortest * (1.0 - share) ** (-1.0 / self.alpha), self.longest)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every length from ``shortest`` to ``longest`` is as likely as any other."""

    shortest: int
    longest: int

    def quantile(self, share: float) -> int:
        return _within(self.shortest + share * (self.longest + 1 - self.shortest), self.longest)


@dataclass(frozen=True, slots=True)
class Trace:
    """Lengths that were measured, in ascending order."""

    lengths: tuple[int, ...]

    @classmethod
    def from_file(cls, path: Path) -> "Trace":
        """One length a line. Raises ConfigError when a line is not a whole number above 0, or there is none."""
        try:
            lengths = tuple(sorted(int(line) for line in path.read_text().split()))
        except (OSError, ValueError) as error:
            raise ConfigError(f"lengths in {path} cannot be read: {error}; write one whole number a line") from error
        if not lengths or lengths[0] < 1:
            raise ConfigError(f"lengths in {path} are none, or below 1; write one whole number above 0 a line")
        return cls(lengths)

    def quantile(self, share: float) -> int:
        return self.lengths[min(int(share * len(self.lengths)), len(self.lengths) - 1)]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Draws from a distribution; ``correlation`` is that of two samples of one prompt (of their normal scores)."""

    distribution: Distribution
    correlation: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.correlation <= 1:
            raise ConfigError(f"correlation of lengths is {self.correlation}; use a value from 0 to 1")

    def draw(self, prompt: bytes, sample: int) -> int:
        """The length of a sample: ``prompt`` is whatever tells prompts apart, ``sample`` the sample's own seed."""
        of_prompt, own = _normal(self.seed, b"prompt", prompt), _normal(self.seed, b"sample", struct.pack("<q", sample))
        score = math.sqrt(self.correlation) * of_prompt + math.sqrt(1.0 - self.correlation) * own
        return self.distribution.quantile(min(max(NORMAL.cdf(score), 1e-9), 1.0 - 1e-9))


def _normal(seed: int, kind: bytes, key: bytes) -> float:
    """A standard normal number that only depends on the arguments."""
    digest = hashlib.blake2b(kind + struct.pack("<q", seed) + key, digest_size=8).digest()
    return NORMAL.inv_cdf((int.from_bytes(digest, "little") + 0.5) / 2.0**64)


def _within(length: float, longest: int) -> int:
    return max(1, min(int(length), longest))
