"""Names of reward functions: ``[NAME=][WEIGHT*]FUNCTION[:WEIGHT]``, with FUNCTION in a file or built in."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrt.errors import ConfigError, suggested
from flowrt.runtime.addresses import check_url

FUNCTION = "reward"
"""Name of the function in a file that is given without one."""
NEEDS_ARGUMENT = {"regex": "PATTERN", "format": "PATTERN", "length": "N", "http": "URL", "task": "FILE.py:NAME"}
NEEDS_ARGUMENT |= {"model": "DIR"}
BUILT_IN = (*NEEDS_ARGUMENT, "code", "exact", "judge", "math")
REMOTE = ("http", "judge")
"""Functions that are requests; all others run in a child process."""
LOCAL = ("file", *(kind for kind in BUILT_IN if kind not in REMOTE))
IN_FILES = {"file": "reward function", "filter": "filter function", "task": "reward of task"}
"""Kinds of functions in users' files, and their descriptions in messages; for "task" see `TaskReward`."""
OPEN_ENDED = ("regex", "format", "http")
"""Functions whose argument may end in any text, so that their weight is written in front."""
FORM = "FILE.py:FUNCTION"
KEY_FIX = "put an API key into an environment variable and name it with reward.key_variable"
MAX_FUNCTIONS = 32
_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]*)=(.*)", re.DOTALL)
_WEIGHT = re.compile(r"([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?|nan|inf)\*(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TaskReward:
    """How a child makes the scorer of kind "task": this package does not import tasks."""

    module: str
    """Name of a module with a function `scorer` that takes the configuration."""
    configuration: str
    """Configuration of the run, as TOML."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """One reward function."""

    name: str
    """Unique name of the function; its metric is ``reward/NAME``."""
    kind: str
    """One of `BUILT_IN`, or "file", or "filter" (a filter function in a file)."""
    argument: str
    """FILE.py:FUNCTION, a pattern, an address, a number; empty if the kind takes none."""
    weight: float = 1.0

    @property
    def is_remote(self) -> bool:
        """Whether a call is a request to a server."""
        return self.kind in REMOTE

    @property
    def path(self) -> str:
        """The user's file; empty for a built-in function."""
        return self.argument.rpartition(":")[0] if self.kind in IN_FILES else ""

    @property
    def described(self) -> str:
        """Description of the function for messages, without a line number."""
        if self.kind not in IN_FILES:
            return f"reward function {self.name}"
        path, _, function = self.argument.rpartition(":")
        return f"{IN_FILES[self.kind]} {function} ({path})"

    def at(self, line: int) -> str:
        """Description of the function for messages, with this line of its file; 0: the line is unknown."""
        return self.described if not line or self.kind not in IN_FILES else f"{self.described[:-1]}:{line})"


def parse_function(text: str) -> RewardFunction:
    """The function that a text describes. Raises ConfigError if it is malformed; files need not exist."""
    name, weight, rest = _split(text)
    kind, _, argument = rest.partition(":")
    if kind not in BUILT_IN:
        kind, argument = "file", rest
    if kind not in OPEN_ENDED:
        # A single argument is the weight, unless the function needs an argument.
        argument, last = _without_weight(argument if kind in NEEDS_ARGUMENT or kind == "file" else f":{argument}")
        argument = argument.removeprefix(":")
        if weight and last:
            raise ConfigError(f"reward.functions has {text!r}, with two weights; leave out one")
        weight = weight or last
    if kind == "file":
        path, _, function = argument.partition(":")
        if not path.endswith(".py"):
            near = suggested(path, [kind for kind in BUILT_IN if kind != "task"])  # which only task files have
            raise ConfigError(f"reward.functions has {text!r}, which is neither {FORM} nor built in{near}")
        argument = f"{path}:{function or FUNCTION}"
        name = name or function or Path(path).stem
    elif kind in NEEDS_ARGUMENT and not argument:
        raise ConfigError(f"reward.functions has {text!r}; write {kind}:{NEEDS_ARGUMENT[kind]}")
    elif kind not in NEEDS_ARGUMENT and argument:
        raise ConfigError(f"reward.functions has {text!r}, and {kind} takes nothing but a weight; correct it")
    _check_argument(kind, argument, text)
    return RewardFunction(name or kind, kind, argument, _weight(weight, text))


def parse_functions(texts: Sequence[str]) -> tuple[RewardFunction, ...]:
    """All functions of a run.

    Raises ConfigError for a malformed function, two of the same name, too many, or weights that sum to 0.
    """
    if len(texts) > MAX_FUNCTIONS:
        raise ConfigError(f"reward.functions has {len(texts)} functions; use at most {MAX_FUNCTIONS}")
    functions = tuple(map(parse_function, texts))
    for name, count in Counter(function.name for function in functions).items():
        if count > 1:
            raise ConfigError(f"reward.functions has {count} functions {name!r}; name them, as in {name}2=…")
    if functions and sum(function.weight for function in functions) == 0:
        raise ConfigError("the weights of reward.functions sum to 0: every reward would be 0; change one")
    return functions


def with_paths(text: str, absolute: Callable[[str], str]) -> str:
    """The text of a function, with the path of its file replaced by ``absolute(path)``. Raises ConfigError."""
    function = parse_function(text)
    if function.kind not in ("file", "model"):  # the path of a task is absolute
        return text
    kind, path = ("model:", function.argument) if function.kind == "model" else ("", function.path)
    rest = _split(text)[2]
    return text.removesuffix(rest) + kind + absolute(path) + rest.removeprefix(kind + path)


def _split(text: str) -> tuple[str, str, str]:
    """The name and the weight in front of a function, each empty if there is none, and the rest."""
    match = _NAME.fullmatch(text)
    name, rest = (match[1], match[2]) if match else ("", text)
    match = _WEIGHT.fullmatch(rest)
    weight, rest = (match[1], match[2]) if match else ("", rest)
    return name, weight, rest


def check_file(function: RewardFunction) -> None:
    """Raise ConfigError if the file of a function, or its model, does not exist."""
    if function.kind == "model" and not Path(function.argument, "config.json").is_file():
        raise ConfigError(
            f"reward.functions has model:{function.argument}, and there is no {function.argument}/config.json; name "
            "the directory of a sequence classifier"
        )
    if function.path and not Path(function.path).is_file():
        raise ConfigError(
            f"reward.functions has {function.argument!r}, and there is no file {function.path!r}; correct it"
        )


def _without_weight(argument: str) -> tuple[str, str]:
    """An argument without the weight at its end, and that weight; empty if there is none."""
    before, colon, last = argument.rpartition(":")
    if colon and re.fullmatch(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?|nan|inf", last):
        return before, last
    return argument, ""


def _weight(word: str, text: str) -> float:
    try:
        weight = float(word or 1)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and 0 <= weight <= 1e9):
        raise ConfigError(f"reward.functions has {text!r}, and {word} is no weight; use a number from 0 to 1e9")
    return weight


def _check_argument(kind: str, argument: str, text: str) -> None:
    if kind in ("regex", "format"):
        try:
            re.compile(argument)
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"reward.functions has {text!r}, and its pattern is wrong: {error}; correct it") from None
    elif kind == "length" and not (argument.isdecimal() and int(argument[:12]) > 0 and len(argument) <= 12):
        raise ConfigError(f"reward.functions has {text!r}; length:N takes a number of characters above 0")
    elif kind == "http" and argument.startswith("//"):
        raise ConfigError(f"reward.functions has {text!r}; write http:http:{argument}")
    elif kind == "http":
        check_url("http:URL of reward.functions", argument, KEY_FIX)
