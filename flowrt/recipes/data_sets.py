"""Several weighted data sets: the form of the flag ``--data``, and what is refused.

A value of ``--data`` is a set if it begins with a name and ``=``; any other is the path of the only one::

    --data rows.jsonl
    --data math=a.jsonl:0.7 --data code=dir/:0.3
"""

import os
import re
from collections.abc import Sequence

from flowrt.errors import ConfigError
from flowrt.ids import MAX_SETS
from flowrt.recipes.config import DataConfig, DataSetConfig

FORM = "NAME=PATH:WEIGHT"
MAX_NAME_CHARS = 64
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{MAX_NAME_CHARS - 1}}}")
"""A name is part of the names of metrics and of prompts."""


def parse_data(flags: Sequence[str]) -> tuple[str, list[dict[str, str | float]]]:
    """The path of the only data set, or the tables of several. Raises ConfigError for another form.

    Args:
        flags: values of ``--data``, at least one.
    """
    if empty := [flag for flag in flags if not flag or flag.startswith("--")]:
        raise ConfigError(f"--data needs a value, a path or {FORM}, not {empty[0]!r:.40}")
    paths = [flag for flag in flags if not _is_set(flag)]
    if not paths:
        return "", [_table(flag) for flag in flags]
    if len(flags) > 1:
        raise ConfigError(f"--data {paths[0]!r:.80} is one of {len(flags)} data sets and has no name; use {FORM}")
    return paths[0], []


def _is_set(flag: str) -> bool:
    """Whether the value is not a path alone: there is no separator of directories before the first ``=``."""
    name, equals, _ = flag.partition("=")
    return bool(equals) and "/" not in name


def _table(flag: str) -> dict[str, str | float]:
    name, _, rest = flag.partition("=")
    path, colon, weight = rest.rpartition(":")
    if not colon or "/" in weight:  # a colon in a directory's name
        return {"name": name, "path": rest}
    try:
        return {"name": name, "path": path, "weight": float(weight)}
    except ValueError:
        raise ConfigError(
            f"--data {flag!r:.80}: the weight is {weight!r:.40}, which is not a number; use {FORM}"
        ) from None


def set_names(data: DataConfig) -> tuple[str, ...]:
    """The names of the data sets, by their index in prompt numbers; empty if there is one without a name."""
    return tuple(one.name for one in data.sets)


def described(sets: Sequence[DataSetConfig]) -> str:
    """The sets as their flags."""
    return " ".join(f"{one.name}={one.path}:{one.weight:g}" for one in sets) or "none"


def check_sets(data: DataConfig, recipe: str, *, mixes: bool) -> None:
    """Raise ConfigError for data sets that cannot be told apart, or that the recipe does not mix.

    Args:
        data: of the run.
        recipe: its name.
        mixes: whether it takes several data sets.
    """
    if not data.sets:
        return
    if not mixes:
        raise ConfigError(f"data.sets changes nothing in recipe {recipe}; it is of recipe custom")
    if data.path:
        raise ConfigError(f"data.path is {data.path!r}, and there are data.sets too; leave one of them out")
    if len(data.sets) > MAX_SETS:
        raise ConfigError(f"there are {len(data.sets)} data sets; use at most {MAX_SETS}")
    names: set[str] = set()
    paths: dict[str, str] = {}
    for one in data.sets:
        if NAME.fullmatch(one.name) is None:
            raise ConfigError(
                f"a data set has the name {one.name!r:.80}; use 1 to {MAX_NAME_CHARS} letters, digits, - and _, the "
                "first a letter or a digit (a path with = in it is written ./PATH)"
            )
        if one.name in names:
            raise ConfigError(f"two data sets have the name {one.name!r}; give each one of its own")
        if not one.path:
            raise ConfigError(f"data set {one.name!r} has no path; use {FORM}")
        place = os.path.realpath(one.path)
        if place in paths:
            raise ConfigError(
                f"data sets {paths[place]!r} and {one.name!r} have the same path {one.path}, and prompts would count "
                "twice; use one with the sum of their weights"
            )
        names.add(one.name)
        paths[place] = one.name
