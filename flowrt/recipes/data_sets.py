"""Several weighted data sets: parsing of the flag ``--data``, and checks of the sets.

A value of ``--data`` that begins with a name and ``=`` is one of several sets; any other is the path of the only set::

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
    """Parse the values of ``--data``. Raises ConfigError for a malformed value, and for several without names.

    Args:
        flags: the values, at least one.

    Returns:
        The path of the only data set, else empty, and the tables `[[data.sets]]` of several, else empty.
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
    """Whether a value of ``--data`` has a name: a ``=``, and no ``/`` before the first one."""
    name, equals, _ = flag.partition("=")
    return bool(equals) and "/" not in name


def _table(flag: str) -> dict[str, str | float]:
    name, _, rest = flag.partition("=")
    path, colon, weight = rest.rpartition(":")
    if not colon or "/" in weight:  # the colon belongs to a directory's name
        return {"name": name, "path": rest}
    try:
        return {"name": name, "path": path, "weight": float(weight)}
    except ValueError:
        raise ConfigError(
            f"--data {flag!r:.80}: the weight is {weight!r:.40}, which is not a number; use {FORM}"
        ) from None


def set_names(data: DataConfig) -> tuple[str, ...]:
    """The names of the data sets, in the order of their indices in prompt numbers; empty without ``data.sets``."""
    return tuple(one.name for one in data.sets)


def described(sets: Sequence[DataSetConfig]) -> str:
    """The sets as values of ``--data``, separated by spaces; "none" if there are none."""
    return " ".join(f"{one.name}={one.path}:{one.weight:g}" for one in sets) or "none"


def check_sets(data: DataConfig, recipe: str, *, mixes: bool) -> None:
    """Raise ConfigError for data sets with unusable names or paths, or in a recipe that takes only one.

    Args:
        data: options of the data.
        recipe: name of the recipe.
        mixes: whether the recipe takes several data sets.
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
