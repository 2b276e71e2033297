"""The tables of a configuration: their keys, and their values from TOML or from flags.

A field whose type is a union of dataclasses is a tagged union: the key ``type`` of its table picks the dataclass, which
has the keys of this type alone. Without that key the present type stays.
"""

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from flowrt.errors import ConfigError, refuse, suggested
from flowrt.recipes.algorithm_config import AlgorithmConfig
from flowrt.recipes.algorithms import preset

Config = TypeVar("Config")
TYPE, FORMER_TYPE = "type", "policy"
"""The key that picks the type of a tagged union, and its former name."""
_KINDS = {int: "a whole number", float: "a number"}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where values of a table come from and belong to: their source, and the dotted path of the table."""

    source: str
    path: str = ""
    are_flags: bool = False

    def below(self, key: str) -> "_Place":
        return dataclasses.replace(self, path=f"{self.path}{key}.")

    def named(self, key: str) -> str:
        """A key in messages: a flag, or its dotted name."""
        return flag_of(f"{self.path}{key}") if self.are_flags else repr(f"{self.path}{key}")

    def error(self, key: str, text: str) -> ConfigError:
        return ConfigError(f"{self.source}: {self.named(key)} {text}")

    def unknown(self, key: str, known: Iterable[str]) -> ConfigError:
        return ConfigError(f"{self.source}: there is no key {self.named(key)}{suggested(key, known)}")


def flag_of(name: str) -> str:
    """The flag of a key, by its dotted name."""
    return f"--{name.replace('_', '-')}"


def bare(hint: Any) -> Any:
    """The type in a hint of the form ``Annotated[TYPE, …]``."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def variants(hint: Any) -> dict[str, type[Any]]:
    """The dataclasses of a tagged union by their types; none for any other hint."""
    kinds = get_args(bare(hint)) if get_origin(bare(hint)) is UnionType else ()
    return {kind.type: kind for kind in kinds if hasattr(kind, TYPE)}


def table_of(hint: Any) -> type[Any] | None:
    """The dataclass of the elements of a field that is a list of tables; None for a field of another type."""
    kind = next(iter(get_args(hint)), None) if get_origin(hint) is tuple else None
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def type_hint(kinds: Mapping[str, type[Any]]) -> Any:
    """The type hint of the key ``type`` of a tagged union: one of the names of its types."""
    literal: Any = Literal
    return literal[tuple(kinds)]


