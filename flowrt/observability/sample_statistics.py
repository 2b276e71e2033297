"""Groups and distributions of a run's stored samples, as the page, run.html and ``flowrt samples`` show them."""

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Self

import numpy as np

from flowrt.controller.storage.sample_store import SAMPLES
from flowrt.errors import ConfigError
from flowrt.ids import ROW_BITS, prompt_name, prompt_number
from flowrt.observability.sample_columns import (
    SOLVE_RATES,
    Bools,
    Floats,
    Ints,
    SampleColumns,
    SampleGroups,
    classes,
    grouped,
    histogram,
    last_attempts,
    solve_rate_classes,
)
from flowrt.observability.stored_samples import Order, SampleFilter, SampleReader
from flowrt.observability.tails import file_version
from flowrt.recipes.data_config import EvalConfig
from flowrt.recipes.eval_names import evaluated_row, first_number
from flowrt.recipes.run_dir import CONFIG

MAX_SAMPLES = 300_000
"""Maximum number of samples that are counted at a time, the newest ones."""
MAX_PROMPT_CHARS = 240
REUSED = 10.0
"""Reading takes at most 1 / (1 + REUSED) of the time, however many samples a live run has."""
MAX_KEPT = 2
"""Number of filters whose numbers are kept: all steps, and some of them."""
GROUP_ORDERS: Mapping[str, str] = {
    name: f"{name}_G" for name in ("step", "prompt", "reward", "spread", "right", "tokens", "truncated", "staleness")
}
"""Columns that groups may be sorted by, and their numbers."""
NAMED_ORDERS: Mapping[str, Order] = {"newest": "-step", "oldest": "step", "worst": "reward", "best": "-reward"}
GROUP_COLUMNS = (
    *("id", "step", "run_attempt", "epoch", "prompt", "size", "scored", "right", "truncated", "reward", "spread"),
    *("tokens", "least_tokens", "most_tokens", "staleness", "is_rolled_back"),
)
CLASS_COLUMNS = ("prompts", "samples", "reward", "right", "tokens", "truncated")
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """What the configuration of a run says about its samples."""

    set_names: tuple[str, ...] = ()
    """Names of its data sets; empty if it has one."""
    group_size: int = 0
    """Samples of a group; 0: unknown."""
    right_from: float = EvalConfig.solved_reward
    """Reward from which a sample is right (``eval.solved_reward``)."""

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Self:
        """The settings in a table of config.toml; of another version of flowrt, those that are known."""
        sets = _table(table, "data").get("sets")
        names = [set_.get("name") for set_ in sets if isinstance(set_, dict)] if isinstance(sets, list) else []
        size, right = table.get("group_size"), _table(table, "eval").get("solved_reward")
        return cls(
            tuple(map(str, names)),
            size if type(size) is int else 0,
            float(right) if isinstance(right, int | float) else EvalConfig.solved_reward,
        )

    @classmethod
    def of_run(cls, run_dir: Path) -> Self:
        """The settings of a run; those of an unreadable configuration are unknown."""
        with suppress(OSError, ValueError, RecursionError):
            return cls.of(tomllib.loads((run_dir / CONFIG).read_text("utf-8")))
        return cls()

    def groups(self, samples: SampleColumns, *, is_evaluation: bool) -> SampleGroups:
        """The groups of samples of training or of evaluations, all of whose answers are stored."""
        return grouped(samples, self.right_from, 1 if is_evaluation else self.group_size)

    def is_whole(self, samples: SampleColumns, *, is_evaluation: bool) -> Bools:
        """[N]: whether a sample was stored with its group."""
        groups = self.groups(samples, is_evaluation=is_evaluation)
        return groups.is_whole_G[groups.index_N]

    def prompt_name(self, number: int, eval_name: str = "") -> str:
        """The name of a prompt: its number, or NAME:ROW of one of several data sets or of an evaluation."""
        return f"{eval_name}:{evaluated_row(number)}" if eval_name else prompt_name(number, self.set_names)

    def prompt_number(self, name: str, eval_name: str = "") -> int:
        """The number of the prompt with a name, as `prompt_name` gives it, or with a number. Raises ValueError."""
        data_set, colon, row = name.rpartition(":")
        if not (row.isascii() and row.isdecimal() and len(row) < 16):
            raise ValueError("prompt is not a whole number, or NAME:ROW")
        if not colon:
            return int(row)
        names = (eval_name,) if eval_name else self.set_names
        if data_set not in names:
            raise ValueError(
                f"there is no data set {data_set!r:.80}; there are {', '.join(names) or 'none with a name'}"
            )
        return (first_number(eval_name) if eval_name else prompt_number(names.index(data_set), 0)) + int(row)


def _table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = table.get(name)
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True)
class _Kept:
    """Numbers of samples that were read, and the file that they are of."""

    samples: SampleColumns
    from_step: int | None
    version: object
    until_s: float
    """Time on the monotonic clock until which they are used although the file has changed."""


