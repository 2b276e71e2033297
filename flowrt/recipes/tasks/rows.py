"""Rows of two text columns, all read at once; for recipes whose answers are checked when the data is read."""

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
    """The text of the named columns of a row, and its file and line, with which an error message begins."""

    where: str
    values: tuple[str, ...]


def data_path(config: RunConfig) -> Path:
    """The data file of a recipe that reads one. Raises ConfigError if none is given."""
    if not config.data.path:
        raise ConfigError(
            f"recipe {config.recipe} reads its problems from a file; give one with --data.path FILE.jsonl"
        )
    return Path(config.data.path)


def split_rows(path: Path, split: str, keys: Sequence[str], held_out: int) -> tuple[list[Row], list[Row]]:
    """The rows to train on, and the last ``held_out`` rows, for evaluation. Raises ConfigError, see `read_rows`."""
    rows = read_rows(path, keys, split)
    first = first_held_out(len(rows), held_out, path)
    return rows[:first], rows[first:]


def first_held_out(rows: int, held_out: int, path: Path) -> int:
    """Index of the first held-out row. Raises ConfigError if none would be left to train on."""
    if rows <= held_out:
        raise ConfigError(f"data file {path} has {rows} rows, no more than data.eval_prompts={held_out}")
    return rows - held_out


def read_rows(path: Path, keys: Sequence[str], split: str = "train") -> list[Row]:
    """The named text columns of every row of a data set; the first of them is the prompt.

    Raises ConfigError if the data cannot be read or is empty, and for the first ten rows that lack a column, whose
    prompt is empty, or that are no rows.
    """
    rows, found, mistakes = open_rows(path, split), [], Mistakes()
    for index, row in enumerate(rows.scan()):
        try:
            if isinstance(row, ConfigError):
                raise row
            where = rows.where(index)
            columns = as_columns(row, where)
            values = [text_prompt(columns, keys[0], where), *(text(columns, key, where) for key in keys[1:])]
            found.append(Row(where, tuple(values)))
        except ConfigError as error:
            mistakes.add(error)
    mistakes.report()
    return found
