"""A scan of all prompts of a data set: batch by batch, in order, each prompt checked.

Fast path: msgspec decodes lines of JSON into only the fields that are needed. If that fails for a batch, its lines are
decoded one by one; if it fails for a line, the general path (`checked`) reads the row and reports its errors.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Any, Literal

import msgspec

from flowrt.engines.prompts import DataPrompt
from flowrt.errors import ConfigError
from flowrt.recipes.data.base import Rows
from flowrt.recipes.data.columns import MISSING, ROLES, as_columns, find, prompt_of
from flowrt.recipes.data.json_lines import JsonLines
from flowrt.recipes.data_config import DataConfig

BATCH = 1024
"""Rows that are decoded together."""
_DIGITS_AS_ZERO = bytes(ord("0") if chr(byte).isdigit() else byte for byte in range(128)) + bytes(range(128, 256))


@dataclass(slots=True)
class PromptBatch:
    """Consecutive rows of a data set.

    Attributes:
        first: index of the first row.
        prompts: the prompt of each row; None if the row cannot be used.
        without_answer: indices, in the data set, of usable rows without an answer.
        mistakes: the errors of the rows that cannot be used, in order.
    """

    first: int
    prompts: list[DataPrompt | None] = field(default_factory=list)
    without_answer: list[int] = field(default_factory=list)
    mistakes: list[ConfigError] = field(default_factory=list)

    def add(self, prompt: DataPrompt, *, has_answer: bool) -> None:
        """Add the prompt of the next row."""
        if not has_answer:
            self.without_answer.append(self.first + len(self.prompts))
        self.prompts.append(prompt)


def scan_prompts(rows: Rows, data: DataConfig) -> Iterator[PromptBatch]:
    """The prompts of all rows, in order. Errors are in the batches, and not raised.

    Args:
        rows: all rows of the data set.
        data: options by which they are read.
    """
    decode = _decoder(data)
    first = 0
    for part in rows.parts():
        if decode is not None and isinstance(part, JsonLines):
            yield from _of_lines(part, first, decode, rows, data)
        else:
            yield from _of_rows(part, first, rows, data)
        first += len(part)


def _of_rows(part: Rows, first: int, rows: Rows, data: DataConfig) -> Iterator[PromptBatch]:
    source = part.scan()
    while block := list(islice(source, BATCH)):
        batch = PromptBatch(first)
        for row in block:
            _add_general(batch, row, rows, data)
        first += len(block)
        yield batch


def _add_general(batch: PromptBatch, row: object, rows: Rows, data: DataConfig) -> None:
    """Add a row, or its error, by the general path."""
    try:
        if isinstance(row, ConfigError):
            raise row
        columns, prompt = checked(row, data, rows, batch.first + len(batch.prompts))
    except ConfigError as error:
        batch.mistakes.append(error)
        batch.prompts.append(None)
    else:
        batch.add(prompt, has_answer=find(columns, data.answer_key) is not MISSING)


def checked(row: object, data: DataConfig, rows: Rows, index: int) -> tuple[Any, DataPrompt]:
    """The columns and the prompt of a row. Raises ConfigError, with the place of the row, if it cannot be used."""
    try:
        columns = as_columns(row, "")
        return columns, row_prompt(columns, data, "", has_null_keys=rows.has_null_keys)
    except ConfigError:  # again, with the place, which is only formatted for errors
        where = rows.where(index)
        columns = as_columns(row, where)
        return columns, row_prompt(columns, data, where, has_null_keys=rows.has_null_keys)


def row_prompt(columns: Mapping[str, object], data: DataConfig, where: str, *, has_null_keys: bool) -> DataPrompt:
    """The prompt of a row, as `prompt_of` with the options of the data."""
    return prompt_of(
        columns,
        data.prompt_key,
        where,
        prefill=data.prefill,
        tools_key=data.tools_key,
        has_null_keys=has_null_keys,
    )


# ---- lines of JSON


def _of_lines(part: JsonLines, first: int, decode: "_Decoder", rows: Rows, data: DataConfig) -> Iterator[PromptBatch]:
    for start in range(0, len(part), BATCH):
        count = min(BATCH, len(part) - start)
        decoded = decode.block(part.block(start, count), count)
        if decoded is None:
            decoded = [decode.line(part.line(start + at)) for at in range(count)]
        batch = PromptBatch(first + start)
        prompts = decode.prompts(decoded, prefill=data.prefill)
        if None in prompts:
            for at, (row, prompt) in enumerate(zip(decoded, prompts, strict=True)):
                if prompt is None:
                    _add_general(batch, _read(part, start + at), rows, data)
                else:
                    batch.add(prompt, has_answer=decode.has_answer(row))
        else:
            batch.prompts = prompts
            batch.without_answer = [first + start + at for at in decode.without_answer(decoded)]
        yield batch


def _read(part: Rows, index: int) -> object:
    """A row, or its ConfigError."""
    try:
        return part.row(index)
    except ConfigError as error:
        return error


_ESCAPED = re.compile(r'[\x00-\x1f"\\]')


class _Decoder:
    """Decodes the prompt, and whether there is an answer, from lines of JSON."""

    def __init__(
        self,
        kind: type[Any],
        prompt: Callable[[Any], Any],
        answer: Callable[[Any], Any],
        tools: Callable[[Any], Any] | None,
    ) -> None:
        """The type of a row, and functions that read its columns; ``tools``: None if no column has tools."""
        self._json = msgspec.json.Decoder(kind)
        self._prompt = prompt
        self._answer = answer
        self._tools = tools

    def block(self, block: bytes, count: int) -> list[Any] | None:
        """The rows of consecutive lines; None if not all of them can be decoded."""
        try:
            rows = self._json.decode_lines(block)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return rows if len(rows) == count and _is_readable(block) else None

    def line(self, line: bytes) -> Any | None:
        """The row of a line; None if it cannot be decoded."""
        try:
            row = self._json.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return row if _is_readable(line) else None

    def prompts(self, rows: list[Any], *, prefill: bool) -> list[DataPrompt | None]:
        """The prompt of each row; None if the general path has to check it."""
        prompts: list[DataPrompt | None] = []
        for value in [None if row is None else self._prompt(row) for row in rows]:
            if type(value) is list and value and (prefill or value[-1].role != "assistant"):
                messages = tuple([(message.role, message.content) for message in value])
                last = messages[-1][1]
                has_text = (last and not last.isspace()) or not all(not text or text.isspace() for _, text in messages)
                prompts.append(DataPrompt("", messages) if has_text else None)
            elif type(value) is str and value and not value.isspace():
                prompts.append(DataPrompt(value))
            else:
                prompts.append(None)
        if self._tools is not None:
            for at, row in enumerate(rows):
                if row is not None and self._tools(row) is not msgspec.UNSET:
                    prompts[at] = None
        return prompts

    def has_answer(self, row: Any) -> bool:
        """Whether a row has an answer."""
        return self._answer(row) is not msgspec.UNSET

    def without_answer(self, rows: list[Any]) -> list[int]:
        """The positions, in this list, of the rows without an answer."""
        return [at for at, answer in enumerate(map(self._answer, rows)) if answer is msgspec.UNSET]


def _is_readable(text: bytes) -> bool:
    """Whether Python could parse the fields that msgspec skips: they are UTF-8, and no integer has too many digits."""
    most = sys.get_int_max_str_digits()
    if most and len(text) > most and b"0" * most in text.translate(_DIGITS_AS_ZERO):
        return False
    try:
        return text.isascii() or bool(text.decode())
    except UnicodeDecodeError:
        return False


def _decoder(data: DataConfig) -> _Decoder | None:
    """The decoder for a configuration's columns; None if their names conflict (``a`` and ``a.b``), or one cannot be the
    name of a field."""
    keys = [data.prompt_key, data.answer_key]
    if data.tools_key not in ("", data.prompt_key):
        keys.append(data.tools_key)
    heads = [name for key in keys for name in {key, key.partition(".")[0]}]
    if len(set(heads)) != len(heads) or not all(map(is_decodable, keys)):
        return None
    message = msgspec.defstruct(
        "Message", [("role", Literal[ROLES]), ("content", str)], forbid_unknown_fields=True, gc=False
    )
    prompt_fields, prompt = column_fields("prompt", data.prompt_key, str | list[message])  # type: ignore[valid-type]
    answer_fields, answer = column_fields("answer", data.answer_key, msgspec.Raw)
    if len(keys) == 2:
        return _Decoder(row_type([*prompt_fields, *answer_fields]), prompt, answer, None)
    tools_fields, tools = column_fields("tools", data.tools_key, msgspec.Raw)
    return _Decoder(row_type([*prompt_fields, *answer_fields, *tools_fields]), prompt, answer, tools)


def is_decodable(key: str) -> bool:
    """Whether the fields of a `row_type` may have this key: msgspec takes no name that JSON would have to escape."""
    return all(key.split(".")) and not _ESCAPED.search(key)


def row_type(fields: Sequence[tuple[str, str, Any]]) -> type[Any]:
    """The type of a row with these fields (name, key, type), any of which may be missing (`msgspec.UNSET`)."""
    return msgspec.defstruct(
        "Row",
        [(name, kind | msgspec.UnsetType, msgspec.UNSET) for name, _, kind in fields],
        rename={name: key for name, key, _ in fields},
        gc=False,
    )


def column_fields(name: str, key: str, kind: Any) -> tuple[list[tuple[str, str, Any]], Callable[[Any], Any]]:
    """The fields of a column (name, key, type), and a function that reads it from a row: the column ``key``, else the
    nested column."""
    head, *parts = key.split(".")
    if not parts:
        return [(name, key, kind)], attrgetter(name)
    nested = kind
    for part in reversed(parts):
        nested = msgspec.defstruct(
            "Nested", [("value", nested | msgspec.UnsetType, msgspec.UNSET)], rename={"value": part}, gc=False
        )

    def read(row: Any) -> Any:
        value = getattr(row, name)
        if value is not msgspec.UNSET:
            return value
        value = getattr(row, f"{name}_nested")
        for _ in parts:
            if value is msgspec.UNSET:
                break
            value = value.value
        return value

    return [(name, key, kind), (f"{name}_nested", head, nested)], read