class SampleStatistics:
    """Reads the samples of a run and counts them; keeps the numbers of the last filters while the file is unchanged.

    Numbers that took long to read are used for `REUSED` times as long although the file has changed.

    Methods raise ConfigError if the samples cannot be read, or for an invalid regular expression or order.
    """

    def __init__(self, run_dir: Path) -> None:
        """Nothing is read yet."""
        self._path = run_dir / SAMPLES
        self._kept: dict[SampleFilter, _Kept] = {}

    def groups(
        self,
        wanted: SampleFilter,
        settings: SampleSettings,
        order: Order = "newest",
        limit: int = 50,
        offset: int = 0,
    ) -> Answer:
        """Groups that were stored whole and have a sample that matches a filter; their numbers are of all samples.

        Args:
            wanted: the filter.
            settings: of the run.
            order: newest, oldest, worst or best (by mean reward) first, random, or a column of `GROUP_ORDERS`, with a
                minus before it in descending order. Groups without a number in it are the last ones.
            limit: maximum number of groups.
            offset: number of groups to skip.

        Returns:
            ``groups``, each with its numbers, its name as ``name`` and the id of one of its samples; ``total``, the
            number of all of them; and ``from_step``, the first step that was counted if there were too many samples.
        """
        samples, from_step = self._columns(wanted)
        groups = settings.groups(samples, is_evaluation=bool(wanted.eval_name))
        is_chosen = np.zeros(len(groups), np.bool_)
        is_chosen[groups.index_N[self._matching(samples, wanted)]] = True
        places = in_order(groups, np.flatnonzero(is_chosen & groups.is_whole_G), order)
        page = places[offset : offset + limit].tolist()
        texts = SampleReader(self._path).prompt_texts([int(groups.id_G[place]) for place in page])
        # A sample that is not there was deleted meanwhile.
        prompts = [(place, texts[number]) for place in page if (number := int(groups.id_G[place])) in texts]
        return {
            "groups": [group_line(groups, place, settings, *prompt) for place, prompt in prompts],
            "total": len(places),
            "from_step": from_step,
            "right_from": settings.right_from,
        }

    def distributions(self, wanted: SampleFilter, settings: SampleSettings, *, with_dropped: bool = False) -> Answer:
        """Histograms of rewards and of lengths, mean rewards by length, and means by data set and by solve rate.

        A sample of training that was stored without its group is not counted, because it was chosen for what it is;
        those of groups that were dropped, or are not trained yet, only with ``with_dropped``. The solve rate of a
        prompt is the share of right ones among all of its samples that are stored, of any step.
        """
        samples, from_step = self._columns(wanted)
        everything, is_cut = self._columns(dataclasses.replace(wanted, first_step=None, last_step=None, epoch=None))
        is_counted = settings.is_whole(samples, is_evaluation=bool(wanted.eval_name))
        if not (with_dropped or wanted.eval_name):
            is_counted &= np.isfinite(samples.advantage_N)
        samples = samples.only(is_counted & ~samples.is_rolled_back_N & self._matching(samples, wanted))
        everything = everything.only(~everything.is_rolled_back_N)
        # If there are too many, they may lack the prompts of early steps.
        answer = distribution_lines(samples, everything if is_cut is None else samples, settings, wanted.eval_name)
        return {**answer, "from_step": from_step}

    # ---- parts

    def _columns(self, wanted: SampleFilter) -> tuple[SampleColumns, int | None]:
        """The numbers of the samples of a filter, and the first step that they are of if there are too many.

        Of the conditions on samples, not on groups, none is regarded: `_matching` does.
        """
        base = dataclasses.replace(wanted, min_tokens=None, max_tokens=None, reason="", grep="", group_of=None)
        version = [file_version(path) for path in (self._path, self._path.with_name(f"{SAMPLES}-wal"))]
        kept = self._kept.get(base)
        if kept is None or (kept.version != version and monotonic() >= kept.until_s):
            start_s = monotonic()
            samples, from_step = _newest(SampleReader(self._path).columns(base, MAX_SAMPLES))
            end_s = monotonic()
            kept = _Kept(samples, from_step, version, end_s + REUSED * (end_s - start_s))
            self._kept.pop(base, None)
            while len(self._kept) >= MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[base] = kept
        return kept.samples, kept.from_step

    def _matching(self, samples: SampleColumns, wanted: SampleFilter) -> Bools:
        """[N]: whether a sample meets the conditions of a filter that `_columns` does not regard."""
        if wanted == dataclasses.replace(wanted, min_tokens=None, max_tokens=None, reason="", grep="", group_of=None):
            return np.ones(len(samples), np.bool_)
        ids = np.array(list(SampleReader(self._path).matching(wanted)), np.int64)
        return np.isin(samples.id_N, ids)


