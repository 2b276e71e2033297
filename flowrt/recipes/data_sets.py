"""Several weighted data sets: parsing of the flag ``--data``.

A value of ``--data`` that begins with a name and ``=`` is one of several sets; any other is the path of the only set::

    --data rows.jsonl
    --data math=a.jsonl:0.7 --data code=dir/:0.3
    --data "math=a.jsonl:0.7 prompt_key=problem answer_key=solution"

Options follow the path; a value reaches to the next option, and may have spaces in it.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import fields, replace

from flowrt.errors import ConfigError, suggested
from flowrt.recipes.data_config import DataConfig, DataSetConfig

FORM = "NAME=PATH:WEIGHT"
OPTIONS = tuple(field.name for field in fields(DataSetConfig) if field.name not in ("name", "path", "weight"))
"""Keys of a data set that stand in place of those of ``data``."""
FORMAT = ("system_prompt", "chat_template", "chat_template_kwargs", "tools")
"""Those that say how prompts become tokens."""
_OPTION = re.compile(rf"\s+({'|'.join(OPTIONS + tuple(option.replace('_', '-') for option in OPTIONS))})=")
_UNKNOWN = re.compile(r"\s([A-Za-z_-]+)=")


def parse_data(flags: Sequence[str]) -> tuple[str, list[dict[str, str | float]]]:
    """Parse the values of ``--data``. Raises ConfigError for a malformed value, and for several without names.

    Args:
        flags: the values, at least one.

    Returns:
        The path of the only data set, else empty, and the tables `[[data.sets]]` of several, else empty.
    """
    if empty := [flag for flag in flags if not flag or flag.startswith("--")]:
        raise ConfigError(f"--data needs a value, a path or {FORM}, not {empty[0]!r:.40}")
    entries = [split_options(flag, f"--data {flag!r:.80}") for flag in flags]
    without_name = [at for at, (text, _) in enumerate(entries) if not _is_set(text)]
    if not without_name:
        return "", [{**_table(text), **options} for text, options in entries]
    at = without_name[0]
    if len(flags) > 1:
        raise ConfigError(f"--data {flags[at]!r:.80} is one of {len(flags)} data sets and has no name; use {FORM}")
    path, options = entries[at]
    if options:
        key = next(iter(options))
        raise ConfigError(
            f"--data {flags[at]!r:.80} has {key}, which is an option of one of several data sets, by NAME=PATH; use "
            f"--data.{key.replace('_', '-')}"
        )
    return path, []


def split_options(text: str, what: str) -> tuple[str, dict[str, str]]:
    """The beginning of a value of ``--data`` or ``eval.data``, and its options.

    Args:
        text: the value.
        what: the value in messages.

    Raises ConfigError for an option that is unknown or given twice.
    """
    head, *rest = _OPTION.split(text)
    names = [name.replace("-", "_") for name in rest[::2]]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{what} has {twice[0]} twice; leave one out")
    path = head.partition("=")[2]
    if (unknown := _UNKNOWN.search(path)) and not os.path.exists(path):
        raise ConfigError(
            f"{what} has {unknown[1]!r}, which is no option of a data set{suggested(unknown[1], OPTIONS)}"
        )
    return head, dict(zip(names, rest[1::2], strict=True))


def options_text(data_set: DataSetConfig) -> str:
    """The options of a data set as `split_options` reads them, each after a space."""
    given = {name: getattr(data_set, name) for name in OPTIONS}
    return "".join(f" {name}={value}" for name, value in given.items() if value is not None)


def set_data(data: DataConfig, data_set: DataSetConfig) -> DataConfig:
    """The options by which the rows of one of several data sets are read."""
    own = {name: value for name in OPTIONS if (value := getattr(data_set, name)) is not None}
    return replace(data, **own) if own else data


def has_own_format(data_set: DataSetConfig) -> bool:
    """Whether the prompts of a data set become tokens in another way than those of the run."""
    return any(getattr(data_set, name) is not None for name in FORMAT)


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
    return tuple(set_.name for set_ in data.sets)


def described(sets: Sequence[DataSetConfig]) -> str:
    """The sets as values of ``--data``, separated by spaces; "none" if there are none."""
    entries = [(f"{set_.name}={set_.path}:{set_.weight:g}", options_text(set_)) for set_ in sets]
    return " ".join(f'"{text}{options}"' if options else text for text, options in entries) or "none"
