"""Write docs/reference/configuration.md: every key of a configuration with its type, default, range and meaning.

Run without arguments. The page is made from flowrt/recipes/config.py and flowrt/engines/options.py; a test compares
the page with them.
"""

import argparse
import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from flowrt.recipes.config import GuardConfig, key_values
from flowrt.recipes.config_io import RECIPE_NAMES, defaults
from flowrt.recipes.data_config import DataSetConfig
from flowrt.recipes.flag_help import COMMON, SHORT_FLAGS, meaning_of_type, meanings
from flowrt.recipes.resume_overrides import may_change
from flowrt.recipes.tables import TYPE, bare, owner, table_of, type_hint, variants, with_type
from flowrt.runtime.bounds import MAX_TIMEOUT_S, TIMEOUT, interval_of, span
from flowrt.runtime.conditions import OnlyIf, conditions_of

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "configuration.md"
HEAD = ("| key | type | default | range | meaning |", "|---|---|---|---|---|")
INTRODUCTION = """# Configuration

<!-- Written by scripts/reference.py from flowrt/recipes/config.py; do not edit. -->

A run has one configuration. `flowrt run`, `flowrt config` and `flowrt resume` build it from three layers, of which the
last one wins: the defaults of the recipe, the file of `--config FILE.toml`, the flags. A key of this page is a TOML key
(`trainer.lr` is `lr` in the table `[trainer]`) and a flag with dashes (`--trainer.weight-decay 0.1`, booleans as
`--trainer.compile True`). `flowrt config > FILE.toml` prints a complete configuration; `flowrt run RECIPE --help` shows
the keys that are set most ({common}), `--help all` every key, `--help trainer` those of a table.

A table with a key `type` has the keys of that type alone (`--dispatch.type length_aware`, or `type = "length_aware"` in
the table `[dispatch]`). With another type than the present one its keys have their defaults, but for those that both
types have in common.

A wrong key, type or value is refused before anything starts, with exit code 2, and so is a key that cannot act ("Acts
only with") and has neither its default nor that of the recipe. With `eval.only`, keys of training are accepted and
change nothing, so that the configuration of a run can be evaluated as it is. Keys that end in `_s` are seconds, from
just above 0 to {days} days unless a range is given. Keys marked * may change when a run is resumed, because they do not
change what is computed.
"""


