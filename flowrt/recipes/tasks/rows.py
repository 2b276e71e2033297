"""Rows of text columns, all read at once, for recipes that check answers when the data is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig
from flowrt.recipes.data.base import Mistakes
from flowrt.recipes.data.columns import as_columns, text, text_prompt
from flowrt.recipes.data.files import open_rows


@dataclass(frozen=True, slots=True)
class Row:
    """The text of the named columns of a row, and its place (file and line), the beginning of an error message."""

    where: str
    values: tuple[str, ...]


def data_path(config: RunConfig) -> Path:
    """The path ``data.path``. Raises ConfigError if it is empty."""
    if not config.data.path:
        raise ConfigError(f"recipe {config.recipe} reads its problems from a file; give one with --data FILE.jsonl")
    return Path(config.data.path)


def split_rows(path: Path, split: str, keys: Sequence[str], held_out: int) -> tuple[list[Row], list[Row]]:
    """The rows to train on, and the last ``held_out`` rows.

    Raises ConfigError as `read_rows`, and if no row is left to train on.
    """
    rows = read_rows(path, keys, split)
    first = first_held_out(len(rows), held_out, path)
    return rows[:first], rows[first:]


def first_held_out(rows: int, held_out: int, path: Path) -> int:
    """Index of the first held-out row. Raises ConfigError if no row is left to train on.

    Args:
        rows: number of rows.
        held_out: number of rows that are held out, the last ones.
        path: the data file in the message.
    """
    if rows <= held_out:
        raise ConfigError(
            f"data file {path} has {rows} rows, no more than data.eval_prompts={held_out} that are held out; "
            "set it to fewer than there are rows, to 0, or name other data to evaluate with eval.data"
        )
    return rows - held_out


def read_rows(path: Path, keys: Sequence[str], split: str = "train") -> list[Row]:
    """The named text columns of every row of a data set.

    Args:
        path: file or directory.
        keys: the columns, that of the prompt first.
        split: the split that is read from a directory.

    Raises ConfigError if the data cannot be read or is empty, and for the first ten rows that are no objects, lack a
    column, or have an empty prompt.
    """
    rows, usable, mistakes = open_rows(path, split), [], Mistakes()
    for index, row in enumerate(rows.scan()):
        try:
            if isinstance(row, ConfigError):
                raise row
            where = rows.where(index)
            columns = as_columns(row, where)
            values = [text_prompt(columns, keys[0], where), *(text(columns, key, where) for key in keys[1:])]
            usable.append(Row(where, tuple(values)))
        except ConfigError as error:
            mistakes.add(error)
    mistakes.report()
    return usable
