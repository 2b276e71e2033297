"""Problems of recipe custom: rows of data sets, converted when they are accessed, and the check of all rows."""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from operator import itemgetter
from pathlib import Path
from typing import overload

from flowrt.engines.prompts import Messages, PromptFormat, as_message
from flowrt.errors import ConfigError
from flowrt.ids import MAX_ROWS
from flowrt.recipes.data.base import Mistakes, Rows
from flowrt.recipes.data.columns import MISSING, as_columns, find
from flowrt.recipes.data.difficulty import Selection, difficulties, within
from flowrt.recipes.data.files import open_rows
from flowrt.recipes.data.mixture import largest_remainder
from flowrt.recipes.data.prompt_scan import checked, row_prompt, scan_prompts
from flowrt.recipes.data_config import DataConfig
from flowrt.recipes.data_sets import has_own_format, set_data
from flowrt.recipes.tasks.base import Example, PromptBlock
from flowrt.recipes.tasks.rows import first_held_out
from flowrt.rewards.rows import NoColumnType, encode_row


class Problems(Sequence[Example]):
    """The problems of a range of rows of a data set; each is made when it is accessed."""

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
        """The problem of an index, or a view of a slice. Raises ConfigError if the row cannot be used."""
        if isinstance(index, slice):
            return Problems(self._rows, self._data, self._places[index])
        place = self._places[index]
        return self._problem(self._rows.row(place), place)

    def __iter__(self) -> Iterator[Example]:
        if self._places.start != 0 or self._places.step != 1:
            yield from super().__iter__()
            return
        for place, row in zip(self._places, self._rows.scan(), strict=False):
            if isinstance(row, ConfigError):
                raise row
            yield self._problem(row, place)

    def _problem(self, row: object, place: int) -> Example:
        return problem(row, self._data, self._rows.where(place), has_null_keys=self._rows.has_null_keys)


class Formed(Sequence[Example]):
    """Problems whose prompts become tokens in a way of their own (`Example.form`)."""

    def __init__(self, problems: Sequence[Example], form: PromptFormat) -> None:
        self._problems = problems
        self._form = form

    @classmethod
    def of(cls, problems: Sequence[Example], form: PromptFormat | None) -> Sequence[Example]:
        """The problems with a format of their own; as they are without one."""
        return problems if form is None else cls(problems, form)

    def __len__(self) -> int:
        return len(self._problems)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        if isinstance(index, slice):
            return Formed(self._problems[index], self._form)
        return replace(self._problems[index], form=self._form)

    def __iter__(self) -> Iterator[Example]:
        for example in self._problems:
            yield replace(example, form=self._form)


class Concatenated(Sequence[Example]):
    """The problems of several data sets, one set after the other."""

    def __init__(self, parts: Sequence[Sequence[Example]]) -> None:
        self._parts = parts
        self._starts = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        if isinstance(index, slice):
            return [self[at] for at in range(len(self))[index]]
        place = range(len(self))[index]
        part = bisect_right(self._starts, place) - 1
        return self._parts[part][place - self._starts[part]]

    def __iter__(self) -> Iterator[Example]:
        for part in self._parts:
            yield from part


def in_turn(parts: Sequence[Sequence[Example]]) -> Iterator[Example]:
    """The problems of several data sets: the first of each, then the second of each, and so on."""
    for part, index in _places_in_turn(parts):
        yield part[index]


def shortest_first(parts: Sequence[Sequence[Example]], most: int) -> Iterator[Example]:
    """The first problems of several data sets in turn, at most ``most``, those with the shortest prompts first."""
    places = [*islice(_places_in_turn(parts), most)]
    # Problems are made again, not kept: the columns of a row may be large.
    lengths = [len(folded(*part[index].as_prompt)) for part, index in places]
    for _, (part, index) in sorted(zip(lengths, places, strict=True), key=itemgetter(0)):
        yield part[index]


