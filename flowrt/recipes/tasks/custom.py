"""The user's own task: prompts from a data set, reward functions by name (`flowrt.rewards`), any model.

`Example.answer` is the JSON of what a function may take: the columns, with "prompt" and "answer" by these names.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NoReturn, overload

from tokenizers import Tokenizer

from flowrt.errors import ConfigError
from flowrt.recipes.config import DataConfig, RolloutConfig, RunConfig, TrainerConfig
from flowrt.recipes.data.base import Rows
from flowrt.recipes.data.columns import MISSING, Messages, as_columns, find, prompt_or_messages
from flowrt.recipes.data.files import open_rows
from flowrt.recipes.data.mistakes import Mistakes
from flowrt.recipes.tasks.base import Example, Recipe, Task
from flowrt.recipes.tasks.rows import data_path, first_held_out
from flowrt.rewards.check import FIRST_ROWS, check_rewards
from flowrt.rewards.options import RewardOptions


class CustomProblems(Sequence[Example]):
    """A range of the rows of a data set, as problems that are made when they are read."""

    def __init__(self, rows: Rows, data: DataConfig, places: range) -> None:
        self._rows = rows
        self._data = data
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        """A problem. Raises ConfigError if its row cannot be used."""
        if isinstance(index, slice):
            return CustomProblems(self._rows, self._data, self._places[index])
        place = self._places[index]
        return problem(self._rows.row(place), self._data, self._rows.where(place))

    def __iter__(self) -> Iterator[Example]:
        if self._places.start != 0 or self._places.step != 1:
            yield from super().__iter__()
            return
        for place, row in zip(self._places, self._rows.scan(), strict=False):
            if isinstance(row, ConfigError):
                raise row
            yield problem(row, self._data, self._rows.where(place))


def problem(row: object, data: DataConfig, where: str) -> Example:
    """The problem of a row. Raises ConfigError if it has no prompt."""
    columns = as_columns(row, where)
    prompt, messages = prompt_or_messages(columns, data.prompt_key, where, prefill=data.prefill)
    answer = find(columns, data.answer_key)
    named = {key: value for key, value in columns.items() if key not in (data.prompt_key, data.answer_key)}
    named["prompt"] = [{"role": role, "content": content} for role, content in messages] or prompt
    named["answer"] = None if answer is MISSING else answer
    # Values that JSON does not have (dates, bytes) come from Arrow only.
    return Example(prompt, json.dumps(named, default=str), "", where, messages)


def folded(prompt: str, messages: Messages) -> str:
    """A prompt in which runs of white space are one space: equal for prompts that count as the same."""
    return " ".join((prompt or "\0".join(part for message in messages for part in message)).split())


class CustomTask(Task):
    """The user's prompts and reward; the last ``data.eval_prompts`` rows are held out. Rows are read on demand."""

    scores_truncated = True

    def __init__(self, path: Path, data: DataConfig, reward: RewardOptions) -> None:
        self._path = path
        self._data = data
        self._reward = reward

    def training_problems(self) -> Sequence[Example]:
        return CustomProblems(self._rows, self._data, range(self._first_held_out))

    def held_out_problems(self) -> Sequence[Example]:
        return CustomProblems(self._rows, self._data, range(self._first_held_out, len(self._rows)))

    def check(self, progress: Callable[[str], None]) -> tuple[str, ...]:
        """Check every row, and call the reward functions on the first one that they apply to."""
        check_rows(self._rows, self._data, self._first_held_out)
        problems = self.training_problems()
        rows = [problem.answer.encode() for problem in problems[:FIRST_ROWS]]
        return check_rewards(self._reward, rows, progress)

    def sft_example(self, rng: random.Random, answer_only: bool) -> Example:  # noqa: ARG002
        _no_model()

    def tokenizer(self) -> Tokenizer:
        _no_model()

    @cached_property
    def _rows(self) -> Rows:
        return open_rows(self._path, self._data.split)

    @cached_property
    def _first_held_out(self) -> int:
        return first_held_out(len(self._rows), self._data.eval_prompts, self._path)


def check_rows(rows: Rows, data: DataConfig, first_held_out: int) -> None:
    """Raise ConfigError for the first ten rows that cannot be used, and for held-out prompts that are trained on."""
    mistakes = Mistakes()
    answers = Counter[bool]()
    without_answer = 0
    held_out = set() if data.allow_overlap else _folded(rows, data, range(first_held_out, len(rows)))
    shared: list[int] = []
    for index, row in enumerate(rows.scan()):
        try:
            columns, prompt, messages = _checked(row, data, rows, index)
        except ConfigError as error:
            mistakes.add(error)
            continue
        has_answer = find(columns, data.answer_key) is not MISSING
        if not has_answer and not answers[False]:
            without_answer = index
        answers[has_answer] += 1
        if held_out and index < first_held_out and folded(prompt, messages) in held_out:
            shared.append(index)
    mistakes.report()
    if answers[False] and (answers[True] or data.answer_key != DataConfig.answer_key):
        names = ", ".join(map(repr, as_columns(rows.row(without_answer), "")))
        raise ConfigError(
            f"{rows.where(without_answer)} has no field {data.answer_key!r}; it has {names[:200]}; leave the column "
            "out of every row, or of none"
        )
    if shared:
        raise ConfigError(
            f"{rows.where(shared[0])}: the prompt is also held out for the evaluation, as {len(shared)} training "
            f"prompts are (the last {len(rows) - first_held_out} rows are held out); leave them out, or set "
            "data.allow_overlap"
        )


def _checked(row: object, data: DataConfig, rows: Rows, index: int) -> tuple[Mapping[str, object], str, Messages]:
    """The columns and the prompt of a row. Raises ConfigError with its place."""
    if isinstance(row, ConfigError):
        raise row
    try:
        columns = as_columns(row, "")
        return columns, *prompt_or_messages(columns, data.prompt_key, "", prefill=data.prefill)
    except ConfigError:  # again, with the place, which is not made for rows that are right
        where = rows.where(index)
        columns = as_columns(row, where)
        return columns, *prompt_or_messages(columns, data.prompt_key, where, prefill=data.prefill)


def _folded(rows: Rows, data: DataConfig, places: range) -> set[str]:
    found: set[str] = set()
    for place in places:
        try:
            _, prompt, messages = _checked(rows.row(place), data, rows, place)
        except ConfigError:
            continue  # reported with the other mistakes
        found.add(folded(prompt, messages))
    return found


def _no_model() -> NoReturn:
    raise ConfigError("recipe custom starts from a model of yours; name its directory with --model")


def _task(config: RunConfig) -> CustomTask:
    path = data_path(config)
    if not config.model or not config.reward.functions:
        raise ConfigError("recipe custom needs --model DIRECTORY and --reward FUNCTION (FILE.py:FUNCTION, math …), too")
    return CustomTask(path, config.data, config.reward)


RECIPE = Recipe(
    "your prompts, reward and model: --data FILE.jsonl --reward FILE.py:FUNCTION --model DIR",
    RunConfig(
        recipe="custom",
        data=DataConfig(prompt_key="prompt", eval_prompts=64),
        rollout=RolloutConfig(max_new_tokens=256),
        trainer=TrainerConfig(lr=1e-5, warmup_steps=10, micro_batch_tokens=8192),
    ),
    _task,
    takes_reward=True,
)
"""Suited to a pretrained model; the data, the reward and the model have no default."""
