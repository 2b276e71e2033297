"""The child process that executes a task file before a run: ``describe FILE.py:NAME``, and ``check`` and ``answers N``,
which read a configuration (TOML) from stdin.

`flowrt.runtime.file_process.ask` starts it. ``check`` calls all methods of the task that a run will call.
"""

import functools
import math
import random
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NoReturn

from tokenizers import Tokenizer

from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import from_toml, to_toml
from flowrt.recipes.eval_sets import check_eval_sets
from flowrt.recipes.tasks.base import Example, Task
from flowrt.recipes.tasks.problems import folded
from flowrt.recipes.tasks.registry import task_of
from flowrt.recipes.tasks.task_file import called, load, split
from flowrt.runtime.file_process import answer
from flowrt.runtime.user_module import FIX

COMPARED = 512
"""Prompts that are compared with those of a second task of the same configuration."""
SCORED = 4
"""Training prompts on which the reward is called."""
GIBBERISH = "?? 0,0 no answer"


def describe(name: str) -> dict[str, object]:
    """The fields of `flowrt.recipes.tasks.task_file.TaskFile`, with the recipe's name alone and the defaults as TOML.

    Raises ConfigError if the file cannot be loaded.
    """
    attribute, recipe = load(name)
    path = split(name)[0]
    defaults = called(path, f"while {attribute}.defaults were written", lambda: to_toml(recipe.defaults))
    return {
        "name": attribute,
        "summary": " ".join(recipe.summary.split()),
        "defaults": defaults,
        "takes_reward": recipe.takes_reward,
    }


def check(config: RunConfig) -> dict[str, object]:
    """Make the task, read all its prompts, and call its reward, tokenizer and examples.

    Returns:
        The names of the parts of reward functions, as ``parts``.

    Raises ConfigError for the first error.
    """
    path = split(config.recipe)[0]
    what = f"task file {path}"
    task = task_of(config)
    training = _problems(path, "training_problems", task.training_problems)
    held_out = _problems(path, "held_out_problems", task.held_out_problems)
    if not training:
        raise ConfigError(f"{what}: training_problems gives no prompts; {FIX}")
    if config.data.eval_prompts and not config.eval.data and not held_out:
        raise ConfigError(
            f"{what}: held_out_problems gives no prompts, and data.eval_prompts is {config.data.eval_prompts}; give "
            "some, or set data.eval_prompts to 0"
        )
    _check_same(path, config, training)
    _, recipe = load(config.recipe)
    if not recipe.takes_reward:
        _check_held_out(config, what, training, held_out)
        for problem in training[:SCORED]:
            for response in (problem.solution, problem.answer, "", GIBBERISH):
                _check_reward(path, task, response, problem.answer)
    if not config.model:
        _check_embedded_model(path, task, config)
    check_eval_sets(config, task)
    parts = called(path, "in check", lambda: task.check(lambda _: None))
    return {"parts": list(parts)}


def answers(config: RunConfig, limit: int) -> dict[str, object]:
    """The answers of the first ``limit`` training prompts, as ``answers``.

    Raises ConfigError if the task cannot be made or has no training prompts.
    """
    path = split(config.recipe)[0]
    training = _problems(path, "training_problems", task_of(config).training_problems)
    if not training:
        raise ConfigError(f"task file {path}: training_problems gives no prompts; {FIX}")
    return {"answers": [problem.answer for problem in islice(training, limit)]}


def _problems(path: str, name: str, problems: Callable[[], Sequence[Example]]) -> Sequence[Example]:
    """The problems that a method of the task returns. Raises ConfigError for one that is not a valid example."""

    def checked() -> Sequence[Example]:
        examples: object = problems()
        if not isinstance(examples, Sequence):
            raise ConfigError(f"task file {path}: {name} gives {type(examples).__name__}, not a sequence; {FIX}")
        for index, example in enumerate(examples):
            _check_example(path, name, index, example)
        return examples

    return called(path, f"in {name}", checked)


def _check_example(path: str, name: str, index: int, example: object) -> None:
    if not isinstance(example, Example):
        raise ConfigError(f"task file {path}: {name} gives {type(example).__name__} at {index}, no Example; {FIX}")
    for field in ("prompt", "answer", "solution"):
        if not isinstance(value := getattr(example, field), str):
            kind = type(value).__name__
            raise ConfigError(f"task file {path}: {field} {index} of {name} is {kind}, not text; {FIX}")
    if not example.prompt and not example.messages:
        raise ConfigError(f"task file {path}: prompt {index} of {name} is empty; {FIX}")


def _check_same(path: str, config: RunConfig, training: Sequence[Example]) -> None:
    """Raise ConfigError if a second task of the same configuration has other prompts."""
    again = called(path, "in training_problems", lambda: task_of(config).training_problems())
    if len(again) != len(training) or list(islice(again, COMPARED)) != list(islice(training, COMPARED)):
        raise ConfigError(
            f"task file {path}: training_problems gives other prompts when the task is made again, and every worker "
            "makes it; draw random numbers from a generator that is seeded with the seed of the configuration"
        )


def _check_held_out(config: RunConfig, what: str, training: Sequence[Example], held_out: Sequence[Example]) -> None:
    """Raise ConfigError if a held-out prompt is also a training prompt, unless ``data.allow_overlap``."""
    trained = {folded(*problem.as_prompt) for problem in training}
    shared = [problem for problem in held_out if folded(*problem.as_prompt) in trained]
    if shared and not config.data.allow_overlap:
        raise ConfigError(
            f"{what}: {len(shared)} of {len(held_out)} held-out prompts are training prompts too, the first one "
            f"{shared[0].prompt[:60]!r}; leave them out of one, or set data.allow_overlap"
        )


def _check_reward(path: str, task: Task, response: str, answer_text: str) -> None:
    on = f"in the reward of the response {response[:60]!r} to the answer {answer_text[:60]!r}"
    value: object = called(path, on, lambda: task.reward(response, answer_text))
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"task file {path}: the reward is {value!r:.60}, not a finite number, {on}; {FIX}")


def _check_embedded_model(path: str, task: Task, config: RunConfig) -> None:
    """Raise ConfigError if the task has no usable tokenizer or SFT examples, from which to build a model."""
    tokenizer: object = called(path, "in tokenizer", task.tokenizer)
    if not isinstance(tokenizer, Tokenizer):
        kind = type(tokenizer).__name__
        raise ConfigError(f"task file {path}: tokenizer gives {kind}, not a tokenizers.Tokenizer; {FIX}")
    for token in ("<pad>", "<eos>"):
        if tokenizer.token_to_id(token) is None:
            raise ConfigError(f"task file {path}: the tokenizer has no token {token}; add it as a special token")
    for steps, answer_only in ((config.sft.steps, False), (config.sft.answer_only_steps, True)):
        if steps:
            draw = functools.partial(task.sft_example, random.Random(config.seed), answer_only)
            example: object = called(path, "in sft_example", draw)
            if not isinstance(example, Example):
                raise ConfigError(f"task file {path}: sft_example gives {type(example).__name__}, no Example; {FIX}")


def main(words: Sequence[str]) -> NoReturn:
    """Execute the command of these words, write its result or its error as the answer, and exit."""
    try:
        if words[0] == "describe":
            answered = describe(words[1])
        elif words[0] == "answers":
            answered = answers(from_toml(sys.stdin.read()), int(words[1]))
        else:
            answered = check(from_toml(sys.stdin.read()))
    except ConfigError as error:
        answered = {"error": str(error)}
    answer(answered)


if __name__ == "__main__":
    main(sys.argv[1:])
