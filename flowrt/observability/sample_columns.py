"""Statistics of stored samples from columns of their numbers: groups, histograms, and means of classes of samples.

Nothing here reads a file. A reward or an advantage that a sample does not have is NaN: it is in no mean and no count of
rewards.

Shapes: N samples, G groups, B bins, C classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
MAX_BINS = 24
"""Number of parts that the range of the values is divided into; that bins begin at round numbers may add two."""
SOLVE_RATES = ("none right", "up to 25 %", "25 to 50 %", "50 to 75 %", "above 75 %", "all right")
"""Classes of prompts by their solve rate; an upper bound belongs to its class."""
NAN = float("nan")


@dataclass(frozen=True, slots=True, eq=False)
class SampleColumns:
    """The numbers of N samples, all of training or all of evaluations."""

    id_N: Ints
    step_N: Ints
    """The step that trained the sample; in an evaluation, the version."""
    version_N: Ints
    """The evaluated version; 0 for samples of training."""
    run_attempt_N: Ints
    epoch_N: Ints
    prompt_N: Ints
    member_N: Ints
    attempt_N: Ints
    tokens_N: Ints
    """Number of response tokens."""
    reward_N: Floats
    advantage_N: Floats
    staleness_N: Floats
    """In versions; NaN if it is unknown, and in an evaluation."""
    is_truncated_N: Bools
    is_flagged_N: Bools
    """Whether the sample may have been stored without its group."""
    is_rolled_back_N: Bools

    def __len__(self) -> int:
        return len(self.id_N)

    def only(self, chosen: Bools | Ints) -> Self:
        """The samples of a mask [N], or of indices."""
        return type(self)(*(getattr(self, field.name)[chosen] for field in fields(self)))

    @property
    def group_keys(self) -> tuple[Ints, ...]:
        """What the samples of a group have in common."""
        return self.prompt_N, self.epoch_N, self.run_attempt_N, self.version_N


@dataclass(frozen=True, slots=True, eq=False)
class SampleGroups:
    """The numbers of G groups."""

    id_G: Ints
    """The smallest id of its samples."""
    step_G: Ints
    run_attempt_G: Ints
    epoch_G: Ints
    prompt_G: Ints
    size_G: Ints
    """Number of samples."""
    scored_G: Ints
    """Number of samples with a reward."""
    right_G: Ints
    truncated_G: Ints
    reward_G: Floats
    """Mean reward; NaN without one."""
    spread_G: Floats
    """Standard deviation of the rewards, with n - 1; NaN with fewer than two."""
    tokens_G: Floats
    """Mean number of response tokens."""
    least_tokens_G: Ints
    most_tokens_G: Ints
    staleness_G: Floats
    """The largest of its samples; NaN if unknown."""
    is_rolled_back_G: Bools
    is_whole_G: Bools
    """Whether it was stored as a group, not only some of its samples by themselves."""
    index_N: Ints
    """The group of each sample."""

    def __len__(self) -> int:
        return len(self.id_G)


class Histogram(NamedTuple):
    """Counts of values in bins. Bin b begins at edge b, which belongs to it, and ends at edge b + 1."""

    edges: Floats
    """[B + 1], ascending; empty without values."""
    count_B: Ints
    truncated_B: Ints
    """Number of truncated samples among them."""
    reward_B: Floats
    """Mean reward; NaN without one."""


class ClassMeans(NamedTuple):
    """Numbers of the samples of C classes."""

    prompts_C: Ints
    samples_C: Ints
    reward_C: Floats
    """Mean reward; NaN without one."""
    right_C: Floats
    """Share of the samples with a reward; NaN without one."""
    tokens_C: Floats
    """Mean number of response tokens; NaN without samples."""
    truncated_C: Floats
    """Share of the samples; NaN without one."""


# ---- groups


def last_attempts(samples: SampleColumns) -> SampleColumns:
    """Of each member of a group only the last attempt; earlier ones were generated again."""
    if not samples.attempt_N.any():
        return samples
    keys = (*samples.group_keys, samples.member_N)
    order = _order((samples.attempt_N, *keys))
    is_last = np.append(_is_new(keys, order)[1:], True) if len(order) else np.zeros(0, np.bool_)
    return samples.only(np.sort(order[is_last]))


def grouped(samples: SampleColumns, right_from: float, group_size: int) -> SampleGroups:
    """The groups of samples.

    Args:
        samples: of which each group has its own; those of an evaluated prompt and version are a group too.
        right_from: reward from which a sample is right.
        group_size: number of samples of a complete group.
    """
    order = _order(samples.group_keys)
    of, is_first = samples.only(order), _is_new(samples.group_keys, order)
    starts, index = np.flatnonzero(is_first), np.cumsum(is_first) - 1
    index_N = np.empty(len(order), np.int64)
    index_N[order] = index
    size_G = np.bincount(index, minlength=len(starts))
    is_scored = np.isfinite(of.reward_N)
    scored_G = _sums(is_scored, starts).astype(np.int64)
    with np.errstate(all="ignore"):
        reward_G = _sums(np.where(is_scored, of.reward_N, 0.0), starts) / np.where(scored_G > 0, scored_G, NAN)
        centred = np.where(is_scored, of.reward_N - reward_G[index], 0.0)
        spread_G = np.sqrt(_sums(centred**2, starts) / np.where(scored_G > 1, scored_G - 1, NAN))
    return SampleGroups(
        id_G=_reduced(np.minimum, of.id_N, starts),
        step_G=_reduced(np.maximum, of.step_N, starts),
        run_attempt_G=of.run_attempt_N[starts],
        epoch_G=of.epoch_N[starts],
        prompt_G=of.prompt_N[starts],
        size_G=size_G,
        scored_G=scored_G,
        right_G=_sums(is_scored & (of.reward_N >= right_from), starts).astype(np.int64),
        truncated_G=_sums(of.is_truncated_N, starts).astype(np.int64),
        reward_G=reward_G,
        spread_G=spread_G,
        tokens_G=_sums(of.tokens_N, starts) / np.maximum(size_G, 1),
        least_tokens_G=_reduced(np.minimum, of.tokens_N, starts),
        most_tokens_G=_reduced(np.maximum, of.tokens_N, starts),
        staleness_G=_reduced(np.fmax, of.staleness_N, starts),
        is_rolled_back_G=of.is_rolled_back_N[starts],
        is_whole_G=(_sums(~of.is_flagged_N, starts) > 0) | (size_G >= group_size),
        index_N=index_N,
    )


def _order(keys: Sequence[Ints]) -> Ints:
    """Indices that sort by these keys, the last one first; most runs have only one epoch and one run attempt."""
    count = len(keys[0])
    varied = [key for key in keys if count and key.min() != key.max()]
    return np.lexsort(varied) if varied else np.arange(count)


def _is_new(keys: Sequence[Ints], order: Ints) -> Bools:
    """[N], in this order: whether a sample differs in a key from the one before it."""
    is_new = np.zeros(len(order), np.bool_)
    is_new[:1] = True
    for key in keys:
        is_new[1:] |= key[order[1:]] != key[order[:-1]]
    return is_new


def _sums(values: Floats | Ints | Bools, starts: Ints) -> Floats:
    sums: Floats = _reduced(np.add, values.astype(np.float64), starts)
    return sums


def _reduced(call: np.ufunc, values: Any, starts: Ints) -> Any:
    """The values reduced from each start to the next."""
    return call.reduceat(values, starts) if len(starts) else values[:0]


# ---- histograms and classes


def histogram(values_N: Floats | Ints, samples: SampleColumns) -> Histogram:
    """The distribution of one number of the samples; those without a finite one are not counted."""
    values = values_N.astype(np.float64)
    is_counted = np.isfinite(values)
    edges = bin_edges(values[is_counted])
    bins = max(len(edges) - 1, 0)
    place = np.clip(np.searchsorted(edges, values[is_counted], side="right") - 1, 0, max(bins - 1, 0))
    of = samples.only(is_counted)
    return Histogram(
        edges,
        np.bincount(place, minlength=bins),
        np.bincount(place[of.is_truncated_N], minlength=bins),
        _means(of.reward_N, place, bins),
    )


def bin_edges(values: Floats, most: int = MAX_BINS) -> Floats:
    """Ascending edges of equal bins over finite values, at round numbers; of whole numbers, bins of whole numbers.

    Empty without values. A single bin from the least to the largest value if their range is too narrow or too wide for
    float64.
    """
    if not len(values):
        return np.zeros(0)
    low, high = float(values.min()), float(values.max())
    width = _round_up((high - low) / most)
    if bool((values == np.floor(values)).all()):
        width = max(width, 1.0)
    elif low == high:
        width = _round_up(abs(low) / 10)
    if not math.isfinite(width) or width <= 64 * math.ulp(max(abs(low), abs(high))):
        return np.array([low, high if high > low else math.nextafter(high, math.inf)])
    first, last = math.floor(low / width) - 1, math.floor(high / width) + 2
    digits = max(-math.floor(math.log10(width)), 0)
    # Rounded, so that 0.3 is an edge and not 3 * 0.1, which is larger.
    edges = [round(at * width, digits) for at in range(first, last + 1)]
    within = [at for at, (start, end) in enumerate(pairwise(edges)) if end > low and start <= high]
    return np.array(edges[within[0] : within[-1] + 2])


def _round_up(width: float) -> float:
    """The next of 1, 2 and 5 times a power of ten; 0 for 0, infinity if it is not finite."""
    if not 0 < width < math.inf:
        return width
    power = 10.0 ** math.floor(math.log10(width))
    return next((times * power for times in (1, 2, 5) if times * power >= width * (1 - 1e-9)), 10 * power)


def classes(samples: SampleColumns, class_N: Ints, count: int, right_from: float) -> ClassMeans:
    """The means of each class.

    Args:
        samples: of any classes.
        class_N: the class of each sample, from 0.
        count: number of classes.
        right_from: reward from which a sample is right.
    """
    samples_C = np.bincount(class_N, minlength=count)
    order = _order((samples.prompt_N, class_N))
    is_new_prompt = _is_new((samples.prompt_N, class_N), order)
    is_right = np.where(np.isfinite(samples.reward_N), samples.reward_N >= right_from, NAN)
    return ClassMeans(
        np.bincount(class_N[order][is_new_prompt], minlength=count),
        samples_C,
        _means(samples.reward_N, class_N, count),
        _means(is_right, class_N, count),
        _means(samples.tokens_N.astype(np.float64), class_N, count),
        _means(samples.is_truncated_N.astype(np.float64), class_N, count),
    )


def solve_rate_classes(right_N: Ints, scored_N: Ints) -> Ints:
    """The indices in `SOLVE_RATES` of prompts with these numbers of right and of scored samples, at least one."""
    quarter_N = -(-4 * right_N // scored_N)  # 0 to 4, rounded up
    return np.where(right_N >= scored_N, len(SOLVE_RATES) - 1, quarter_N)


def _means(values: Floats, place: Ints, count: int) -> Floats:
    """The mean of the finite values at each place; NaN without one."""
    is_finite = np.isfinite(values)
    numbers = np.bincount(place[is_finite], minlength=count)
    sums = np.bincount(place[is_finite], weights=values[is_finite], minlength=count)
    return sums / np.where(numbers > 0, numbers, NAN)
