"""Configurations from the command line and from TOML, checked: one clear sentence for each mistake."""

import dataclasses
import difflib
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tomli_w
import tyro

from flowrt.controller.admission import StrictLag
from flowrt.errors import ConfigError
from flowrt.recipes import arithmetic, gsm8k, own
from flowrt.recipes.config import RunConfig
from flowrt.recipes.grpo import refresh
from flowrt.recipes.limits import check_limits

Config = TypeVar("Config")
RECIPE_NAMES = ("arithmetic", "gsm8k", "own")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def defaults(recipe: str) -> RunConfig:
    """The complete default configuration of a recipe. Raises ConfigError for one that does not exist."""
    match recipe:
        case "arithmetic":
            return arithmetic.config()
        case "gsm8k":
            return gsm8k.config()
        case "own":
            return own.config()
    raise ConfigError(f"there is no recipe {recipe!r}{_suggest(recipe, RECIPE_NAMES)}")


def parse(arguments: Sequence[str]) -> RunConfig:
    """``[recipe] [--config FILE.toml] [--key value …]``: flags override the file, the file the defaults.

    Raises ConfigError on bad values; leaves with exit code 2 on bad flags, after naming the right ones.
    """
    rest = list(arguments)
    recipe = rest.pop(0) if rest and not rest[0].startswith("-") else ""
    file, rest = _take("--config", rest)
    named, rest = _take("--recipe", rest)
    if recipe and named and recipe != named:
        raise ConfigError(f"recipe {recipe!r} or {named!r}? Name only one of them")
    recipe = recipe or named
    table = read_toml(Path(file)) if file else {}
    base = defaults(recipe or str(table.get("recipe", "arithmetic")))
    if recipe and table.get("recipe", recipe) != recipe:
        raise ConfigError(f"{file} is for recipe {table['recipe']!r}, not {recipe!r}; name only one of them")
    base = merge(base, table, file)
    told = f"Recipe {base.recipe!r} (of {', '.join(RECIPE_NAMES)}). Flags override --config FILE.toml."
    parsed = read_flags("flowrt run", told, rest, base)
    check(parsed)
    return parsed


def read_flags(command: str, told: str, words: Sequence[str], base: RunConfig) -> RunConfig:
    """``base`` with the values of flags; leaves with exit code 2 on bad ones, and after --help, which says ``told``."""
    return tyro.cli(
        RunConfig,
        prog=command,
        description=told,
        args=words,
        default=base,
        config=(tyro.conf.FlagConversionOff,),
    )


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError when the file is missing or no TOML."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is no TOML: {error}") from error


def from_toml(text: str) -> RunConfig:
    """The configuration that `to_toml` wrote."""
    table = tomllib.loads(text)
    return merge(defaults(str(table["recipe"])), table, "the controller's configuration")


def from_file(path: Path) -> RunConfig:
    """The configuration that a run left in its directory. Raises ConfigError when it cannot be read, or is none."""
    table = read_toml(path)
    return merge(defaults(str(table.get("recipe", ""))), table, str(path))


def to_toml(config: RunConfig) -> str:
    return tomli_w.dumps(dataclasses.asdict(config))


