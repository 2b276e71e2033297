"""What a row must have: a prompt, as text or as messages, and the answer and further columns for the reward."""

import json
from collections.abc import Mapping
from typing import NewType

from flowrt.engines.prompts import USUAL, DataPrompt, Message, Messages, tools_text
from flowrt.errors import ConfigError

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_NAMES = 200
"""Maximum length of the list of columns in an error message, in characters."""
Missing = NewType("Missing", object)
MISSING = Missing(object())
"""The value of a column that a row does not have; JSON's null is None."""


def as_columns(row: object, where: str) -> Mapping[str, object]:
    """The columns of a row. Raises ConfigError if the row is not a mapping.

    Args:
        row: as `Rows.row` returns it.
        where: place of the row, the beginning of an error message; so in all functions here.
    """
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where} is {type(row).__name__}, not an object with fields")
    return row


def find(row: Mapping[str, object], key: str) -> object:
    """The value of column ``key``, else of the nested column by dotted key (``reward_model.answer``), else MISSING."""
    if key in row:
        return row[key]
    value: object = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


def text(row: Mapping[str, object], key: str, where: str) -> str:
    """A column of text. Raises ConfigError if the row has no such column, or its value is not valid text."""
    value = find(row, key)
    if value is MISSING:
        raise ConfigError(f"{where} has no field {key!r}; it has {_names(row)}")
    if not isinstance(value, str):
        raise ConfigError(f"{where}: field {key!r} is {type(value).__name__}, not text")
    _check_encodable(value, key, where)
    return value


def text_prompt(row: Mapping[str, object], key: str, where: str) -> str:
    """A prompt of text. Raises ConfigError as `text`, and if it is empty or only white space."""
    prompt = text(row, key, where)
    if not prompt.strip():
        raise ConfigError(f"{where}: field {key!r}, the prompt, is empty; leave the row out")
    return prompt


def prompt_of(
    row: Mapping[str, object], key: str, where: str, *, prefill: bool, tools_key: str = "", has_null_keys: bool = False
) -> DataPrompt:
    """A prompt: text, or messages, and the tools of a row.

    Args:
        row: the columns.
        key: the prompt's column.
        where: place of the row, the beginning of an error message.
        prefill: whether a conversation may end with the beginning of the response, in a message of role assistant.
        tools_key: the column of the tools, which a row need not have; empty: none.
        has_null_keys: whether nested nulls stand for keys that were not given, see `Rows.has_null_keys`.

    Raises ConfigError if the prompt is missing, empty, or neither text nor valid messages, or the tools are no tools.
    """
    value = find(row, key)
    tools = _tools(row, tools_key, where, has_null_keys=has_null_keys) if tools_key not in ("", key) else ""
    if isinstance(value, str):
        return DataPrompt(text_prompt(row, key, where), (), tools)
    if isinstance(value, list):
        return DataPrompt("", _messages(value, key, where, prefill=prefill, has_null_keys=has_null_keys), tools)
    if value is MISSING:
        advice = "; name one of them with --data.prompt-key" if row else ""
        raise ConfigError(f"{where} has no field {key!r}; it has {_names(row)}{advice}")
    raise ConfigError(f"{where}: field {key!r} is {type(value).__name__}, not text or a list of messages")


def _tools(row: Mapping[str, object], key: str, where: str, *, has_null_keys: bool) -> str:
    """The tools of a row as JSON text; empty if it has none."""
    value = find(row, key)
    if value is MISSING or value is None:
        return ""
    try:
        return tools_text(_without_nulls(value) if has_null_keys else value)
    except ValueError as error:
        raise ConfigError(
            f"{where}: field {key!r}, the tools, {error}; correct it, or name another column with data.tools_key (''"
            ": none)"
        ) from None


def _without_nulls(value: object) -> object:
    """A value without the keys of nested objects whose value is null."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(field) for key, field in value.items() if field is not None}
    if isinstance(value, list):
        return [_without_nulls(element) for element in value]
    return value


def _messages(values: list[object], key: str, where: str, *, prefill: bool, has_null_keys: bool) -> Messages:
    messages: list[Message] = []
    for place, value in enumerate(values):
        if isinstance(value, dict) and len(value) == len(USUAL):  # common case, without names for errors
            usual, content = value.get("role"), value.get("content")
            if usual in ROLES and isinstance(content, str) and content.isascii():
                messages.append((usual, content))
                continue
        here = f"{key}[{place}]"
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: field {here!r} is {type(value).__name__}, not a message with role and content")
        messages.append(_message(value, here, where, has_null_keys=has_null_keys))
    if not any(message[1].strip() for message in messages):
        raise ConfigError(f"{where}: field {key!r}, the prompt, is empty; leave the row out")
    if messages[-1][0] == "assistant" and not prefill:
        raise ConfigError(
            f"{where}: field {key!r} ends with a message of role assistant; leave it out, or set data.prefill if it is "
            "the beginning of the response"
        )
    return tuple(messages)


def _message(value: Mapping[str, object], here: str, where: str, *, has_null_keys: bool) -> Message:
    """A message with any fields; ``here``: its place in the row."""
    role = text(value, "role", f"{where}: in {here!r}: row")
    if role not in ROLES:
        raise ConfigError(f"{where}: field '{here}.role' is {role[:40]!r}; use one of {', '.join(ROLES)}")
    fields = {name: field for name, field in value.items() if field is not None}
    if has_null_keys:
        fields = {name: _without_nulls(field) for name, field in fields.items()}
    content = fields.get("content", "" if "tool_calls" in fields else MISSING)
    if not isinstance(content, str):
        kind = "missing" if "content" not in value else type(value["content"]).__name__
        raise ConfigError(f"{where}: field '{here}.content' is {kind}, not text (only text is supported)")
    _check_encodable(content, f"{here}.content", where)
    if fields.keys() == set(USUAL):
        return role, content
    try:
        whole = json.dumps(fields)
    except (TypeError, ValueError) as error:  # a value that JSON does not have, of Arrow
        raise ConfigError(f"{where}: field {here!r} has a value that JSON does not have: {error}") from None
    _check_encodable(json.dumps(fields, ensure_ascii=False), here, where)
    return role, content, whole


def _check_encodable(value: str, key: str, where: str) -> None:
    if value.isascii():
        return
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        raise ConfigError(
            f"{where}: field {key!r} has half a character ({half}, a lone surrogate) at place {error.start}; "
            "write the whole one, or leave it out"
        ) from None


def _names(row: Mapping[str, object]) -> str:
    names = ", ".join(map(repr, row)) or "none"
    return names if len(names) <= MAX_NAMES else f"{names[:MAX_NAMES]}…"
