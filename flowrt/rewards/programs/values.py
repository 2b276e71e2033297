"""Values between two processes, as JSON: copies of plain values, references to all other objects.

| JSON | value |
|---|---|
| null, true, 1, 1.5, "a" | itself |
| ["l", items], ["t", items], ["s", items], ["f", items], ["d", keys, values] | list, tuple, set, frozenset, dict |
| ["q", items, length], ["u", name, keys, values, factory] | deque; Counter, OrderedDict or defaultdict |
| ["b", text], ["y", text] | bytes, bytearray |
| ["x", name, argument] | a value of `COPIED` |
| ["v", name, items] | view of a dict |
| ["a", type, shape, items] | array of NumPy, or a number of it |
| ["@", index] | a container of this message or of the request that it answers, by its order there |
| ["g", module, name], ["m", module] | an object of the standard library, or a module of it: `MODULES`, `FUNCTIONS` |
| ["o", number] | an object of the receiver |
| ["r", number, class] | an object of the sender |
| ["c", number, description] | a class of the sender; described in the first message that has it |
| ["e", class, arguments] | an exception of the standard library |
| ["E", number, class, arguments] | an exception of a class of the sender |
| ["n"], ["."] | NotImplemented, Ellipsis |
"""

import collections
import contextlib
import importlib
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

ATOMS = frozenset({type(None), bool, int, float, str})
MUTABLE = frozenset({list, dict, set, bytearray, deque, Counter, OrderedDict, defaultdict})
MODULES = frozenset(
    (
        *("bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq"),
        *("itertools", "json", "math", "numbers", "operator", "random", "re", "statistics", "string", "time", "typing"),
    )
)
"""Modules whose functions and classes are passed by name: they keep no secrets, and nothing of them ends a process."""
FUNCTIONS = frozenset(
    (
        *("abs", "all", "any", "ascii", "bin", "callable", "chr", "divmod", "hash", "hex", "id", "isinstance", "iter"),
        *("issubclass", "len", "max", "min", "next", "oct", "ord", "pow", "repr", "round", "sorted", "sum"),
    )
)
"""Built-in functions that are passed by name; all built-in classes are, too."""
ERRORS = MODULES | {"queue", "struct", "csv", "zlib", "binascii", "dataclasses", "asyncio.exceptions", "enum", "re"}
VIEWS: Mapping[type, str] = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}


def _timedelta(value: Any) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


COPIED: Mapping[str, tuple[Callable[[Any], object], Callable[[Any, Any], object]]] = {
    "builtins.complex": (lambda value: [value.real, value.imag], lambda kind, argument: kind(*argument)),
    "builtins.range": (lambda value: [value.start, value.stop, value.step], lambda kind, argument: kind(*argument)),
    "decimal.Decimal": (str, lambda kind, argument: kind(argument)),
    "fractions.Fraction": (str, lambda kind, argument: kind(argument)),
    "datetime.date": (lambda value: value.isoformat(), lambda kind, argument: kind.fromisoformat(argument)),
    "datetime.time": (lambda value: value.isoformat(), lambda kind, argument: kind.fromisoformat(argument)),
    "datetime.datetime": (lambda value: value.isoformat(), lambda kind, argument: kind.fromisoformat(argument)),
    "datetime.timedelta": (_timedelta, lambda kind, argument: kind(*argument)),
}
"""Further immutable types that are copied: how a value becomes JSON, and a value from its type and that."""


class Objects(Protocol):
    """The objects of both processes, as `proxies.Peer` has them."""

    def number_of(self, value: object) -> tuple[int, bool]:
        """The number of an own object, and whether it is new."""

    def own(self, number: int) -> object:
        """The own object of this number."""

    def foreign_number(self, value: object) -> int | None:
        """The number of an object of the other process; None if it is none."""

    def proxy(self, number: int, kind: Any, arguments: Sequence[object] | None) -> object:
        """The proxy of an object of the other process; ``arguments`` are those of an exception."""

    def proxy_class(self, number: int, description: Any, decode: Callable[[Any], Any]) -> type:
        """The proxy of a class of the other process."""

    def describe(self, kind: type, encode: Callable[[object], Any]) -> list[Any]:
        """The description of an own class."""


