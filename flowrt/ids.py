"""Identifiers and names that appear in messages and in the configuration.

- Identifiers are plain integers and strings at run time, and distinct types to the type checker.
- The number of a prompt is its data set and its row in one integer. Rows of the first set, and of a run's only one,
  have their own index as number.
"""

from typing import NewType

WorkerId = NewType("WorkerId", str)
SlotId = NewType("SlotId", int)
GroupId = NewType("GroupId", int)
LeaseId = NewType("LeaseId", int)
Version = NewType("Version", int)
"""Count of weight publications of a model; version 0 is the checkpoint that the run started from."""
Step = NewType("Step", int)
"""Index of the optimiser step; step s trains version s and publishes version s + 1."""

SOURCE = "source"
ROLLOUT = "rollout"
REWARD = "reward"
REFERENCE = "reference"
TRAINER = "trainer"
ROLES = (REFERENCE, REWARD, ROLLOUT, SOURCE, TRAINER)
"""The roles of workers in the recipes of flowrt."""
OBSERVER = "observer"
"""The role of a connected process that is not a worker: it reads the status, drains a worker or ends the run."""
CONTROLLER = "the controller"
"""The controller, where a wait names who it is blocked on."""
FETCH = "fetch"
"""Kind of span of a timeline: tensors of samples that were granted are on their way. Any other wait precedes it."""
RANKS = "ranks"
"""Kind of span: a rank waits for another one, its root. It precedes all that the rank does at the time."""
STOPPED = "stopped"
"""Kind of span: the worker's process or host was stopped."""
AUTO = "auto"
"""Value of a configuration key that leaves the choice to flowrt."""


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
