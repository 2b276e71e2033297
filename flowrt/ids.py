"""Identifiers and names that appear in messages and in the configuration.

Identifiers are plain integers and strings at run time, and distinct types to the type checker.
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
AUTO = "auto"
"""Value of a configuration key that leaves the choice to flowrt."""