def _newest(samples: SampleColumns) -> tuple[SampleColumns, int | None]:
    """Samples of last attempts; of `MAX_SAMPLES` only those of complete steps, and the first of these steps."""
    if len(samples) < MAX_SAMPLES:
        return last_attempts(samples), None
    first = int(samples.step_N.min())
    is_complete = samples.step_N > first
    if not is_complete.any():  # a step with more samples than that
        return last_attempts(samples), first
    return last_attempts(samples.only(is_complete)), first + 1


# ---- lines of answers


def in_order(groups: SampleGroups, places: Ints, order: Order) -> Ints:
    """``places`` of groups in an order, equal ones newest first. Raises ConfigError for an unknown order."""
    key: Floats | Ints
    if order == "random":
        key = groups.id_G * 2654435761 % 4294967291
    else:
        order = NAMED_ORDERS.get(order, order)
        column = GROUP_ORDERS.get(order.removeprefix("-"))
        if column is None:
            known = ", ".join([*NAMED_ORDERS, "random", *GROUP_ORDERS])
            raise ConfigError(f"groups have no order {order!r:.40}; use one of {known}")
        key = getattr(groups, column).astype(np.float64) * (-1 if order.startswith("-") else 1)
        key = np.where(np.isfinite(key), key, np.inf)
    newest = (groups.prompt_G, -groups.epoch_G, -groups.run_attempt_G, -groups.step_G)
    return places[np.lexsort([part[places] for part in (*newest, key)])]


def group_line(groups: SampleGroups, place: int, settings: SampleSettings, eval_name: str, prompt_text: str) -> Answer:
    """The numbers of a group, with the name of its prompt and the beginning of its text."""
    columns = {name: getattr(groups, f"{name}_G")[place].item() for name in GROUP_COLUMNS}
    return {
        **columns,
        "name": settings.prompt_name(columns["prompt"], eval_name),
        "eval_name": eval_name,
        "prompt_text": prompt_text[:MAX_PROMPT_CHARS],
    }


def distribution_lines(
    samples: SampleColumns, everything: SampleColumns, settings: SampleSettings, eval_name: str = ""
) -> Answer:
    """The distributions of samples.

    Args:
        samples: those that are counted.
        everything: the samples from which solve rates are taken.
        settings: of the run.
        eval_name: data set of the evaluation; empty: they are of training.
    """
    names = (eval_name,) if eval_name else settings.set_names or ("all prompts",)
    set_N = np.zeros(len(samples), np.int64) if eval_name else np.minimum(samples.prompt_N >> ROW_BITS, len(names) - 1)
    rate_N = _solve_rates(samples, everything, settings, is_evaluation=bool(eval_name))
    has_rate = rate_N >= 0
    return {
        "samples": len(samples),
        "steps": [int(samples.step_N.min()), int(samples.step_N.max())] if len(samples) else None,
        "right_from": settings.right_from,
        "truncated": int(samples.is_truncated_N.sum()),
        "without_reward": int((~np.isfinite(samples.reward_N)).sum()),
        "reward": _histogram(samples.reward_N, samples),
        "tokens": _histogram(samples.tokens_N, samples),
        "sets": _class_lines(samples, set_N, names, settings),
        "solve_rates": _class_lines(samples.only(has_rate), rate_N[has_rate], SOLVE_RATES, settings),
    }


def _solve_rates(
    samples: SampleColumns, everything: SampleColumns, settings: SampleSettings, *, is_evaluation: bool
) -> Ints:
    """[N]: the index in `SOLVE_RATES` of the prompt of each sample; -1 without a rate."""
    is_whole = settings.is_whole(everything, is_evaluation=is_evaluation)
    scored = everything.only(is_whole & np.isfinite(everything.reward_N))
    prompts, place = np.unique(scored.prompt_N, return_inverse=True)
    right_P = np.bincount(place, scored.reward_N >= settings.right_from, len(prompts)).astype(np.int64)
    class_P = solve_rate_classes(right_P, np.bincount(place, minlength=len(prompts)))
    at_N = np.searchsorted(prompts, samples.prompt_N)
    return np.where(np.isin(samples.prompt_N, prompts), np.append(class_P, -1)[at_N], -1)


def _class_lines(samples: SampleColumns, class_N: Ints, names: Sequence[str], settings: SampleSettings) -> list[Answer]:
    """The means of each class that has samples."""
    means = classes(samples, class_N, len(names), settings.right_from)
    columns = {name: getattr(means, f"{name}_C").tolist() for name in CLASS_COLUMNS}
    return [
        {"name": name, **{column: values[at] for column, values in columns.items()}}
        for at, name in enumerate(names)
        if columns["samples"][at]
    ]


def _histogram(values_N: Floats | Ints, samples: SampleColumns) -> Answer:
    bins = histogram(values_N, samples)
    return {
        "edges": bins.edges.tolist(),
        "count": bins.count_B.tolist(),
        "truncated": bins.truncated_B.tolist(),
        "reward": bins.reward_B.tolist(),
    }
