"""Records to what MessagePack packs and back, field by field: code for each kind, compiled when it is first used.

The controller spends much of its time here. A path is only put together once a field is wrong. Each function gets,
beside what it works on, the whole numbers that the message has repeated so far (see `repeats`).
"""

import dataclasses
import struct
from collections.abc import Callable
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from flowrt.wire.messages import MESSAGES
from flowrt.wire.misfit import Misfit
from flowrt.wire.records import MAX_SIGNAL_BYTES, Alike
from flowrt.wire.repeats import Said, heard, repeated, say

Encoder = Callable[[Any, Said], Any]
Decoder = Callable[[Any, Said], Any]
TAGS: dict[type, int] = {kind: tag for tag, kind in enumerate(MESSAGES)}
_ITEM_BYTES = 8
_LEAST = -(2**63)
_SCALARS = (int, float, str, bytes, bool)
# Alone, bytes are a rendezvous key: no message can carry a tensor.
_OVER = {int: f" or not {_LEAST} <= {{item}} < {-_LEAST}", bytes: f" or len({{item}}) > {MAX_SIGNAL_BYTES}"}
_TEXT = {str}
_NO_BYTES = b""
_NO_VALUES = ()

_FEW: dict[str, Any] = {"nothing": _NO_VALUES, "no_bytes": _NO_BYTES, "least": _LEAST, "most": -_LEAST - 1}
for _code in "qd":
    _one = struct.Struct(f"<{_code}")
    _FEW |= {f"pack_{_code}": _one.pack, f"unpack_{_code}": _one.unpack}


# ---- records: compiled


@cache
def record_encoder(kind: type) -> Encoder:
    """A function from a record to the tuple that is packed for it, a message's tag in front."""
    lines = ["def compiled(value, said):", "    if type(value) is not kind:", "        wrong(value, kind)"]
    scope: dict[str, Any] = {**_FEW, "kind": kind, "wrong": _wrong, "scalar": _scalar, "tag": TAGS.get(kind)}
    items = ["tag"] if kind in TAGS else []
    for number, (name, hint) in enumerate(_fields(kind)):
        if hint in _SCALARS:
            scope[f"type{number}"] = hint
            lines += [
                f"    item{number} = value.{name}",
                f"    if type(item{number}) is not type{number}:",
                f"        item{number} = scalar(item{number}, type{number})",
            ]
        else:
            scope[f"encode{number}"], few = _encoder(hint), _few_encoded(hint, number, scope)
            few += _one_for_all(hint)
            lines += [f"    item = value.{name}", f"    item{number} = {few}encode{number}(item, said)"]
        items.append(f"item{number}")
    lines += [f"    return ({''.join(f'{item}, ' for item in items)})"]
    return _compiled(lines, scope)


@cache
def record_decoder(kind: type) -> Decoder:
    """A function from what was unpacked, a message's tag in front, to the record. Raises Misfit."""
    fields = _fields(kind)
    names = [name for name, _ in fields]
    items = (["tag"] if kind in TAGS else []) + [f"item{number}" for number in range(len(fields))]
    lines = [
        "def compiled(raw, said):",
        f"    if type(raw) is not tuple or len(raw) != {len(items)}:",
        f"        raise Misfit('an array of {len(fields)} fields')",
        f"    {''.join(f'{item}, ' for item in items)} = raw" if items else "    pass",
    ]
    scope: dict[str, Any] = {**_FEW, "kind": kind, "Misfit": Misfit, "misfit_of": _misfit_of}
    for number, (name, hint) in enumerate(fields):
        if hint in _SCALARS:
            scope[f"type{number}"] = hint
            over = _OVER.get(hint, "").format(item=f"item{number}")
            lines += [
                f"    if type(item{number}) is not type{number}{over}:",
                f"        raise misfit_of(item{number}, type{number}).within('.{name}')",
            ]
        else:
            scope[f"decode{number}"], few = _decoder(hint), _few_decoded(hint)
            lines += [
                f"    item = item{number}",
                "    try:",
                f"        item{number} = {few}{_all_of_one(hint, names)}decode{number}(item, said)",
                "    except Misfit as misfit:",
                f"        raise misfit.within('.{name}')",
            ]
    lines += [f"    return kind({', '.join(f'item{number}' for number in range(len(fields)))})"]
    return _compiled(lines, scope)


