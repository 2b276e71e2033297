"""Check of every row of a user's data sets before a run starts."""

from collections.abc import Sequence

from flowrt.errors import ConfigError
from flowrt.recipes.config import DataConfig
from flowrt.recipes.data.base import Mistakes
from flowrt.recipes.data.columns import as_columns
from flowrt.recipes.data.prompt_scan import checked, scan_prompts
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
    shared: list[tuple[ProblemSet, int]] = []
    incomplete = ""
    for one in sets:
        without_answer: list[int] = []
        for batch in scan_prompts(one.rows, data):
            for error in batch.mistakes:
                mistakes.add(error)
            without_answer += batch.without_answer
            shared += [
                (one, index)
                for index, prompt in enumerate(batch.prompts if held_out else (), batch.first)
                if prompt is not None and folded(*prompt) in held_out and index < one.first_held_out
            ]
        if without_answer and (len(without_answer) < len(one.rows) or data.answer_key != DataConfig.answer_key):
            incomplete = incomplete or _incomplete(one, data, without_answer[0])
    mistakes.report()
    if incomplete:
        raise ConfigError(incomplete)
    if shared:
        first, index = shared[0]
        count = sum(len(one.held_out) for one in sets)
        of_sets = " of the sets, in proportion to their weights," if len(sets) > 1 else ""
        raise ConfigError(
            f"{first.rows.where(index)}: the prompt is also held out for the evaluation, as {len(shared)} training "
            f"prompts are (the last {count} rows{of_sets} are held out); leave them out, or set data.allow_overlap"
        )


def _incomplete(one: ProblemSet, data: DataConfig, index: int) -> str:
    """The message on a row without an answer, where others have one."""
    names = ", ".join(map(repr, as_columns(one.rows.row(index), "")))
    return (
        f"{one.rows.where(index)} has no field {data.answer_key!r}; it has {names[:200]}; leave the column out of "
        "every row, or of none"
    )


def _held_out(one: ProblemSet) -> set[str]:
    """The held-out prompts of a set."""
    found: set[str] = set()
    for place in range(one.first_held_out, len(one.rows)):
        try:
            _, prompt = checked(one.rows.row(place), one.data, one.rows, place)
        except ConfigError:
            continue  # reported with the other mistakes
        found.add(folded(*prompt))
    return found
