"""Conditions under which a field of a configuration acts: ``Annotated[float, OnlyIf("trainer.schedule", but=...)]``.

A condition is declared on the field, or on the field of a whole table, for all keys of it. A value that differs from
the default is refused where a condition does not hold (`flowrt.recipes.acting`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args, get_origin

Value = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OnlyIf:
    """The field acts only while another key has one of some values, or none of some others.

    Args:
        key: dotted name of the other key in the configuration of a run; with a leading dot, in the field's own table.
        have: the values with which the field acts; empty: all but those of ``but``.
        but: the values with which it does not act.
        or_keys: other keys that may fulfil the condition in place of ``key``.
        off: values of the field itself that are accepted in any case, because they say that it is off.
        instead: the key to set in place of this one where the condition does not hold; empty: none.
    """

    key: str
    have: tuple[Value, ...] = ()
    but: tuple[Value, ...] = ()
    or_keys: tuple[str, ...] = ()
    off: tuple[Value, ...] = ()
    instead: str = ""

    def within(self, prefix: str) -> "OnlyIf":
        """The condition for a field of the table with this prefix of names, such as ``rollout.sglang.``."""
        return replace(self, key=prefix + self.key[1:]) if self.key.startswith(".") else self

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that may fulfil the condition."""
        return (self.key, *self.or_keys)

    def holds_for(self, value: Value) -> bool:
        """Whether a value of the other key fulfils the condition."""
        return value in self.have if self.have else value not in self.but

    @property
    def fix(self) -> str:
        """What to do where the condition does not hold, as the end of a sentence."""
        if self.have in (("",), ((),)):
            return "leave one of them out"
        if self.instead:
            return f"set {self.instead} in its place"
        values = f" to {' or '.join(str(value) for value in self.have)}" if self.have else ""
        return f"set {' or '.join(self.keys)}{values}, or leave it out"


def conditions_of(hint: Any, prefix: str) -> Iterator[OnlyIf]:
    """The conditions in a type hint of the form ``Annotated[TYPE, OnlyIf(...), …]``.

    ``prefix``: that of the names in the field's table, such as ``rollout.sglang.``.
    """
    if get_origin(hint) is Annotated:
        yield from (extra.within(prefix) for extra in get_args(hint)[1:] if isinstance(extra, OnlyIf))