def _few_encoded(hint: Any, number: int, scope: dict[str, Any]) -> str:
    """What most fields hold is spared a call: one packed number, one text, one record, or nothing at all."""
    if get_origin(hint) is Annotated:
        one = f"pack_{hint.__metadata__[0]}(item[0]) if type(item) is tuple and len(item) == 1 else "
        return f"no_bytes if item is nothing else {one}"
    if get_args(hint)[-1:] != (Ellipsis,):
        return ""
    inner, few = get_args(hint)[0], "item if item is nothing else "
    if inner is str:
        return f"{few}item if type(item) is tuple and len(item) == 1 and type(item[0]) is str else "
    if dataclasses.is_dataclass(inner):
        scope[f"record{number}"] = record_encoder(inner)  # type: ignore[arg-type]
        return f"{few}(record{number}(item[0], said),) if type(item) is tuple and len(item) == 1 else "
    return few


def _few_decoded(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        one = f"unpack_{hint.__metadata__[0]}(item) if type(item) is bytes and len(item) == {_ITEM_BYTES} else "
        return f"nothing if item is no_bytes else {one}"
    if get_args(hint)[-1:] != (Ellipsis,):
        return ""
    few = "item if item is nothing else "
    if get_args(hint)[0] is str:
        return f"{few}item if type(item) is tuple and len(item) == 1 and type(item[0]) is str else "
    return few


def _one_for_all(hint: Any) -> str:
    """A column of one and the same number is that number, for as many as another field of the record has."""
    like = _alike(hint)
    if like is None:
        return ""
    same = f"type(item) is tuple and len(item) > 1 and item[0] == item[-1] and len(item) == len(value.{like})"
    number = "item.count(item[0]) == len(item) and type(item[0]) is int and least <= item[0] <= most"
    return f"item[0] if {same} and {number} else "


def _all_of_one(hint: Any, names: list[str]) -> str:
    like = _alike(hint)
    if like is None:
        return ""  # the field that it is like comes before it
    return f"(item,) * len(item{names.index(like)}) if type(item) is int and least <= item <= most else "


def _alike(hint: Any) -> str | None:
    return next((one.field for one in getattr(hint, "__metadata__", ()) if isinstance(one, Alike)), None)


def _fields(kind: type) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(kind)]


def _compiled(lines: list[str], scope: dict[str, Any]) -> Callable[[Any, Said], Any]:
    exec("\n".join(lines), scope)  # noqa: S102 (names come from our own declarations, never from a peer)
    function: Callable[[Any, Said], Any] = scope["compiled"]
    return function


# ---- everything else: composed


def _wrong(value: Any, hint: type) -> None:
    raise TypeError(f"expected {hint.__name__}, got {type(value).__name__} {value!r:.80}")


def _scalar(value: Any, hint: type) -> Any:
    if hint is float and type(value) is int:
        return float(value)
    return value if type(value) is hint else _wrong(value, hint)


def _sequence(values: Any) -> Any:
    if not isinstance(values, tuple | list):
        raise TypeError(f"expected tuple, got {type(values).__name__} {values!r:.80}")
    return values


