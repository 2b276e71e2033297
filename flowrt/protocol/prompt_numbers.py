"""Numbers of prompts: the data set and the row in one integer, for offers, the ledger and the controller's policies.

Rows of the first set, and of a run's only one, have their own index as number.
"""

ROW_BITS = 40
MAX_SETS = 100
"""Maximum number of data sets of a run."""
MAX_ROWS = 1 << ROW_BITS
"""Maximum number of rows of a data set."""


def prompt_number(data_set: int, row: int) -> int:
    """The number of a prompt.

    Args:
        data_set: index of its data set, from 0.
        row: index of its row, from 0.
    """
    return data_set << ROW_BITS | row


def data_set_of(number: int) -> int:
    """The index of the data set of a prompt."""
    return number >> ROW_BITS


def row_of(number: int) -> int:
    """The index of the row of a prompt in its data set."""
    return number & (MAX_ROWS - 1)


def prompt_name(number: int, names: tuple[str, ...]) -> str:
    """A prompt for people: ``NAME:ROW`` if the run has several data sets of these names, else its number."""
    at = data_set_of(number)
    return f"{names[at]}:{row_of(number)}" if at < len(names) and len(names) > 1 else str(number)
