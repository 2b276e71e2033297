"""Identifiers and names that appear in messages and in the configuration.

- Identifiers are plain integers and strings at run time, and distinct types to the type checker.
- The number of a prompt encodes the index of its data set and of its row. In the first data set, the number of a
  prompt equals the index of its row.
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
"""The name of the controller as the process that a wait is blocked on."""
FETCH = "fetch"
"""Kind of span of a timeline: tensors of a grant are in transfer. Every other span or wait takes precedence."""
GATHER = "gather"
"""Kind of span: a worker waits before its next pull until more samples are ready. Precedence as `FETCH`."""
RANKS = "ranks"
"""Kind of span: a rank waits for another rank, the root of the wait. It takes precedence over the work of the rank."""
STOPPED = "stopped"
"""Kind of span: the worker's process or host was stopped."""
AUTO = "auto"
"""Value of a configuration key for a choice by flowrt."""


ROW_BITS = 40
MAX_SETS = 100
"""Maximum number of data sets of a run."""
UNSCORED = "reward_failures/not_applicable"
"""Column that is 1 for a sample to which no reward function of a weight above 0 applies, else 0: it is not trained."""
MAX_ROWS = 1 << ROW_BITS
"""Maximum number of rows of a data set."""


def prompt_number(data_set: int, row: int) -> int:
    """The number of a prompt.

    Args:
        data_set: index of its data set, from 0 to MAX_SETS - 1.
        row: index of its row, from 0 to MAX_ROWS - 1.
    """
    return data_set << ROW_BITS | row


def data_set_of(number: int) -> int:
    """The index of the data set of a prompt."""
    return number >> ROW_BITS


def row_of(number: int) -> int:
    """The index of the row of a prompt in its data set."""
    return number & (MAX_ROWS - 1)


def prompt_name(number: int, names: tuple[str, ...]) -> str:
    """A prompt in output: ``NAME:ROW`` if the run has several data sets (``names``, in order), else its number."""
    at = data_set_of(number)
    return f"{names[at]}:{row_of(number)}" if at < len(names) and len(names) > 1 else str(number)
