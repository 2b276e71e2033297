"""Environment of a run: settings, dataflow and policies, none of which changes while it runs."""

from dataclasses import dataclass
from functools import cached_property

from flowrt.controller.policies.group_filter import KeepAll
from flowrt.controller.settings import Dataflow, Policies, Settings
from flowrt.controller.state.dataflow import Sizes
from flowrt.protocol.messages import unpack


@dataclass(frozen=True)
class Environment:
    """What every transition may read, and the lookup tables that follow from it."""

    settings: Settings
    flow: Dataflow
    policies: Policies

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of samples in tokens and bytes."""
        return Sizes(self.flow.columns, self.flow.token_columns)

    @cached_property
    def tags(self) -> frozenset[str]:
        """Inline columns that come with every offer."""
        return frozenset(self.flow.tags)

    @cached_property
    def is_filtering(self) -> bool:
        """Whether the group filter can refuse a group."""
        return not isinstance(self.policies.group_filter, KeepAll)

    @cached_property
    def passed(self) -> dict[int, frozenset[int]]:
        """Prompts by epoch that the run had trained or dropped when it was resumed."""
        return unpack(self.settings.position.passed)
