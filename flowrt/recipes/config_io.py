"""Configurations from flags and TOML: flags override a file, it overrides an algorithm's preset, and that the defaults.

- An error on a value of the wrong type or on an unknown key names the key in full; the latter suggests similar keys.
- `to_toml` and `from_toml` are inverses: workers receive the configuration as TOML.
"""

import dataclasses
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from flowrt.errors import ConfigError, first_line
from flowrt.recipes.algorithms import preset
from flowrt.recipes.config import GuardConfig, RunConfig, changed
from flowrt.recipes.constraints import check
from flowrt.recipes.data_config import DataSetConfig
from flowrt.recipes.data_sets import parse_data
from flowrt.recipes.flag_help import HelpText, print_help, topic_of
from flowrt.recipes.flags import WATCH_FLAG, WATCHING, parse_flags
from flowrt.recipes.guards import parse_guard
from flowrt.recipes.tables import merge, merge_each
from flowrt.recipes.tasks.registry import RECIPES, recipe
from flowrt.recipes.tasks.task_file import described, is_task_file, split

RECIPE_NAMES = tuple(RECIPES)
OWN_DATA = "custom"
"""The recipe of a command line that names no recipe and has ``--data``."""


def defaults(name: str, algorithm: str = "") -> RunConfig:
    """The default configuration of a recipe, with the preset of ``algorithm`` unless that is empty.

    Raises ConfigError for unknown names, and for a task file of the user's (FILE.py) that cannot be loaded.
    """
    if is_task_file(name):
        description = described(name)
        config = merge(RunConfig(), description.defaults, f"the defaults of task file {split(name)[0]}")
        config = dataclasses.replace(config, recipe=description.recipe, recipe_sha256="")
    else:
        config = recipe(name).defaults
    return dataclasses.replace(config, algorithm=preset(algorithm)) if algorithm else config


def parse(arguments: Sequence[str], command: str = "flowrt run", help_notes: str = "") -> RunConfig:
    """The configuration of a command line, checked by `constraints.check`.

    Args:
        arguments: words of the command line after the command's name.
        command: the command's name in messages.
        help_notes: sentences that --help prints after the one on the recipe.

    Raises ConfigError for unknown flags and invalid values. Exits with code 0 after printing --help.
    """
    has_data = any(re.match(r"--data(\.path)?(=|$)", argument) for argument in arguments)
    text = HelpText(notes=help_notes)
    parsed = read(arguments, command, default=OWN_DATA if has_data else RECIPE_NAMES[0], help_text=text)
    check(parsed)
    return parsed


def read(
    arguments: Sequence[str],
    command: str,
    *,
    default: str = RECIPE_NAMES[0],
    help_text: HelpText | None = None,
    more: Sequence[str] = (),
) -> RunConfig:
    """Parse ``[recipe] [--config FILE.toml] [--algorithm NAME] [--key value ...]`` without a check of constraints.

    Flags override the file, the file overrides the algorithm's preset, the preset overrides the recipe's defaults.

    Args:
        arguments: words of the command line after the command's name.
        command: the command's name in messages.
        default: the recipe if neither the command line nor the file names one.
        help_text: what --help says.
        more: flags of the command that are parsed elsewhere, which a message may suggest.

    Raises ConfigError for a file that cannot be read, and for unknown keys, unknown flags and values of the wrong type.
    Exits with code 0 after printing --help.
    """
    rest = list(arguments)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else ""
    file, rest = take("--config", rest)
    flag, rest = take("--recipe", rest)
    algorithm, rest = take(
        "--algorithm", [re.sub(r"^--algorithm\.name(?==|$)", "--algorithm", argument) for argument in rest]
    )
    if name and flag and _recipe_name(name) != _recipe_name(flag):
        raise ConfigError(f"recipe {name!r} or {flag!r}? Name only one of them")
    name = name or flag
    table = read_toml(Path(file)) if file else {}
    base = defaults(name or str(table.get("recipe", default)))
    if isinstance(named := table.get("recipe"), str):
        if _recipe_name(named) != base.recipe:
            raise ConfigError(f"{file} is for recipe {named!r}, not {name!r}; name only one of them")
        table["recipe"] = base.recipe
    if algorithm and isinstance(own := table.get("algorithm"), Mapping):
        table["algorithm"] = {key: value for key, value in own.items() if key != "name"}
    if algorithm := algorithm or _algorithm(table):
        base = dataclasses.replace(base, algorithm=preset(algorithm))
    base = merge(base, table, file)
    text = help_text or HelpText()
    text = dataclasses.replace(text, arguments="[RECIPE] [--config FILE.toml]", about=text.about or _about(base.recipe))
    return read_flags(command, rest, base, text, (*more, "--config", "--algorithm"))


def _recipe_name(name: str) -> str:
    """The name of a recipe as a configuration has it: for a task file, FILE.py:NAME with an absolute path."""
    return described(name).recipe if is_task_file(name) else name


def _about(name: str) -> str:
    if is_task_file(name):
        about = f"Task file {split(name)[0]}: {described(name).summary}."
    else:
        about = f"Recipe {name!r} (of {', '.join(RECIPE_NAMES)}; a task of your own is FILE.py)."
    return f"{about} Flags override --config FILE.toml."