def _encoder(hint: Any) -> Encoder:
    if get_origin(hint) is Annotated:
        return _packed_encoder(hint.__metadata__[0])
    if dataclasses.is_dataclass(hint):
        return record_encoder(hint)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        return _tuple_encoder(get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        inner = _encoder(next(argument for argument in get_args(hint) if argument is not NoneType))
        return lambda value, said: None if value is None else inner(value, said)
    return lambda value, said: _scalar(value, hint)  # noqa: ARG005


def _packed_encoder(code: str) -> Encoder:
    whole = code == "q"

    def encode_packed(values: Any, said: Said) -> Any:
        if whole and (place := say(_sequence(values), said)) is not None:
            return place
        return struct.pack(f"<{len(_sequence(values))}{code}", *values) if values != () else _NO_BYTES

    return encode_packed


def _tuple_encoder(arguments: tuple[Any, ...]) -> Encoder:
    if arguments[-1] is not Ellipsis:
        encoders = [_encoder(argument) for argument in arguments]
        return lambda values, said: [one(value, said) for one, value in zip(encoders, _sequence(values), strict=True)]
    inner = _encoder(arguments[0])
    if arguments[0] is str:
        # All at once; one by one only to say which is wrong.
        return lambda values, said: (
            values if {*map(type, _sequence(values))} <= _TEXT else [inner(one, said) for one in values]
        )
    if get_origin(arguments[0]) is Annotated:
        return lambda values, said: [_NO_BYTES if one is _NO_VALUES else inner(one, said) for one in _sequence(values)]
    return lambda values, said: [inner(one, said) for one in _sequence(values)]


def _misfit_of(raw: Any, hint: type) -> Misfit:
    if hint is bytes and isinstance(raw, bytes):
        return Misfit(f"at most {MAX_SIGNAL_BYTES} bytes, not {len(raw)}")
    bits = " of 64 bits" if hint is int else ""
    return Misfit(f"{hint.__name__}{bits}, not {type(raw).__name__}")


def _decoder(hint: Any) -> Decoder:
    if get_origin(hint) is Annotated:
        return _packed_decoder(hint.__metadata__[0])
    if dataclasses.is_dataclass(hint):
        return record_decoder(hint)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        arguments = get_args(hint)
        return _many_decoder(arguments[0]) if arguments[-1] is Ellipsis else _fixed_decoder(arguments)
    if get_origin(hint) in (Union, UnionType):
        inner = _decoder(next(argument for argument in get_args(hint) if argument is not NoneType))
        return lambda raw, said: None if raw is None else inner(raw, said)

    def decode_scalar(raw: Any, said: Said) -> Any:  # noqa: ARG001
        if type(raw) is not hint or (hint is int and not _LEAST <= raw <= -_LEAST - 1):
            raise _misfit_of(raw, hint)
        return raw

    return decode_scalar


def _packed_decoder(code: str) -> Decoder:
    whole = code == "q"

    def decode_packed(raw: Any, said: Said) -> Any:
        if whole and (again := repeated(raw, said)) is not None:
            return again
        if type(raw) is not bytes or len(raw) % _ITEM_BYTES:
            raise Misfit("packed 8-byte items")
        values = struct.unpack(f"<{len(raw) // _ITEM_BYTES}{code}", raw) if raw else _NO_VALUES
        return heard(values, said) if whole else values

    return decode_packed


def _many_decoder(item: Any) -> Decoder:
    inner, texts, packed = _decoder(item), item is str, get_origin(item) is Annotated

    def decode_many(raw: Any, said: Said) -> Any:
        if type(raw) is not tuple:
            raise Misfit("an array")
        if not raw or (texts and {*map(type, raw)} == _TEXT):
            return raw
        known = len(said)
        try:
            if packed:
                return tuple([_NO_VALUES if one is _NO_BYTES else inner(one, said) for one in raw])
            return tuple([inner(one, said) for one in raw])
        except Misfit:
            del said[known:]
            return _one_by_one([inner] * len(raw), raw, said)

    return decode_many


def _fixed_decoder(arguments: tuple[Any, ...]) -> Decoder:
    decoders = [_decoder(argument) for argument in arguments]

    def decode_fixed(raw: Any, said: Said) -> Any:
        if type(raw) is not tuple or len(raw) != len(decoders):
            raise Misfit(f"an array of {len(decoders)}")
        return _one_by_one(decoders, raw, said)

    return decode_fixed


def _one_by_one(decoders: list[Decoder], raw: tuple[Any, ...], said: Said) -> tuple[Any, ...]:
    """Slower, but knows which item does not fit."""
    items = []
    for index, (decoder, one) in enumerate(zip(decoders, raw, strict=True)):
        try:
            items.append(decoder(one, said))
        except Misfit as misfit:
            raise misfit.within(f"[{index}]") from None
    return tuple(items)