def _places_in_turn(parts: Sequence[Sequence[Example]]) -> Iterator[tuple[Sequence[Example], int]]:
    for index in range(max(map(len, parts))):
        for part in parts:
            if index < len(part):
                yield part, index


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """A data set of the user's.

    Attributes:
        name: name of the set; empty if it is the only one.
        weight: share of the prompts, relative to the other sets.
        rows: all rows.
        data: options by which the rows are read.
        first_held_out: index of the first row that is held out; the rows before it are trained on.
        difficulties: difficulty of each row if the rows are ordered by it; else empty.
        form: how its prompts become tokens; None: as the data of the run says.
    """

    name: str
    weight: float
    rows: Rows
    data: DataConfig
    first_held_out: int
    difficulties: Sequence[float] = ()
    form: PromptFormat | None = None

    @property
    def training(self) -> Sequence[Example]:
        """The problems to train on."""
        return Formed.of(Problems(self.rows, self.data, range(self.first_held_out)), self.form)

    @property
    def held_out(self) -> Sequence[Example]:
        """The problems of the evaluation."""
        return Formed.of(Problems(self.rows, self.data, range(self.first_held_out, len(self.rows))), self.form)

    def prompt_blocks(self) -> Iterator[PromptBlock]:
        """All prompts, in the order of the rows. Raises ConfigError for a row that cannot be used."""
        for batch in scan_prompts(self.rows, self.data):
            prompts = [prompt for prompt in batch.prompts if prompt is not None]
            if len(prompts) < len(batch.prompts):
                raise batch.mistakes[0]
            yield PromptBlock(self.name, prompts, partial(self._where, batch.first), self.form)

    def _where(self, first: int, index: int) -> str:
        return self.rows.where(first + index)


def open_sets(data: DataConfig) -> list[ProblemSet]:
    """The data sets ``data.sets``, or the only one at ``data.path``.

    Raises ConfigError if a set cannot be read, or has no row left to train on after its share of the held-out prompts.
    """
    if not data.sets:
        rows, numbers = _open(Path(data.path), data)
        first = first_held_out(len(rows), data.eval_prompts, Path(data.path))
        return [ProblemSet("", 1.0, rows, data, first, numbers)]
    shares = largest_remainder(data.eval_prompts, [set_.weight for set_ in data.sets])
    sets = []
    for data_set, held_out in zip(data.sets, shares, strict=True):
        own = set_data(data, data_set)
        try:
            rows, numbers = _open(Path(data_set.path), own)
            form = own.prompt_format if has_own_format(data_set) else None
        except ConfigError as error:
            raise ConfigError(f"data set {data_set.name!r}: {error}") from error
        if len(rows) > MAX_ROWS:
            raise ConfigError(f"data set {data_set.name!r} has {len(rows)} rows; use at most {MAX_ROWS}, or split it")
        if len(rows) <= held_out:
            raise ConfigError(
                f"data set {data_set.name!r} has {len(rows)} rows, no more than the {held_out} that are held out, its "
                f"share of data.eval_prompts={data.eval_prompts}; use fewer, 0, or name other data to evaluate with "
                "eval.data"
            )
        sets.append(ProblemSet(data_set.name, data_set.weight, rows, own, len(rows) - held_out, numbers, form))
    return sets


def _open(path: Path, data: DataConfig) -> tuple[Rows, Sequence[float]]:
    """The rows of a path within the limits of the difficulty, and their difficulties if they are ordered by it."""
    rows = open_rows(path, data.split)
    if not data.difficulty_key:
        return rows, ()
    numbers: Sequence[float] = difficulties(rows, data.difficulty_key)
    places = within(numbers, data)
    if not places:
        raise ConfigError(
            f"data file {path} has {len(rows)} rows, and none with a difficulty within data.min_difficulty and "
            f"data.max_difficulty: {data.difficulty_key} is {min(numbers):g} to {max(numbers):g}"
        )
    if len(places) < len(rows):
        rows, numbers = Selection(rows, array("q", places)), array("d", [numbers[at] for at in places])
    return rows, numbers if data.order == "easy_first" else ()