def page() -> str:
    """The whole page, as Markdown."""
    base = defaults("arithmetic")
    lines = [INTRODUCTION.format(days=MAX_TIMEOUT_S // 86400, common=", ".join(f"`{name}`" for name in COMMON))]
    lines += _section("The run", "", base)
    for name, table, hint, about in _tables("", base):
        if kinds := variants(hint):
            lines += _union(name, table, kinds, about)
        else:
            lines += _section(f"`[{name}]`", f"{name}.", table, list(conditions_of(hint, name[: name.rfind(".") + 1])))
    lines += _section("`[[data.sets]]`", "data.sets.", DataSetConfig(name="", path=""))
    lines += _section("`[[guard]]`", "guard.", GuardConfig(metric=""))
    lines += [
        "## Defaults of the recipes",
        "",
        f"The tables above have the defaults of `{RECIPE_NAMES[0]}`. The other recipes differ in these keys:",
        "",
        "| key | " + " | ".join(RECIPE_NAMES) + " |",
        "|---|" + "---|" * len(RECIPE_NAMES),
    ]
    values = [{name: value for name, _, value in key_values(defaults(recipe))} for recipe in RECIPE_NAMES]
    for key in values[0]:
        if key != "recipe" and any(value[key] != values[0][key] for value in values):
            lines.append(f"| `{key}` | " + " | ".join(_value(value[key]) for value in values) + " |")
    return "\n".join([*lines, ""])


def _section(title: str, prefix: str, table: Any, above: Sequence[OnlyIf] = ()) -> list[str]:
    """The section of a table, which acts under the conditions ``above``."""
    about = (inspect.getdoc(type(table)) or "").replace("\n", " ").replace("  ", " ")
    if above:
        about += f" {_conditions(above)}"
    names = [field.name for field in dataclasses.fields(table)]
    return [f"## {title}", "", about, "", *_rows(prefix, table, names)]


def _union(name: str, table: Any, kinds: Mapping[str, type], about: str) -> list[str]:
    """The section of a table with types: the keys of several types, then those that each type has on its own."""
    lines = [f"## `[{name}]`", "", about, "", *HEAD]
    lines += [_row(f"{name}.{TYPE}", type_hint(kinds), table.type, meaning_of_type(kinds))]
    of_several: dict[tuple[type | None, str], list[str]] = {}
    for type_name, kind in kinds.items():
        for field in dataclasses.fields(kind):
            if (declared_by := owner(kind, field.name)) is not kind:
                of_several.setdefault((declared_by, field.name), []).append(type_name)
    for (_, key), types in of_several.items():
        other = with_type(table, kinds[types[0]])
        others = [kind for kind in kinds if kind not in types]
        of_types = f"Types {', '.join(types)}." if len(types) < len(others) else f"All types but {', '.join(others)}."
        of_types = of_types if others else ""
        lines += _rows(f"{name}.", other, [key], of_types)[len(HEAD) : -1]
    lines.append("")
    for type_name, kind in kinds.items():
        own = [field.name for field in dataclasses.fields(kind) if owner(kind, field.name) is kind]
        if own != [TYPE]:
            lines += [f"Type `{type_name}`:", "", *_rows(f"{name}.", kind(), [key for key in own if key != TYPE])]
    return lines


def _rows(prefix: str, table: Any, names: Sequence[str], note: str = "") -> list[str]:
    """The keys of a table with these names, but for tables within it. ``note``: the end of what they mean."""
    hints, texts = get_type_hints(type(table), include_extras=True), meanings(type(table))
    lines = [*HEAD]
    for name in names:
        value = getattr(table, name)
        if not dataclasses.is_dataclass(value):
            meaning = f"{texts[name]} {_conditions(list(conditions_of(hints[name], prefix)))} {note}"
            lines.append(_row(f"{prefix}{name}", hints[name], value, " ".join(meaning.split())))
    return [*lines, ""]


def _row(key: str, hint: Any, value: Any, meaning: str) -> str:
    cells = (_kind(hint), _value(value), _range(hint), meaning)
    mark = "*" if may_change(key) else ""
    short = f" (`{SHORT_FLAGS[key]}`)" if key in SHORT_FLAGS else ""
    return f"| `{key}`{mark}{short} | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _conditions(conditions: Sequence[OnlyIf]) -> str:
    """The conditions under which a key or a table acts, as sentences."""
    sentences = []
    for condition in conditions:
        names = " or ".join(f"`{name}`" for name in condition.keys)
        values = " or ".join(_value(value) for value in condition.have or condition.but)
        sentences.append(f"Acts only with {names} {values if condition.have else f'other than {values}'}.")
    return " ".join(sentences)


def _tables(prefix: str, config: Any) -> Iterator[tuple[str, Any, Any, str]]:
    """The tables of a configuration by their full names, each with its type hint and text before those within it."""
    hints, texts = get_type_hints(type(config), include_extras=True), meanings(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield f"{prefix}{field.name}", value, hints[field.name], texts[field.name]
            yield from _tables(f"{prefix}{field.name}.", value)


def _kind(hint: Any) -> str:
    hint = bare(hint)
    if table_of(hint) is not None:
        return "tables"
    if get_origin(hint) is UnionType:
        return _kind(get_args(hint)[0])
    if get_origin(hint) is tuple:
        return "list of text"
    if get_origin(hint) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(hint) if choice)
    return {str: "text", int: "integer", float: "number", bool: "boolean"}[hint]


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return "empty" if value in ("", ()) else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _range(hint: Any) -> str:
    """The bounds of a number; empty for other types, and for the usual range of a timeout."""
    interval = interval_of(hint)
    return "" if interval is None or interval is TIMEOUT else span(interval, get_args(hint)[0])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())