def read_flags(
    command: str,
    words: Sequence[str],
    base: RunConfig,
    help_text: HelpText | None = None,
    more: Sequence[str] = (),
) -> RunConfig:
    """``base`` with the values of flags.

    Args:
        command: the command's name in messages.
        words: the flags and their values.
        base: the values of the flags that are not given.
        help_text: what --help says.
        more: flags of the command that are parsed elsewhere, which a message may suggest.

    Raises ConfigError for unknown flags, and for values of the wrong type. Exits with code 0 after printing --help.
    """
    topic = topic_of(words)
    data, words = _take_all("--data", words)
    guards, words = _take_all("--guard", words)
    rewards, words = _take_all("--reward", words)
    base = _with_rewards(_with_data(_with_guards(base, guards), data), rewards)
    if topic is not None:
        print_help(command, base, topic, help_text or HelpText())
    watch = (WATCH_FLAG,) if command in WATCHING else ()
    return parse_flags(base, words, command, more=(*more, "--data", "--guard", "--reward", *watch))


def _take_all(flag: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The values of a flag that may be repeated, and the remaining words."""
    values: list[str] = []
    rest: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name == flag:
            values.append(value if equals else next(remaining, ""))
        else:
            rest.append(word)
    return values, rest


def _with_guards(base: RunConfig, flags: Sequence[str]) -> RunConfig:
    """The configuration with the guards of ``--guard`` flags after its own."""
    rules = merge_each(GuardConfig, [parse_guard(flag) for flag in flags], "flags", "guard")
    return dataclasses.replace(base, guard=(*base.guard, *rules)) if rules else base


def _with_data(base: RunConfig, flags: Sequence[str]) -> RunConfig:
    """The configuration with the path or the data sets of ``--data`` flags in place of its own."""
    if not flags:
        return base
    path, tables = parse_data(flags)
    sets = merge_each(DataSetConfig, tables, "flags", "data.sets")
    return changed(base, {"data.path": path, "data.sets": sets})


def _with_rewards(base: RunConfig, functions: Sequence[str]) -> RunConfig:
    """The configuration with the functions of ``--reward`` flags in place of its own."""
    if "" in functions:
        raise ConfigError("--reward needs a value: FILE.py:FUNCTION, or a built-in function")
    if not functions:
        return base
    return changed(base, {"reward.functions": tuple(functions)})


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file. Raises ConfigError if it is missing, not a regular file, or not TOML."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"config file {path} is not a regular file; name one with --config")
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from error
    except RecursionError:
        raise ConfigError(f"config file {path} is not readable TOML: it is nested too deeply") from None
    except ValueError as error:  # invalid TOML or UTF-8, a number with thousands of digits, a path with a NUL
        raise ConfigError(f"config file {path} is not TOML: {first_line(error)}") from error


def from_toml(text: str) -> RunConfig:
    """Parse the output of `to_toml`. Raises ConfigError for an unknown key, recipe or algorithm, or a wrong type."""
    table = tomllib.loads(text)
    return merge(_base(table), table, "the controller's configuration")


def _base(table: Mapping[str, Any]) -> RunConfig:
    """The configuration that a table is merged into; a task file is not loaded if the table has all top-level keys."""
    name = str(table["recipe"])
    if is_task_file(name) and all(field.name in table for field in dataclasses.fields(RunConfig)):
        return RunConfig(recipe=name)
    return defaults(name, _algorithm(table))


def from_file(path: Path) -> RunConfig:
    """Read the configuration of a run from its directory; ``run_dir`` defaults to the directory of the file.

    Raises ConfigError if the file cannot be read or is not a configuration.
    """
    table = read_toml(path)
    if "recipe" not in table:
        raise ConfigError(f"config file {path} has no key 'recipe': it is empty or damaged; restore it from a copy")
    config = merge(_base(table), table, str(path))
    return config if config.run_dir else dataclasses.replace(config, run_dir=str(path.absolute().parent))


def to_toml(config: RunConfig) -> str:
    """The configuration as TOML text, without the optional values that are None: TOML has no null."""
    return tomli_w.dumps(dataclasses.asdict(config, dict_factory=_without_none))


def _without_none(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in items if value is not None}


def _algorithm(table: Mapping[str, Any]) -> str:
    """The name of the algorithm in a configuration's table; empty if it has none."""
    algorithm = table.get("algorithm")
    name = algorithm.get("name", "") if isinstance(algorithm, Mapping) else ""
    return name if isinstance(name, str) else ""


def take(flag: str, arguments: list[str]) -> tuple[str, list[str]]:
    """The last value of a flag that is parsed before the others, empty if it is not given, and the remaining arguments.

    Raises ConfigError if no value follows the flag.
    """
    rest, value = [], ""
    remaining = iter(arguments)
    for argument in remaining:
        if argument == flag:
            value = next(remaining, "")
            if not value:
                raise ConfigError(f"{flag} needs a value")
        elif argument.startswith(f"{flag}="):
            value = argument.removeprefix(f"{flag}=")
        else:
            rest.append(argument)
    return value, rest
