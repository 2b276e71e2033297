"""Task files: a task of the user's, FILE.py[:NAME], as a `base.Recipe` like those of the built-in tasks.

- Workers, which make the task, execute the file (`load`). Other processes use its description (`described`), which a
  child process (`flowrt.recipes.tasks.task_file_process`) computes, because the file may hang, exit or crash.
- A configuration has the absolute path and the recipe's name; FILE.py alone stands for RECIPE, or the only recipe.
"""

import functools
import hashlib
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig
from flowrt.recipes.tasks.base import Recipe
from flowrt.runtime import user_module
from flowrt.runtime.file_process import ask
from flowrt.runtime.user_module import FIX, load_module

Result = TypeVar("Result")
PROCESS = "flowrt.recipes.tasks.task_file_process"
MODULE = "flowrt_own_task"
NAME = "RECIPE"
"""Name of the recipe that FILE.py alone stands for."""
LOAD_S = 60.0
"""Deadline for the description of a file, in seconds."""


@dataclass(frozen=True, slots=True)
class TaskFile:
    """The description of a recipe in a task file."""

    recipe: str
    """FILE.py:NAME with an absolute path, as `RunConfig.recipe`."""
    summary: str
    defaults: Mapping[str, Any]
    """The default configuration, as a TOML table."""
    takes_reward: bool


def is_task_file(name: str) -> bool:
    """Whether the name of a recipe is FILE.py or FILE.py:NAME."""
    return split(name)[0].endswith(".py")


def split(name: str) -> tuple[str, str]:
    """The path and the recipe's name of FILE.py[:NAME]; the name is empty if it is not given."""
    if name.endswith(".py"):
        return name, ""
    path, _, attribute = name.rpartition(":")
    return path, attribute


def digest(name: str) -> str:
    """SHA-256 of the task file FILE.py[:NAME], in hexadecimal.

    Raises ConfigError if the file does not exist, cannot be read, or has the name of a module of Python.
    """
    path = Path(split(name)[0])
    try:
        if not path.is_file():
            raise ConfigError(f"there is no task file {path}; name a recipe, FILE.py, or FILE.py:NAME")
        if path.stem in sys.stdlib_module_names:  # a process in its directory would import it instead
            raise ConfigError(f"task file {path} has the name of a module of Python, which it would hide; rename it")
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"task file {path} cannot be read: {error.strerror}; {FIX}") from error
    except ValueError as error:  # a name with a NUL
        raise ConfigError(f"task file {str(path)!r:.80} cannot be read: {error}; {FIX}") from error


def described(name: str) -> TaskFile:
    """The description of a task file, computed by a child process, once for each content of the file.

    Raises ConfigError, in one sentence with the line of the file, for a file that is missing, cannot be loaded, does
    not return in time, or has no such recipe.
    """
    path, attribute = split(name)
    return _described(str(Path(path).absolute()), attribute, digest(name))


@functools.cache
def _described(path: str, attribute: str, _digest: str) -> TaskFile:
    """As `described`; the digest is only part of the key of the cache."""
    description = ask(PROCESS, ["describe", f"{path}:{attribute}"], f"task file {path}", LOAD_S)
    return TaskFile(
        recipe=f"{path}:{description['name']}",
        summary=str(description["summary"]),
        defaults=tomllib.loads(str(description["defaults"])),
        takes_reward=description["takes_reward"] is True,
    )


def load(name: str) -> tuple[str, Recipe]:
    """The name of a recipe in a file, and the recipe. This process executes the file, once for each content of it.

    Raises ConfigError, with the line of the file if it is known, if the file fails or has no usable recipe.
    """
    path, attribute = split(name)
    return _load(str(Path(path).absolute()), attribute, digest(name))


@functools.cache
def _load(path: str, attribute: str, digest_of_file: str) -> tuple[str, Recipe]:
    name = f"{MODULE}_{digest_of_file[:16]}"
    module = called(path, "while the file was loaded", lambda: load_module(path, name))
    recipes = {key: value for key, value in vars(module).items() if isinstance(value, Recipe)}
    name = attribute or (NAME if NAME in recipes or len(recipes) != 1 else next(iter(recipes)))
    if name not in recipes:
        there_is = ", ".join(recipes) or "none"
        if not attribute and recipes:
            raise ConfigError(f"task file {path} has several recipes, {there_is}; name one as {path}:NAME")
        raise ConfigError(
            f"task file {path} has no recipe {name}, a flowrt.tasks.Recipe (there is: {there_is}); define it, or name "
            "another as FILE.py:NAME"
        )
    recipe = recipes[name]
    for field, kind in (("summary", str), ("defaults", RunConfig), ("takes_reward", bool)):
        if not isinstance(value := getattr(recipe, field), kind):
            raise ConfigError(f"task file {path}: {name}.{field} is {type(value).__name__}, not {kind.__name__}; {FIX}")
    if not callable(recipe.task):
        raise ConfigError(
            f"task file {path}: {name}.task is {type(recipe.task).__name__}, and not a function of a RunConfig; {FIX}"
        )
    return name, recipe


def called(path: str, doing: str, call: Callable[[], Result]) -> Result:
    """The result of a call of the code of a task file, see `flowrt.runtime.user_module.called`."""
    return user_module.called("task file", path, doing, call)
