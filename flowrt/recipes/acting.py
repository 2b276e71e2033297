"""Which keys of a configuration act, by the conditions declared on its fields (`flowrt.runtime.conditions`)."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any, get_type_hints

from flowrt.recipes.algorithms import preset
from flowrt.recipes.config import RunConfig
from flowrt.recipes.tasks.registry import default_of
from flowrt.runtime.conditions import OnlyIf, conditions_of


@dataclass(frozen=True)
class Key:
    """A key of a configuration: its dotted name, its default, and the conditions under which it acts (all of them)."""

    name: str
    default: Any
    conditions: tuple[OnlyIf, ...]


@cache
def keys() -> tuple[Key, ...]:
    """All keys of a configuration, in order."""
    return tuple(_keys(RunConfig(), "", ()))


def _keys(table: Any, prefix: str, above: tuple[OnlyIf, ...]) -> Iterator[Key]:
    hints = get_type_hints(type(table), include_extras=True)
    for field in dataclasses.fields(table):
        name, value = f"{prefix}{field.name}", getattr(table, field.name)
        conditions = (*above, *conditions_of(hints[field.name], prefix))
        if dataclasses.is_dataclass(value):
            yield from _keys(value, f"{name}.", conditions)
        else:
            yield Key(name, value, conditions)


def idle_keys(config: RunConfig) -> Iterator[tuple[Key, OnlyIf]]:
    """The keys that do not act in a configuration, each with the first of its conditions that does not hold."""
    for key in keys():
        broken = next((condition for condition in key.conditions if not _holds(condition, config)), None)
        if broken is not None:
            yield key, broken


def acting_mistakes(config: RunConfig) -> Iterator[str]:
    """The keys that do not act, and have neither their default nor that of the recipe or the preset.

    Raises ConfigError for an unknown preset.
    """
    of_preset = replace(config, algorithm=preset(config.algorithm.name))
    for key, broken in idle_keys(config):
        value = attrgetter(key.name)(config)
        if key.name.startswith("algorithm."):
            usual = [attrgetter(key.name)(of_preset)]
        else:
            usual = [key.default, *broken.off, default_of(config.recipe, key.name)]
        if value not in usual:
            present = " and ".join(f"{name} {_shown(attrgetter(name)(config))}" for name in broken.keys)
            yield f"{key.name} is {value!r:.80}, which changes nothing with {present}; {broken.fix}"


def _holds(condition: OnlyIf, config: RunConfig) -> bool:
    return any(condition.holds_for(attrgetter(name)(config)) for name in condition.keys)


def _shown(value: Any) -> str:
    return value[:80] if isinstance(value, str) and value else repr(value)
