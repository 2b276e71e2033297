"""A mixture of data sets: the set from which each prompt is taken, and the order of the prompts of each set.

The sets alternate by the chairman assignment of R. Tijdeman (Discrete Mathematics 32, 1980): after any number of
prompts, the count of each set is within one prompt of its share. In any window of prompts, and so of steps, the count
is within one of the share for two sets, and within two for more; for some weights of three sets no order is closer.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import TypeVar

from flowrt.errors import ConfigError

Taken = TypeVar("Taken")


@dataclass(frozen=True, slots=True)
class SetSize:
    """A data set to draw from: its name (empty if it is the only one), weight and number of training rows.

    With ``difficulties``, one for each row, a pass without a seed is in ascending order of difficulty.
    """

    name: str
    weight: float
    rows: int
    difficulties: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """A prompt of the order: the index of its set, the pass over the set, and the row, all from 0."""

    data_set: int
    epoch: int
    row: int


def mixture(
    sets: Sequence[SetSize], seed: int | None, epochs: int, take: Callable[[Place], Taken | None]
) -> Iterator[Taken]:
    """The results of ``take`` for the prompts in the order of a run; a set whose rows are used up is repeated.

    Args:
        sets: the data sets.
        seed: of the order of the rows in each pass over a set; None: file order, or by difficulty.
        epochs: passes over a set; the iteration ends when the first set has had them; 0: it does not end.
        take: called with each prompt; if it returns None, the next prompt of the same set is used instead.

    Raises ConfigError, during iteration, if ``take`` returns None for all prompts of a set.
    """
    streams = [_of_set(at, data_set, seed, epochs, take) for at, data_set in enumerate(sets)]
    for chosen in alternate([set_.weight for set_ in sets]):
        taken = next(streams[chosen], None)
        if taken is None:
            return
        yield taken


def _of_set(
    at: int, data_set: SetSize, seed: int | None, epochs: int, take: Callable[[Place], Taken | None]
) -> Iterator[Taken]:
    epoch = 0
    while epochs == 0 or epoch < epochs:
        is_empty = True
        for row in _in_order(data_set) if seed is None else row_order(seed, data_set.name, epoch, data_set.rows):
            taken = take(Place(at, epoch, row))
            if taken is not None:
                is_empty = False
                yield taken
        if is_empty:
            raise ConfigError(f"data set {data_set.name or 'of the run'} has no prompt that can be used; leave it out")
        epoch += 1


def _in_order(data_set: SetSize) -> Sequence[int]:
    """The rows in file order, or by ascending difficulty, and those of equal difficulty in file order."""
    return (
        sorted(range(data_set.rows), key=data_set.difficulties.__getitem__)
        if data_set.difficulties
        else range(data_set.rows)
    )


def row_order(seed: int, name: str, epoch: int, rows: int) -> list[int]:
    """The indices of the rows of a data set in the random order of one pass, which seed, name and epoch determine."""
    order = list(range(rows))
    random.Random(f"order {seed} {epoch}{' ' if name else ''}{name}").shuffle(order)
    return order


def alternate(weights: Sequence[float]) -> Iterator[int]:
    """The index of the set of each prompt, without end, by the chairman assignment (see the module).

    Args:
        weights: of the sets, above 0; a decimal fraction is taken as it is written.
    """
    parts = _integers(weights)
    total, bound = sum(parts), 2 * len(parts) - 2
    if bound == 0:
        while True:
            yield 0
    scale = [lcm(*parts) // part for part in parts]
    owed = [0] * len(parts)
    """By how much each set is behind its share, in prompts times ``total``."""
    while True:
        owed = [behind + part for behind, part in zip(owed, parts, strict=True)]
        # Of the sets that may get this prompt, the one with the earliest deadline.
        chosen = min(
            (at for at, behind in enumerate(owed) if bound * behind >= total),
            key=lambda at: ((bound - 1) * total - bound * owed[at]) * scale[at],
        )
        owed[chosen] -= total
        yield chosen


def largest_remainder(count: int, weights: Sequence[float]) -> list[int]:
    """Divide a number in proportion to weights: each share is rounded up or down, and the largest remainders up.

    Args:
        count: what is divided.
        weights: above 0.

    Returns:
        The shares; their sum is ``count``.
    """
    parts = _integers(weights)
    shares = [count * part // sum(parts) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda at: -(count * parts[at] % sum(parts)))
    for at in by_remainder[: count - sum(shares)]:
        shares[at] += 1
    return shares


def _integers(weights: Sequence[float]) -> list[int]:
    """Integers in the same proportions as the decimal representations of the weights."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    denominator = lcm(*(fraction.denominator for fraction in exact))
    return [int(fraction * denominator) for fraction in exact]
