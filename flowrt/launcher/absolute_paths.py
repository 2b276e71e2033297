"""The paths of a configuration, made absolute: its workers may start in other directories."""

import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from flowrt.errors import ConfigError, refuse
from flowrt.observability.exporters.sink import own_path
from flowrt.recipes.algorithms import is_own
from flowrt.recipes.config import RunConfig, changed
from flowrt.recipes.constraints import value_mistakes
from flowrt.recipes.data_config import DataSetConfig
from flowrt.recipes.data_sets import options_text
from flowrt.recipes.eval_names import eval_data_sets
from flowrt.rewards.reward_names import with_paths


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""


def _template(name: str) -> str:
    return name if name in ("none", "chat") else _absolute(name)


def _tools(tools: str) -> str:
    """``data.tools`` with an absolute path, if it is one."""
    return tools if tools.lstrip().startswith("[") else _absolute(tools)


def _data_set(data_set: DataSetConfig) -> DataSetConfig:
    template = None if data_set.chat_template is None else _template(data_set.chat_template)
    tools = None if data_set.tools is None else _tools(data_set.tools)
    return replace(data_set, path=_absolute(data_set.path), chat_template=template, tools=tools)


def _reward(function: str) -> str:
    return with_paths(function, _absolute)


def _exporter(name: str) -> str:
    path = own_path(name)
    return f"{_absolute(path)}{name.removeprefix(path)}" if path else name


def _command(text: str) -> str:
    """guards.command with an absolute path if its program is a file. Raises ConfigError if there is no such program."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"guards.command {text!r:.80} is no command line: {error}") from error
    if words and Path(words[0]).is_file():
        words[0] = _absolute(words[0])
    if words and shutil.which(words[0]) is None:
        raise ConfigError(f"guards.command names {words[0]!r:.80}, and there is no such program; correct it")
    return shlex.join(words)


def _each(absolute: Callable[[Any], Any]) -> Callable[[Iterable[Any]], tuple[Any, ...]]:
    return lambda values: tuple(map(absolute, values))


PATHS: Mapping[str, Callable[[Any], Any]] = {
    "run_dir": _absolute,
    "model": _absolute,
    "reference.model": _absolute,
    "data.path": _absolute,
    "data.sets": _each(_data_set),
    "data.chat_template": _template,
    "data.tools": _tools,
    "reward.functions": _each(_reward),
    "algorithm.filter.function": _absolute,
    "exporters": _each(_exporter),
    "guards.command": _command,
    "controller.keys": _absolute,
    "trainer.final_dir": _absolute,
}
"""What makes the value of a key absolute, by the name of the key."""


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The configuration with every path made absolute.

    Raises ConfigError for a path that TOML cannot represent, and for guards.command without a program.
    """
    evaluated = map(_data_set, eval_data_sets(config).values())
    values = {key: absolute(attrgetter(key)(config)) for key, absolute in PATHS.items()}
    values["eval.data"] = tuple(f"{data_set.name}={data_set.path}{options_text(data_set)}" for data_set in evaluated)
    if is_own(config.algorithm.name):
        values["algorithm.name"] = _absolute(config.algorithm.name)
    config = changed(config, values)
    refuse(value_mistakes(config))  # the paths now include the current directory
    return config