class Encoder:
    """Makes the JSON of one message."""

    def __init__(self, objects: Objects, known: Sequence[object] = ()) -> None:
        """``known``: the containers of the request that the message answers, in their order there."""
        self.order = list(known)
        self._index = {id(container): number for number, container in enumerate(known)}
        self._objects = objects

    def __call__(self, value: object) -> Any:
        """The JSON of a value."""
        kind = type(value)
        if kind in ATOMS:
            return value
        if kind is tuple:
            return ["t", self._all(value)]
        if kind in MUTABLE:
            if (index := self._index.get(id(value))) is not None:
                return ["@", index]
            self._index[id(value)] = len(self.order)
            self.order.append(value)
            return self.content(value)
        if kind is frozenset:
            return ["f", self._all(value)]
        if kind is bytes:
            return ["b", value.decode("latin-1")]  # type: ignore[attr-defined]
        return self._other(value, kind)

    def content(self, value: Any) -> list[Any]:
        """The JSON of a container, whether it has been sent or not."""
        kind = type(value)
        if kind is list:
            return ["l", self._all(value)]
        if kind is dict:
            return ["d", self._all(value), self._all(value.values())]
        if kind is set:
            return ["s", self._all(value)]
        if kind is bytearray:
            return ["y", value.decode("latin-1")]
        if kind is deque:
            return ["q", self._all(value), value.maxlen]
        factory = self(value.default_factory) if kind is defaultdict else None
        return ["u", kind.__name__, self._all(value), self._all(value.values()), factory]

    def _all(self, values: Any) -> list[Any]:
        return list(values) if ATOMS.issuperset(map(type, values)) else [self(value) for value in values]

    def _other(self, value: Any, kind: type) -> list[Any]:
        objects = self._objects
        if (number := objects.foreign_number(value)) is not None:
            return ["o", number]
        if isinstance(value, type):
            return self._class(value)
        if value is NotImplemented:
            return ["n"]
        if value is Ellipsis:
            return ["."]
        if kind in VIEWS:
            return ["v", VIEWS[kind], self._all(list(value))]
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in COPIED and not getattr(value, "tzinfo", None):
            return ["x", name, COPIED[name][0](value)]
        if isinstance(value, types.ModuleType) and value.__name__ in MODULES:
            return ["m", value.__name__]
        if isinstance(value, BaseException):
            return self._exception(value)
        if kind.__module__ == "numpy" and hasattr(value, "tolist") and value.dtype.kind in "biufc":
            return ["a", value.dtype.str, list(value.shape), self(value.tolist())]
        if (named := _named(value)) is not None:
            return named
        number, _ = objects.number_of(value)
        return ["r", number, self._described(kind)]

    def _class(self, kind: type) -> list[Any]:
        if (number := self._objects.foreign_number(kind)) is not None:
            return ["o", number]
        return _named(kind) or self._described(kind)

    def _described(self, kind: type) -> list[Any]:
        number, is_new = self._objects.number_of(kind)
        return ["c", number, self._objects.describe(kind, self) if is_new else None]

    def _exception(self, error: BaseException) -> list[Any]:
        kind = self._class(type(error))
        arguments = ["t", [self(arg) for arg in error.args]]
        return ["e", kind, arguments] if kind[0] == "g" else ["E", self._objects.number_of(error)[0], kind, arguments]


