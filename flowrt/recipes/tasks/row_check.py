"""Check of every row of a user's data sets before a run starts."""

from collections import Counter
from collections.abc import Mapping, Sequence

from flowrt.errors import ConfigError
from flowrt.recipes.config import DataConfig
from flowrt.recipes.data.base import Rows
from flowrt.recipes.data.columns import MISSING, Messages, as_columns, find, prompt_or_messages
from flowrt.recipes.data.mistakes import Mistakes
from flowrt.recipes.tasks.problems import ProblemSet, folded


def check_rows(sets: Sequence[ProblemSet], data: DataConfig) -> None:
    """Check all data sets of a run.

    Args:
        sets: the data sets.
        data: how their rows are read.

    Raises ConfigError for the first ten rows that cannot be used, for a column of answers that some rows of a set lack,
    and for held-out prompts that are trained on.
    """
    mistakes = Mistakes()
    held_out = set[str]() if data.allow_overlap else {text for one in sets for text in _held_out(one)}
    shared: list[str] = []
    incomplete = ""
    for one in sets:
        answers = Counter[bool]()
        without_answer = 0
        for index, row in enumerate(one.rows.scan()):
            try:
                columns, prompt, messages = _checked(row, data, one.rows, index)
            except ConfigError as error:
                mistakes.add(error)
                continue
            has_answer = find(columns, data.answer_key) is not MISSING
            if not has_answer and not answers[False]:
                without_answer = index
            answers[has_answer] += 1
            if held_out and index < one.first_held_out and folded(prompt, messages) in held_out:
                shared.append(one.rows.where(index))
        if answers[False] and (answers[True] or data.answer_key != DataConfig.answer_key):
            incomplete = incomplete or _incomplete(one, data, without_answer)
    mistakes.report()
    if incomplete:
        raise ConfigError(incomplete)
    if shared:
        count = sum(len(one.held_out) for one in sets)
        of_sets = " of the sets, in proportion to their weights," if len(sets) > 1 else ""
        raise ConfigError(
            f"{shared[0]}: the prompt is also held out for the evaluation, as {len(shared)} training prompts are (the "
            f"last {count} rows{of_sets} are held out); leave them out, or set data.allow_overlap"
        )


def _incomplete(one: ProblemSet, data: DataConfig, index: int) -> str:
    """The message on a row without an answer, where others have one."""
    names = ", ".join(map(repr, as_columns(one.rows.row(index), "")))
    return (
        f"{one.rows.where(index)} has no field {data.answer_key!r}; it has {names[:200]}; leave the column out of "
        "every row, or of none"
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


def _held_out(one: ProblemSet) -> set[str]:
    """The held-out prompts of a set."""
    found: set[str] = set()
    for place in range(one.first_held_out, len(one.rows)):
        try:
            _, prompt, messages = _checked(one.rows.row(place), one.data, one.rows, place)
        except ConfigError:
            continue  # reported with the other mistakes
        found.add(folded(prompt, messages))
    return found
