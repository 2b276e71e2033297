"""What a row must have: a prompt, as text or as messages, and the answer and further columns for the reward."""

from collections.abc import Mapping
from typing import NewType

from flowrt.errors import ConfigError

ROLES = ("system", "developer", "user", "assistant", "tool")
USUAL = ("role", "content")
MAX_NAMES = 200
"""Maximum length of the list of columns in an error message, in characters."""
Messages = tuple[tuple[str, str], ...]
"""A conversation: the role and the content of each message."""
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


def prompt_or_messages(row: Mapping[str, object], key: str, where: str, *, prefill: bool) -> tuple[str, Messages]:
    """A prompt as text, with no messages, or as messages, with no text.

    Args:
        row: the columns.
        key: the prompt's column.
        where: place of the row, the beginning of an error message.
        prefill: whether a conversation may end with the beginning of the response, in a message of role assistant.

    Raises ConfigError if the prompt is missing, empty, or neither text nor valid messages.
    """
    value = find(row, key)
    if isinstance(value, str):
        return text_prompt(row, key, where), ()
    if isinstance(value, list):
        return "", _messages(value, key, where, prefill=prefill)
    if value is MISSING:
        advice = "; name one of them with --data.prompt-key" if row else ""
        raise ConfigError(f"{where} has no field {key!r}; it has {_names(row)}{advice}")
    raise ConfigError(f"{where}: field {key!r} is {type(value).__name__}, not text or a list of messages")


def _messages(values: list[object], key: str, where: str, *, prefill: bool) -> Messages:
    messages = []
    for place, value in enumerate(values):
        if isinstance(value, dict) and len(value) == len(USUAL):  # common case, without names for errors
            usual, content = value.get("role"), value.get("content")
            if usual in ROLES and isinstance(content, str) and content.isascii():
                messages.append((usual, content))
                continue
        here = f"{key}[{place}]"
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: field {here!r} is {type(value).__name__}, not a message with role and content")
        more = [str(name) for name, part in value.items() if name not in ("role", "content") and part is not None]
        if more:
            raise ConfigError(
                f"{where}: field {here!r} has {_names(dict.fromkeys(more))}; only role and content are read"
            )
        role = text(value, "role", f"{where}: in {here!r}: row")
        if role not in ROLES:
            raise ConfigError(f"{where}: field '{here}.role' is {role[:40]!r}; use one of {', '.join(ROLES)}")
        content = find(value, "content")
        if not isinstance(content, str):
            kind = "missing" if content is MISSING else type(content).__name__
            raise ConfigError(f"{where}: field '{here}.content' is {kind}, not text (only text is supported)")
        _check_encodable(content, f"{here}.content", where)
        messages.append((role, content))
    if not any(content.strip() for _, content in messages):
        raise ConfigError(f"{where}: field {key!r}, the prompt, is empty; leave the row out")
    if messages[-1][0] == "assistant" and not prefill:
        raise ConfigError(
            f"{where}: field {key!r} ends with a message of role assistant; leave it out, or set data.prefill if it is "
            "the beginning of the response"
        )
    return tuple(messages)


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