def leaves(table: type[Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted name and the type hint of each key of a configuration, those of all types of a union among them."""
    for name, hint in get_type_hints(table, include_extras=True).items():
        if kinds := variants(hint):
            yield f"{path}{name}.{TYPE}", type_hint(kinds)
            below = (leaf for kind in kinds.values() for leaf in leaves(kind, f"{path}{name}."))
            yield from (leaf for leaf in below if leaf[0] != f"{path}{name}.{TYPE}")
        elif dataclasses.is_dataclass(kind := bare(hint)):
            yield from leaves(kind, f"{path}{name}.")  # type: ignore[arg-type]
        else:
            yield f"{path}{name}", hint


def owner(kind: type[Any], key: str) -> type[Any] | None:
    """The class, of a dataclass and its bases, that declares a key; None without such a key."""
    return next((base for base in kind.__mro__ if key in inspect.get_annotations(base)), None)


def with_type(table: Any, kind: type[Any]) -> Any:
    """A table of another type of its union: with the defaults of that, but for the keys that both inherit."""
    if type(table) is kind:
        return table
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: getattr(table, name) for name in names if owner(kind, name) is owner(type(table), name)})


def merge(base: Config, table: Mapping[str, Any], source: str, *, are_flags: bool = False) -> Config:
    """``base`` with the table's values; nested tables are merged key by key.

    Args:
        base: a configuration dataclass.
        table: values by field name.
        source: the table's name in messages, as a file.
        are_flags: whether values are words of a command line, which are converted, and tuples of words.

    Raises ConfigError for an unknown key or a value of the wrong type.
    """
    merged: Config = _merged(base, table, _Place(source, are_flags=are_flags))
    return merged


def merge_each(kind: Any, tables: Any, source: str, key: str) -> tuple[Any, ...]:
    """One value of this dataclass for each table of the list ``key``. Raises ConfigError as `merge`."""
    return _each(kind, tables, key, _Place(source))


def _merged(base: Any, table: Mapping[str, Any], place: _Place) -> Any:
    hints = get_type_hints(type(base))
    changes: dict[str, Any] = {}
    mistakes: list[str] = []
    for key, value in table.items():
        try:
            if key not in hints:
                raise place.unknown(key, hints)
            changes[key] = _new_value(base, key, value, hints[key], place)
        except ConfigError as error:
            mistakes += error.args
    refuse(mistakes)
    return dataclasses.replace(base, **changes)


def _new_value(base: Any, key: str, value: Any, hint: Any, place: _Place) -> Any:
    current = getattr(base, key)
    if not dataclasses.is_dataclass(current):
        return _value(value, hint, key, place)
    if not isinstance(value, Mapping):
        raise place.error(key, f"is a table of keys, not {value!r:.80}")
    if kinds := variants(hint):
        current = _with_type_of(value, current, kinds, place.below(key), origin=_origin(base, current))
    return _merged(current, value, place.below(key))


def _with_type_of(
    table: Mapping[str, Any], current: Any, kinds: Mapping[str, type[Any]], place: _Place, *, origin: str
) -> Any:
    """The present table of a union, of the type that the new one names. Raises ConfigError for keys of others."""
    name = table.get(TYPE, current.type)
    if name not in tuple(kinds):
        raise place.error(TYPE, f"takes one of {', '.join(kinds)}, not {name!r:.80}")
    for key in table:
        having = [other for other, kind in kinds.items() if owner(kind, key)]
        if key == FORMER_TYPE:
            raise place.error(key, f"is called {place.named(TYPE)}")
        if not having:
            raise place.unknown(key, [field.name for kind in kinds.values() for field in dataclasses.fields(kind)])
        if name not in having:
            raise place.error(
                key,
                f"is of type {' or '.join(having)}, and the type is {name}{'' if TYPE in table else origin}; set "
                f"{place.named(TYPE)} to {having[0]}, or leave it out",
            )
    return with_type(current, kinds[name])


def _origin(parent: Any, current: Any) -> str:
    """Where the present type of a union comes from, if that is a preset."""
    if isinstance(parent, AlgorithmConfig) and preset(parent.name).loss.type == current.type:
        return f" (of --algorithm {parent.name})"
    return ""


def _value(value: Any, hint: Any, key: str, place: _Place) -> Any:
    if get_origin(hint) is UnionType:  # float | None or str | None, and TOML has no null
        if place.are_flags and value == "None":
            return None
        hint = get_args(hint)[0]
    if (kind := table_of(hint)) is not None:
        return _each(kind, value, key, place)
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(element, str) for element in value):
            raise place.error(key, f'takes a list of text, as ["a", "b"], not {value!r:.80}')
        return tuple(value)
    choices: dict[Any, Any] = {"True": True, "False": False} if hint is bool and place.are_flags else {}
    if choices := choices or {choice: choice for choice in get_args(hint)}:
        if value not in tuple(choices):
            raise place.error(key, f"takes one of {', '.join(filter(None, choices))}, not {value!r:.80}")
        return choices[value]
    is_exact = not place.are_flags and (hint is not float or type(value) is not int)  # a whole number is a number too
    if is_exact and type(value) is not hint:
        raise place.error(key, f"takes {hint.__name__}, not {type(value).__name__} {value!r:.80}")
    try:
        return hint(value)
    except ValueError:
        raise place.error(key, f"takes {_KINDS[hint]}, not {value!r:.80}") from None
    except OverflowError:
        raise place.error(key, f"is a number of {len(str(value))} digits; use a smaller one") from None


def _each(kind: Any, tables: Any, key: str, place: _Place) -> tuple[Any, ...]:
    """One value of this dataclass for each table of a list."""
    where = f"{place.path}{key}"
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise place.error(key, f"takes tables [[{where}]] with keys, not {tables!r:.80}")
    required = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    for table in tables:
        if missing := next((name for name in required if name not in table), ""):
            raise ConfigError(f"{place.source}: a table [[{where}]] has no key {missing!r}; every one needs it")
    base = kind(**dict.fromkeys(required, ""))
    return tuple(_merged(base, table, place.below(key)) for table in tables)