class Decoder:
    """Makes the values of one message. Raises any exception for a message that no `Encoder` has made."""

    def __init__(self, objects: Objects, known: Sequence[object] = ()) -> None:
        """``known``: the containers of the request that the message answers, in their order there."""
        self.order = list(known)
        self._objects = objects

    def __call__(self, form: Any) -> Any:
        """The value of this JSON."""
        kind = type(form)
        if kind in ATOMS:
            return form
        if kind is not list:
            raise ValueError(form)
        tag = form[0]
        if tag in ("l", "d", "s", "y", "q", "u"):
            value = self._empty(form)
            self.order.append(value)
            self.fill(value, form)
            return value
        match form:
            case ["t", items]:
                return tuple(self._all(items))
            case ["f", items]:
                return frozenset(self._all(items))
            case ["@", int(index)]:
                return self.order[index]
            case ["b", str(text)]:
                return text.encode("latin-1")
            case ["o", int(number)]:
                return self._objects.own(number)
            case ["r", int(number), of]:
                return self._objects.proxy(number, self(of), None)
            case ["c", int(number), description]:
                return self._objects.proxy_class(number, description, self)
            case ["E", int(number), of, arguments]:
                return self._objects.proxy(number, self(of), self(arguments))
        return self._rare(form)

    def _rare(self, form: list[Any]) -> Any:
        match form:
            case ["e", of, arguments]:
                return _error(self(of), self(arguments))
            case ["n"]:
                return NotImplemented
            case ["."]:
                return Ellipsis
            case ["x", str(name), argument]:
                module, _, kind = name.partition(".")
                return COPIED[name][1](getattr(importlib.import_module(module), kind), argument)
            case ["v", str(name), items]:
                values = self._all(items)
                held = dict(values) if name == "items" else dict.fromkeys(values) if name == "keys" else None
                return getattr(dict(enumerate(values)) if held is None else held, name)()
            case ["g", str(module), str(name)]:
                return _found(module, name)
            case ["m", str(name)] if name in MODULES:
                return importlib.import_module(name)
            case ["a", str(dtype), list(shape), items]:
                return _array(dtype, shape, self(items))
        raise ValueError(form)

    def _empty(self, form: list[Any]) -> Any:
        match form:
            case ["l", _]:
                return []
            case ["d", _, _]:
                return {}
            case ["s", _]:
                return set()
            case ["y", _]:
                return bytearray()
            case ["q", _, length]:
                return deque(maxlen=length)
            case ["u", "defaultdict", _, _, factory]:
                return defaultdict(self(factory))
            case ["u", "Counter" | "OrderedDict" as name, _, _, _]:
                return getattr(collections, name)()
        raise ValueError(form)

    def fill(self, value: Any, form: list[Any]) -> None:
        """Give a container of this process the content of its JSON."""
        match form:
            case ["l", items]:
                value[:] = self._all(items)
            case ["q" | "s", items, *_]:
                items = self._all(items)
                value.clear()
                (value.extend if form[0] == "q" else value.update)(items)
            case ["y", str(text)]:
                value[:] = text.encode("latin-1")
            case ["d", keys, values] | ["u", _, keys, values, _]:
                content = list(zip(self._all(keys), self._all(values), strict=True))
                value.clear()
                for key, entry in content:
                    value[key] = entry
            case _:
                raise ValueError(form)

    def _all(self, forms: Any) -> list[Any]:
        if type(forms) is not list:
            raise ValueError(forms)
        return forms if ATOMS.issuperset(map(type, forms)) else [self(form) for form in forms]


def copied(value: Any) -> Any:
    """A copy of a container, to which it is compared later: its items, and nothing that they contain."""
    return (
        [*value, *value.values()] if isinstance(value, dict) else bytes(value) if type(value) is bytearray else [*value]
    )


def has_changed(value: Any, before: Any) -> bool:
    """Whether a container has other items than at the time of `copied`, or others in their place."""
    now = copied(value)
    if type(now) is bytes:
        return bool(now != before)
    return len(now) != len(before) or any(current is not other for current, other in zip(now, before, strict=True))


def _named(value: Any) -> list[Any] | None:
    """The JSON of an object of the standard library that is passed by name; None for all others."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None and hasattr(value, "__objclass__"):
        module = value.__objclass__.__module__  # such as str.lower
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    with contextlib.suppress(Exception):
        module = module if module in sys.modules else ""
        module = "collections" if module == "_collections_abc" else module.removeprefix("_") or module
        if _found(module, name) is value:
            return ["g", module, name]
    return None


def _found(module: str, name: str) -> object:
    if module not in MODULES and module not in ERRORS and module != "builtins":
        raise ValueError(module)
    value: object = importlib.import_module(module)
    for part in name.split("."):
        if part.startswith("_"):
            raise ValueError(name)
        value = getattr(value, part)
    is_class = isinstance(value, type)
    if module == "builtins" and not is_class and "." not in name and name not in FUNCTIONS:
        raise ValueError(name)
    if module not in MODULES and module != "builtins" and not (is_class and issubclass(value, Exception)):  # type: ignore[arg-type]
        raise ValueError(module)
    return value


def _error(kind: Any, arguments: tuple[object, ...]) -> BaseException:
    if not issubclass(kind, BaseException):
        raise ValueError(kind)
    try:
        error = kind(*arguments)
    except TypeError:
        error = kind.__new__(kind)
    error.args = arguments
    return error  # type: ignore[no-any-return]


def _array(dtype: str, shape: list[int], items: Any) -> Any:
    try:
        numpy: Any = importlib.import_module("numpy")
    except ImportError:
        return items
    array = numpy.array(items, dtype=numpy.dtype(dtype)).reshape(shape)
    return array if shape else array[()]
