"""The columns of a row as JSON, from which values of all types that data files have come back as what they were.

JSON has no bytes, dates, decimals and tuples; Arrow files do. Such a value is written as ``{"\\0": [type, content]}``.
"""

import base64
import json
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from importlib import import_module
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

PLAIN = frozenset((str, int, float, bool, type(None)))
TAG = "\0"


class NoColumnType(Exception):
    """A value of a type that cannot be passed on; the text is the name of the type."""


def encode_row(columns: Mapping[str, object]) -> str:
    """The columns as JSON. Raises NoColumnType for a value of a type that `decode_row` cannot make again."""
    return json.dumps(_plain(dict(columns)))


def decode_row(row: str | bytes) -> dict[str, Any]:
    """The columns of a row that `encode_row` has written."""
    columns: dict[str, Any] = json.loads(row, object_hook=_decoded)
    return columns


def json_text(value: object, *, sort_keys: bool = False) -> str:
    """A value as plain JSON: bytes in base64, dates in ISO 8601, tuples as lists, all others by their text."""
    return json.dumps(value, sort_keys=sort_keys, default=_as_text)


def _as_text(value: object) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, date | time) else str(value)


def _plain(value: object) -> object:
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, list):
        return value if set(map(type, value)) <= PLAIN else [_plain(element) for element in value]
    if isinstance(value, dict):
        if TAG in value or not all(type(name) is str for name in value):
            return _tagged("dict", [[_plain(name), _plain(field)] for name, field in value.items()])
        return (
            value if set(map(type, value.values())) <= PLAIN else {name: _plain(field) for name, field in value.items()}
        )
    if (written := ENCODED.get(kind.__name__)) is None or not isinstance(value, written[0]):
        raise NoColumnType(kind.__name__)
    return _tagged(kind.__name__, written[1](value))


def _tagged(kind: str, content: object) -> dict[str, object]:
    return {TAG: [kind, content]}


def _moment(value: Any) -> list[str]:
    zone = value.tzinfo
    return [value.isoformat(), str(getattr(zone, "key", "") or getattr(zone, "zone", "") or "")]


ENCODED: Mapping[str, tuple[type, Callable[[Any], object]]] = {
    "bytes": (bytes, lambda value: base64.b64encode(value).decode()),
    "tuple": (tuple, lambda value: [_plain(element) for element in value]),
    "datetime": (datetime, _moment),
    "Timestamp": (datetime, _moment),  # of pandas, for nanoseconds
    "date": (date, date.isoformat),
    "time": (time, time.isoformat),
    "timedelta": (timedelta, lambda value: [value.days, value.seconds, value.microseconds]),
    "Timedelta": (timedelta, lambda value: value.isoformat()),  # of pandas
    "Decimal": (Decimal, str),
    "UUID": (UUID, str),
}
"""By the name of a type: a class of it, and how its values are written."""


def _decoded(table: dict[str, Any]) -> object:
    if len(table) != 1 or TAG not in table:
        return table
    kind, content = table[TAG]
    match kind:
        case "bytes":
            return base64.b64decode(content)
        case "tuple":
            return tuple(content)
        case "dict":
            return dict(content)
        case "datetime" | "Timestamp":
            moment = _pandas().Timestamp(content[0]) if kind == "Timestamp" else datetime.fromisoformat(content[0])
            return moment.astimezone(ZoneInfo(content[1])) if content[1] else moment
        case "date":
            return date.fromisoformat(content)
        case "time":
            return time.fromisoformat(content)
        case "timedelta":
            return timedelta(*content)
        case "Timedelta":
            return _pandas().Timedelta(content)
        case "UUID":
            return UUID(content)
    return Decimal(content)


def _pandas() -> Any:
    return import_module("pandas")
