"""The names that travel. Plain integers and strings underneath, distinct to the type checker."""

from typing import NewType

WorkerId = NewType("WorkerId", str)
SlotId = NewType("SlotId", int)
GroupId = NewType("GroupId", int)
LeaseId = NewType("LeaseId", int)
Version = NewType("Version", int)
"""Count of weight publications of a model; version 0 is the checkpoint that the run started from."""
Step = NewType("Step", int)
"""Index of the optimiser step; step s trains version s and publishes version s + 1."""