def merge(base: Config, table: Mapping[str, Any], source: str, path: str = "") -> Config:
    """``base`` with the table's values. Raises ConfigError for an unknown key or a wrong type, naming the right one."""
    hints = get_type_hints(type(base))
    changes: dict[str, Any] = {}
    for key, value in table.items():
        where = f"{path}{key}"
        if key not in hints:
            raise ConfigError(f"{source}: there is no key {where!r}{_suggest(key, hints)}")
        current = getattr(base, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{source}: {where!r} is a table of keys, not {value!r}")
            changes[key] = merge(current, value, source, f"{where}.")
        else:
            changes[key] = _typed(value, hints[key], where, source)
    return dataclasses.replace(base, **changes)  # type: ignore[type-var]


def check(config: RunConfig) -> None:
    """Raises ConfigError for values that cannot work together."""
    StrictLag(config.staleness)
    if config.group_size == 1 and config.loss.normalize:
        raise ConfigError(
            "group_size is 1: GRPO divides by the group's standard deviation, which one sample does not have; "
            "use 2 or more, or --loss.normalize False"
        )
    check_limits(config)
    refresh(config.rollout.refresh)
    if config.data.reward and config.recipe != "own":
        raise ConfigError(f"recipe {config.recipe} has a reward of its own; for yours: flowrt run own")
    if config.rollout.engine == "sglang":
        check_sglang(config)
    if config.model:
        check_model(Path(config.model))


def check_sglang(config: RunConfig) -> None:
    """Raises ConfigError when there can be no server, or it is asked for what it cannot do."""
    server = config.rollout.sglang
    if bool(server.url) == bool(server.python):
        raise ConfigError(
            "rollout.engine is sglang: name its Python with --rollout.sglang.python (scripts/install_sglang "
            "makes one), or a server that is running with --rollout.sglang.url; one of the two"
        )
    if server.python and not Path(server.python).is_file():
        raise ConfigError(f"rollout.sglang.python is {server.python!r}, which is no file")
    if server.url and not server.url.startswith(("http://", "https://")):
        raise ConfigError(f"rollout.sglang.url is {server.url!r}; it begins with http:// or https://")
    if server.url and config.rollout.workers > 1:
        raise ConfigError(
            f"rollout.workers is {config.rollout.workers}: two workers cannot change the weights of one server; use 1"
        )
    if server.device == "npu" and server.weights == "broadcast":
        raise ConfigError(
            "rollout.sglang.weights broadcast goes by gloo, which takes nothing from NPUs; use disk or tensor"
        )
    try:
        shlex.split(server.arguments)
    except ValueError as error:
        raise ConfigError(f"rollout.sglang.arguments is {server.arguments!r}: {error}") from error
    if config.deterministic:
        raise ConfigError("deterministic runs need --rollout.engine torch: a server batches as requests come")
    if config.rollout.compile:
        raise ConfigError("rollout.compile is for --rollout.engine torch; servers have options of their own for it")
    if not config.rollout.recompute:
        raise ConfigError("rollout.recompute is for --rollout.engine torch; use --rollout.sglang.pause in_place")


def check_model(path: Path) -> None:
    """Raises ConfigError when the directory cannot be a Hugging Face checkpoint."""
    if not path.is_dir():
        raise ConfigError(f"model {path} is no directory; give one with config.json, weights and a tokenizer")
    if not (path / "config.json").is_file():
        raise ConfigError(f"model {path} has no config.json; is it a Hugging Face checkpoint?")
    if not any(path.glob("*.safetensors")):
        if any(path.glob("*.bin")):
            raise ConfigError(
                f"model {path} has its weights in a pickle (*.bin), which is never opened here: it could run anything; "
                "where you trust it, load it with transformers and save_pretrained it again"
            )
        raise ConfigError(f"model {path} has no weights (*.safetensors); is the download complete?")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"model {path} has no tokenizer ({', '.join(TOKENIZER_FILES)}); is the download complete?")


def _take(flag: str, arguments: list[str]) -> tuple[str, list[str]]:
    """The value of a flag that is looked at before the others, and the arguments without it."""
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


def _typed(value: Any, expected: type, where: str, source: str) -> Any:
    if expected is float and type(value) is int:
        return float(value)
    if get_origin(expected) is Literal:
        if value not in get_args(expected):
            raise ConfigError(f"{source}: {where!r} takes one of {', '.join(get_args(expected))}, not {value!r}")
        return value
    if type(value) is not expected:
        raise ConfigError(f"{source}: {where!r} takes {expected.__name__}, not {type(value).__name__} {value!r}")
    return value


def _suggest(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"
