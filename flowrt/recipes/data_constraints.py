"""Constraints on data: options that have no effect in a recipe, sets with unusable names or paths, and difficulties."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from flowrt.errors import ConfigError
from flowrt.ids import MAX_SETS
from flowrt.recipes.config import RunConfig
from flowrt.recipes.data_config import DataConfig, DataSetConfig
from flowrt.recipes.data_sets import FORM, set_data
from flowrt.recipes.eval_names import eval_data_sets
from flowrt.recipes.tasks.registry import takes_reward
from flowrt.recipes.tasks.task_file import is_task_file

MAX_NAME_CHARS = 64
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{MAX_NAME_CHARS - 1}}}")
"""A name of a set is part of the names of metrics and of prompts."""


def data_mistakes(config: RunConfig) -> Iterator[str]:
    """Options of the data that have no effect in the recipe, and those that are unusable.

    Raises ConfigError as `eval_data_sets` and `DataConfig.prompt_format`.
    """
    data, mixes = config.data, takes_reward(config.recipe)
    is_own = is_task_file(config.recipe)
    if not is_own:
        for key, is_set in (
            ("recipe_sha256", bool(config.recipe_sha256)),
            ("data.check_timeout_s", data.check_timeout_s != DataConfig.check_timeout_s),
        ):
            if is_set:
                yield f"{key} changes nothing in recipe {config.recipe}; it is for a task in a file"
    if not mixes:
        for name, value in (
            ("sets", data.sets),
            ("prefill", data.prefill),
            ("allow_overlap", data.allow_overlap and not is_own),
            ("difficulty_key", data.difficulty_key),
            ("tools_key", data.tools_key != DataConfig.tools_key),
        ):
            if value:
                yield f"data.{name} changes nothing in recipe {config.recipe}; it is of recipe custom"
    yield from _difficulty_mistakes(data)
    yield from _set_mistakes(data)
    paths = [set_.path for set_ in data.sets] or ([data.path] if data.path else [])
    if data.split != DataConfig.split and paths and all(Path(path).is_file() for path in paths):
        yield f"data.split is {data.split!r}, and {paths[0]} is a file; a split is of a directory"
    for set_ in eval_data_sets(config).values():
        yield from _option_mistakes(data, set_, "eval.data")
        if set_.tools_key is not None and not mixes:
            yield f"tools_key of eval.data changes nothing in recipe {config.recipe}; it is of recipe custom"
    data.prompt_format  # noqa: B018 (raises for unusable options)


def _option_mistakes(data: DataConfig, data_set: DataSetConfig, of: str) -> Iterator[str]:
    """Unusable options of a data set. ``of``: the key that has it, in messages."""
    try:
        set_data(data, data_set).prompt_format  # noqa: B018 (raises for unusable options)
    except ConfigError as error:
        yield f"data set {data_set.name!r} of {of}: {error}"
    if data_set.split is not None and os.path.isfile(data_set.path):
        yield f"data set {data_set.name!r} of {of} has split {data_set.split!r}, and {data_set.path} is a file"
    if data_set.prompt_key == "":
        yield f"data set {data_set.name!r} of {of} has an empty prompt_key; name a column"


def _set_mistakes(data: DataConfig) -> Iterator[str]:
    """Data sets with unusable names, paths or options."""
    if data.sets and data.path:
        yield f"data.path is {data.path!r}, and there are data.sets too; leave one of them out"
    if len(data.sets) > MAX_SETS:
        yield f"there are {len(data.sets)} data sets; use at most {MAX_SETS}"
        return
    names: set[str] = set()
    paths: dict[tuple[str, str], str] = {}
    for set_ in data.sets:
        if NAME.fullmatch(set_.name) is None:
            yield (
                f"a data set has the name {set_.name!r:.80}; use 1 to {MAX_NAME_CHARS} letters, digits, - and _, the "
                "first a letter or a digit (a path with = in it is written ./PATH)"
            )
        if set_.name in names:
            yield f"two data sets have the name {set_.name!r}; give each one of its own"
        if not set_.path:
            yield f"data set {set_.name!r} has no path; use {FORM}"
        place = (os.path.realpath(set_.path), set_data(data, set_).split)
        if set_.path and place in paths:
            yield (
                f"data sets {paths[place]!r} and {set_.name!r} have the same path {set_.path}, and prompts would count "
                "twice; use one with the sum of their weights"
            )
        yield from _option_mistakes(data, set_, "data")
        names.add(set_.name)
        paths[place] = set_.name


def _difficulty_mistakes(data: DataConfig) -> Iterator[str]:
    """Limits of the difficulty that exclude all rows, and its options that have no effect."""
    least, most = data.difficulties
    if not data.difficulty_key:
        if data.order == "easy_first":
            yield "data.order is easy_first, and data.difficulty_key is empty; name the column"
        return
    if least > most:
        yield f"data.min_difficulty is {least:g}, above data.max_difficulty ({most:g}); no row is left"
    if data.min_difficulty is data.max_difficulty is None and data.order != "easy_first":
        yield (
            "data.difficulty_key is set and changes nothing; set data.min_difficulty, data.max_difficulty or "
            "data.order easy_first too"
        )
