"""The help of a command whose flags are keys of a configuration.

``--help`` shows the keys that are set most, on one screen; ``--help all`` shows every key, ``--help SECTION`` those of
a table, ``--help KEY`` one. The text of a key is the sentence below its field, with its bounds and its default. Of a
table with types they show the keys of its present type; ``--help`` with its name or a key of it, those of all types.
"""

import ast
import dataclasses
import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from flowrt.errors import ConfigError, suggested
from flowrt.recipes.tables import TYPE, owner, type_hint, variants, with_type
from flowrt.runtime.bounds import interval_of, span

ALL = "all"
HELP_FLAGS = ("-h", "--help")
COMMON = (
    "model",
    "data.path",
    "reward.functions",
    "algorithm.name",
    "steps",
    "prompts_per_step",
    "group_size",
    "rollout.max_new_tokens",
    "trainer.lr",
    "rollout.workers",
    "device",
    "run_dir",
)
"""The keys of a run that are set most: what is trained, how much, and where."""
SHORT_FLAGS = {
    "data.path": "--data",
    "data.sets": "--data",
    "reward.functions": "--reward",
    "algorithm.name": "--algorithm",
}
"""Flags of keys that have another one than that of their name."""
TEXT_AT = 28
"""Column of the texts."""
MIN_WIDTH, MAX_WIDTH = 60, 120
"""Characters of a line, within which the width of the terminal is used."""
NO_TYPES: Mapping[str, type] = {}
_KINDS = {str: "TEXT", int: "INT", float: "FLOAT", bool: "{True, False}"}


@dataclass(frozen=True, slots=True)
class HelpText:
    """What the help of a command says."""

    arguments: str = ""
    """What precedes the flags, as ``RUN``."""
    about: str = ""
    """What the command does; empty: a sentence on the recipe."""
    notes: str = ""
    """Sentences after it."""
    common: Sequence[str] = COMMON
    """The dotted names of the keys that ``--help`` shows."""
    is_listed: Callable[[str], bool] = lambda _: True
    """Called with the dotted name of each key; False hides it."""


@dataclass(frozen=True, slots=True)
class _Key:
    name: str
    hint: Any
    value: Any
    meaning: str

    def lines(self, width: int) -> Iterator[str]:
        """Its lines of text: flags, the kind of its value, what it means, its bounds if it is a number, its default."""
        interval = interval_of(self.hint)
        bounds = "" if interval is None else span(interval, get_args(self.hint)[0])
        return self._formatted(", ".join(self._flags), self.meaning, (bounds, self._default), width)

    def short_lines(self, width: int) -> Iterator[str]:
        """The same with one flag, without bounds, and of what it means the first clause and that on its default."""
        first, *more = self.meaning.split("; ")
        own = [clause for clause in more if clause.startswith(f"{self._shown or 'empty'}: ")]
        return self._formatted(self._flags[0], "; ".join([first, *own]), (self._default,), width)

    def _formatted(self, flags: str, meaning: str, notes: Sequence[str], width: int) -> Iterator[str]:
        in_brackets = "; ".join(filter(None, notes))
        text = meaning.removesuffix(".") + (f" ({in_brackets})" if in_brackets else "")
        return _entry(f"{flags} {_kind(self.hint)}", text, width)

    @property
    def _flags(self) -> list[str]:
        """Its flags, a short one first; a list of tables has no flag of its own if there is a short one."""
        own, short = f"--{self.name.replace('_', '-')}", SHORT_FLAGS.get(self.name)
        is_table = get_origin(self.hint) is tuple and get_args(self.hint)[0] is not str
        return [own] if short is None else [short] if is_table else [short, own]

    @property
    def _shown(self) -> str:
        return " ".join(self.value) if isinstance(self.value, tuple) else str(self.value)

    @property
    def _default(self) -> str:
        return f"default: {self._shown}" if self._shown else ""


@dataclass(frozen=True, slots=True)
class _Section:
    """A table and its own keys, without those of tables within it."""

    name: str
    about: str
    keys: Sequence[_Key]
    is_present: bool = True
    """False for the keys of another type of the table than its present one."""

    def within(self, topic: str) -> "_Section":
        """The part of it that belongs to a topic."""
        is_asked = self.is_present or f"{topic}.".startswith(f"{self.name}.")
        keys = [key for key in self.keys if topic == ALL or f"{key.name}.".startswith(f"{topic}.")]
        return replace(self, keys=keys if is_asked else [])

    def lines(self, width: int) -> Iterator[str]:
        """Its lines of text; none without keys."""
        if self.keys:
            yield ""
            yield from _wrapped(f"{self.name}: {self.about}", width) if self.name else ()
            for key in self.keys:
                yield from key.lines(width)


def topic_of(words: Sequence[str]) -> str | None:
    """The word after ``--help``: a section, a key or "all"; empty if there is none, None without ``--help``."""
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in HELP_FLAGS:
            following = "".join(words[at + 1 : at + 2])
            return value if equals else "" if following.startswith("-") else following
    return None