def problem(row: object, data: DataConfig, where: str, *, has_null_keys: bool = False) -> Example:
    """The problem of a row.

    Args:
        row: as `Rows.row` returns it.
        data: names of the columns.
        where: place of the row, the beginning of an error message.
        has_null_keys: see `Rows.has_null_keys`.

    Raises ConfigError if the row has no usable prompt.
    """
    columns = as_columns(row, where)
    prompt, messages, tools = row_prompt(columns, data, where, has_null_keys=has_null_keys)
    answer = find(columns, data.answer_key)
    named = {key: value for key, value in columns.items() if key not in (data.prompt_key, data.answer_key)}
    named["prompt"] = [as_message(message) for message in messages] or prompt
    if answer is not MISSING:
        named["answer"] = answer
    try:
        return Example(prompt, encode_row(named), "", where, messages, tools)
    except NoColumnType as error:
        name = next(name for name, value in named.items() if not _is_encodable(value))
        raise ConfigError(
            f"{where}: field {name!r} has a value of type {error}, which reward functions cannot be given; convert the "
            "column, or leave it out"
        ) from None


def _is_encodable(value: object) -> bool:
    try:
        encode_row({"": value})
    except NoColumnType:
        return False
    return True


def folded(prompt: str, messages: Messages, tools: str = "") -> str:
    """A prompt as one text with normalised white space; two prompts count as equal if these texts are equal."""
    text = "\0".join(["\0".join([message[0], _folded(message[1]), *message[2:]]) for message in messages]) or _folded(
        prompt
    )
    return f"{text}\0{tools}" if tools else text


def _folded(text: str) -> str:
    if text.isprintable() and "  " not in text:  # the only white space is single spaces
        return text.strip(" ")
    return " ".join(text.split())


def check_rows(sets: Sequence[ProblemSet], data: DataConfig) -> None:
    """Check all data sets of a run.

    Args:
        sets: the data sets.
        data: options by which their rows are read.

    Raises ConfigError for the first ten rows that cannot be used, for an answer column that some rows of a set lack (or
    all of them, if it is not the default one), and for held-out prompts that are trained on.
    """
    mistakes = Mistakes()
    held_out = set[str]() if data.allow_overlap else {text for set_ in sets for text in _held_out(set_)}
    shared: list[tuple[ProblemSet, int]] = []
    incomplete = ""
    for set_ in sets:
        without_answer: list[int] = []
        for batch in scan_prompts(set_.rows, set_.data):
            for error in batch.mistakes:
                mistakes.add(error)
            without_answer += batch.without_answer
            shared += [
                (set_, index)
                for index, prompt in enumerate(batch.prompts if held_out else (), batch.first)
                if prompt is not None and folded(*prompt) in held_out and index < set_.first_held_out
            ]
        if without_answer and (len(without_answer) < len(set_.rows) or set_.data.answer_key != DataConfig.answer_key):
            incomplete = incomplete or _incomplete(set_, without_answer[0])
    mistakes.report()
    if incomplete:
        raise ConfigError(incomplete)
    if shared:
        first, index = shared[0]
        count = sum(len(set_.held_out) for set_ in sets)
        of_sets = " of the sets, in proportion to their weights," if len(sets) > 1 else ""
        raise ConfigError(
            f"{first.rows.where(index)}: the prompt is also held out for the evaluation, as {len(shared)} training "
            f"prompts are (the last {count} rows{of_sets} are held out); leave them out, or set data.allow_overlap"
        )


def _incomplete(problem_set: ProblemSet, index: int) -> str:
    """The error message on a row without the answer column."""
    names = ", ".join(map(repr, as_columns(problem_set.rows.row(index), "")))
    return (
        f"{problem_set.rows.where(index)} has no field {problem_set.data.answer_key!r}; it has {names[:200]}; leave "
        "the column out of every row, or of none"
    )


def _held_out(problem_set: ProblemSet) -> set[str]:
    """The held-out prompts of a set, as `folded`, without those of rows that cannot be used."""
    prompts: set[str] = set()
    for place in range(problem_set.first_held_out, len(problem_set.rows)):
        try:
            _, prompt = checked(problem_set.rows.row(place), problem_set.data, problem_set.rows, place)
        except ConfigError:
            continue  # `check_rows` reports it
        prompts.add(folded(*prompt))
    return prompts
