"""Flags of a command line as values of a configuration: ``--NAME VALUE`` or ``--NAME=VALUE``.

A name is the dotted path of a field, with ``-`` for ``_``. Of a flag that is repeated the last value counts, of a list
all values. Their help: `flowrt.recipes.flag_help`.
"""

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, TypeVar, get_origin

from flowrt.errors import ConfigError, refuse
from flowrt.recipes.tables import FORMER_TYPE, TYPE, bare, flag_of, leaves, merge, table_of

Config = TypeVar("Config")
_FLAG_WORD = re.compile(r"--?[A-Za-z_][\w.-]*(=.*)?", re.DOTALL)
"""A word that is a flag, and no value."""
CUTOFF, END_CUTOFF = 0.6, 0.8
"""Least similarity of names, and of the last parts of names, for a suggestion."""
WATCH_FLAG, WATCHING = "--watch", ("flowrt run", "flowrt resume")
"""A flag that `flowrt.cli` parses itself, and the commands that have it."""
SELDOM = ("--eval.", "--sft.")
"""Tables whose keys are suggested after equally similar ones of other tables."""


def parse_flags(
    base: Config, words: Sequence[str], command: str, *, positional: str = "", more: Sequence[str] = ()
) -> Config:
    """``base`` with the values of flags.

    Args:
        base: a configuration dataclass, whose fields may be such dataclasses.
        words: the flags and their values.
        command: the command's name in messages.
        positional: the field whose value is a word without a flag; empty: there is none.
        more: flags of the command that are parsed elsewhere, which a message may suggest.

    Raises ConfigError for a flag that is unknown, has no value, or has one of the wrong type.
    """
    hints = {name: bare(hint) for name, hint in leaves(type(base)) if table_of(bare(hint)) is None}
    hints.pop(positional, None)
    former = {f"{name.removesuffix(TYPE)}{FORMER_TYPE}" for name in hints if name.endswith(f".{TYPE}")}
    values: dict[str, Any] = {}
    mistakes: list[str] = []
    rest = deque(words)
    while rest:
        word = rest.popleft()
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not _FLAG_WORD.fullmatch(word):
            if positional and positional not in values:
                values[positional] = word
            else:
                mistakes.append(f"{command} takes no {word!r:.80}; {command} --help all lists the flags")
        elif not flag.startswith("--") or name not in (former | hints.keys()):
            near = _suggestion(flag, [*map(flag_of, hints), *more], command)
            mistakes.append(f"{command} takes no flag {flag:.80}{near}")
            if not equals:
                deque(_following(rest), maxlen=0)  # leave out its values
        elif get_origin(hints.get(name)) is tuple:
            given = [value] if equals else list(_following(rest))
            values[name] = (*values.get(name, ()), *given)
        elif not equals and (not rest or _FLAG_WORD.fullmatch(rest[0])):
            mistakes.append(f"{command}: {flag} needs a value; one that begins with - is given as {flag}=VALUE")
        else:
            values[name] = value if equals else rest.popleft()
    try:
        merged = merge(base, _nested(values), command, are_flags=True)
    except ConfigError as error:
        mistakes += error.args
    refuse(mistakes)
    return merged


def _suggestion(flag: str, known: Sequence[str], command: str) -> str:
    """The end of a message about an unknown flag: the most similar ones, those of training before others."""
    scores = {candidate: _similarity(flag.lstrip("-").replace("_", "-"), candidate.lstrip("-")) for candidate in known}
    best = max(scores.values(), default=0.0)
    close = sorted(
        (candidate for candidate in known if best and scores[candidate] == best),
        key=lambda candidate: candidate.startswith(SELDOM),
    )
    return f"; did you mean {' or '.join(close[:3])}?" if close else f"; {command} --help all lists the flags"


def _similarity(own: str, name: str) -> float:
    """How similar two names are, from 0 to 1; one without a dot may stand for the last part of the other."""
    whole = SequenceMatcher(None, own.replace(".", "-"), name.replace(".", "-")).ratio()
    end = 0.0 if "." in own else SequenceMatcher(None, own, name.rpartition(".")[2]).ratio()
    return max(whole if whole >= CUTOFF else 0.0, end if end >= END_CUTOFF else 0.0)


def _following(rest: deque[str]) -> Iterator[str]:
    """Take the words up to the next flag."""
    while rest and not _FLAG_WORD.fullmatch(rest[0]):
        yield rest.popleft()


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the dotted names of their keys, as tables."""
    tables: dict[str, Any] = {}
    for name, value in values.items():
        *path, key = name.split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        table[key] = value
    return tables
