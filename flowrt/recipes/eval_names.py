"""Names, paths and options of the data sets of evaluations (``eval.data``)."""

import hashlib
import re

from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig
from flowrt.recipes.data_config import DataSetConfig
from flowrt.recipes.data_sets import OPTIONS, split_options

HELD_OUT = "held_out"
"""The name of the held-out rows of the task."""
NAME_BITS = 40
ROW_BITS = 22
"""The number of an evaluation prompt has two parts: `NAME_BITS` of a hash of the data set's name above, and the row
within the set in the lowest `ROW_BITS`."""
MAX_EVAL_ROWS = 1 << ROW_BITS
"""Maximum number of prompts of a data set."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def eval_data_sets(config: RunConfig) -> dict[str, DataSetConfig]:
    """The data sets of ``eval.data``, by their names.

    Raises ConfigError for an entry that is not NAME=PATH with options, and for two entries with the same name.
    """
    data_sets: dict[str, DataSetConfig] = {}
    for text in config.eval.data:
        head, options = split_options(text, f"eval.data {text!r:.80}")
        name, equals, path = head.partition("=")
        if not equals or not path or not _NAME.fullmatch(name):
            raise ConfigError(
                f"eval.data has {text!r:.80}; give NAME=PATH, with a name of letters, digits, and _ . - between them"
            )
        if name in data_sets:
            raise ConfigError(f"eval.data has two data sets of the name {name!r}; give one another name")
        data_sets[name] = DataSetConfig(name, path, 1.0, *[options.get(key) for key in OPTIONS])
    return data_sets


def chat_templates(config: RunConfig) -> tuple[str, ...]:
    """The chat templates of all prompts of a run, each once, that of ``data`` first. Raises as `eval_data_sets`."""
    sets = (*config.data.sets, *eval_data_sets(config).values())
    own = [set_.chat_template for set_ in sets if set_.chat_template is not None]
    return tuple(dict.fromkeys([config.data.chat_template, *own]))


def eval_names(config: RunConfig) -> list[str]:
    """The names of the data sets that are evaluated: those of ``eval.data``, else `HELD_OUT` if rows are held out.

    Raises ConfigError as `eval_data_sets`.
    """
    return list(eval_data_sets(config)) or ([HELD_OUT] if config.data.eval_prompts else [])


def first_number(name: str) -> int:
    """The number of the first prompt of an evaluation data set, from the BLAKE2b hash of the set's name."""
    digest = hashlib.blake2b(name.encode(), digest_size=NAME_BITS // 8).digest()
    return int.from_bytes(digest, "little") << ROW_BITS


def evaluated_row(number: int) -> int:
    """The row, from 0, of the evaluation prompt with this number."""
    return number & (1 << ROW_BITS) - 1


def evaluated_sets(config: RunConfig) -> dict[int, str]:
    """The names of the data sets that are evaluated, by the number of their first prompt. Raises as `eval_names`."""
    return {first_number(name): name for name in eval_names(config)}


def first_number_of(number: int) -> int:
    """The number of the first prompt in the data set of the evaluation prompt with this number."""
    return number - evaluated_row(number)