def print_help(command: str, base: Any, topic: str, text: HelpText) -> NoReturn:
    """Print the help of a command, and exit with code 0.

    Args:
        command: its name, as ``flowrt run``.
        base: the configuration with the defaults of the flags.
        topic: as of `topic_of`.
        text: what it says.

    Raises ConfigError for a topic that is neither a section nor a key.
    """
    width = min(max(shutil.get_terminal_size().columns, MIN_WIDTH), MAX_WIDTH)
    sys.stdout.write("\n".join(_lines(command, base, topic, text, width)).strip("\n") + "\n")
    sys.exit(0)


def meanings(kind: type) -> dict[str, str]:
    """The sentence below each field of a dataclass and of its bases, on one line."""
    sentences: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(field.target, ast.Name):
                assert isinstance(below.value, ast.Constant)
                sentences[field.target.id] = " ".join(str(below.value.value).split())
    return sentences


def meaning_of_type(kinds: Mapping[str, type]) -> str:
    """The sentence of the key ``type`` of a table, made from those of the classes of its types."""
    clauses = []
    for name, kind in kinds.items():
        about = " ".join((inspect.getdoc(kind) or "").split()).removesuffix(".")
        clauses.append(f"{name}: {about[:1].lower()}{about[1:]}")
    return f"Type {'; '.join(clauses)}."


def _lines(command: str, base: Any, topic: str, text: HelpText, width: int) -> Iterator[str]:
    sections = [section for section in _sections(base, text.is_listed) if section.keys]
    keys = {key.name: key for section in sections if section.is_present for key in section.keys}
    names = list(dict.fromkeys(section.name.partition(".")[0] for section in sections if section.name))
    if topic in ("", ALL):
        yield " ".join(filter(None, ("usage:", command, text.arguments, "[--KEY VALUE ...]")))
        yield from ("", *_wrapped(f"{text.about} {text.notes}", width), "")
    if topic:
        asked = [section.within(topic) for section in sections]
        if not any(section.keys for section in asked):
            known = suggested(topic, [ALL, *names, *keys])
            raise ConfigError(f"{command} --help takes all, a section or a key, not {topic!r:.80}{known}")
        for section in asked:
            yield from section.lines(width)
    else:
        for name in text.common:
            yield from keys[name].short_lines(width)
        of_sections = f"; --help SECTION: those of {', '.join(names)}" if names else ""
        yield from ("", *_entry("--help all", f"All {len(keys)} keys{of_sections}", width))


def _sections(
    table: Any,
    is_listed: Callable[[str], bool],
    *,
    name: str = "",
    about: str = "",
    kinds: Mapping[str, type] = NO_TYPES,
) -> Iterator[_Section]:
    """The section of a table, which has one of these types, and those of the tables within it."""
    hints, texts = get_type_hints(type(table), include_extras=True), meanings(type(table))
    if kinds:
        hints[TYPE] = type_hint(kinds)
        texts[TYPE] = f"{meaning_of_type(kinds).removesuffix('.')}; --help {name} shows the keys of all"
    keys: list[_Key] = []
    tables: list[_Key] = []
    for field in dataclasses.fields(table):
        own = f"{name}.{field.name}" if name else field.name
        key = _Key(own, hints[field.name], getattr(table, field.name), texts[field.name])
        if dataclasses.is_dataclass(key.value):
            tables.append(key)
        elif is_listed(own):
            keys.append(key)
    yield _Section(name, about, keys)
    for section in tables:
        types = variants(section.hint)
        yield from _sections(section.value, is_listed, name=section.name, about=section.meaning, kinds=types)
        for type_name, kind in types.items():
            other, keys_of = with_type(section.value, kind), f"keys of type {type_name}."
            for below in _sections(other, is_listed, name=section.name, about=keys_of, kinds=types):
                more = [key for key in below.keys if owner(type(section.value), key.name.rpartition(".")[2]) is None]
                yield replace(below, keys=more, is_present=False)


def _wrapped(text: str, width: int, first: str = "", others: str = "") -> list[str]:
    """The lines of a text, none of which ends within a flag. ``first`` and ``others``: what lines begin with."""
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def _entry(flags: str, text: str, width: int) -> Iterator[str]:
    """The lines of a key: flags on the left, the text on the right, or below if the flags are long."""
    lines = _wrapped(text, width - TEXT_AT)
    if len(flags) + 4 <= TEXT_AT:
        yield f"  {flags}".ljust(TEXT_AT) + lines.pop(0)
    else:
        yield from _wrapped(flags, width - 2, "  ", "    ")
    yield from (f"{'':{TEXT_AT}}{line}" for line in lines)


def _kind(hint: Any) -> str:
    """The kind of a value, as in the help of other commands."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Annotated, UnionType):
        return _kind(inner[0])
    if origin is Literal:
        return f"{{{', '.join(filter(None, inner))}}}"
    if origin is tuple:
        return "TEXT ..."
    return _KINDS[hint]
