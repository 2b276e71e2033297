"""Configuration of a controller: the dataflow, the settings, and one policy for each decision."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from flowrt.controller.policies.admission import Admission
from flowrt.controller.policies.batching import Batcher, FixedTokens
from flowrt.controller.policies.curriculum import Curriculum, EveryPrompt
from flowrt.controller.policies.dispatch.base import Dispatch
from flowrt.controller.policies.group_filter import GroupFilter, KeepAll
from flowrt.controller.policies.guards import GuardRule
from flowrt.controller.policies.rank_balancing import OnDemand, RankBalancing
from flowrt.controller.policies.weight_sync import WeightSyncPolicy
from flowrt.errors import ConfigError, refuse, suggested
from flowrt.protocol.messages import ITEM_BYTES, Column, Position, Stage


@dataclass(frozen=True, slots=True)
class Dataflow:
    """The stages of a recipe and the columns between them.

    ``train_stage`` is the last stage of the flow ``train_flow``. A dataflow without a train stage is a stream: a row is
    freed when all its stages are done, and a stage is closed when all flows that it serves are exhausted.

    Raises ConfigError if it is inconsistent: stages or columns with the same name, a column that no stage makes or that
    two make, an unknown dtype or scope, stages that need each other's columns, or a wrong ``whole_groups``.
    """

    columns: tuple[Column, ...]
    stages: tuple[Stage, ...]
    train_stage: str = ""
    train_flow: str = ""
    token_columns: tuple[str, ...] = ()
    """Columns whose lengths add up to the tokens of a sample."""
    tags: tuple[str, ...] = ()
    """Inline columns that the offer supplies."""

    def __post_init__(self) -> None:
        refuse(self._stage_mistakes(), self._name_mistakes(), self._column_mistakes())

    @property
    def train_inline(self) -> tuple[str, ...]:
        """The inline columns that the train stage needs; empty without one."""
        tensors = {column.name for column in self.columns}
        needs = next((stage.needs for stage in self.stages if stage.name == self.train_stage), ())
        return tuple(name for name in needs if name not in tensors)

    @property
    def offered(self) -> tuple[str, ...]:
        """The columns that every offer supplies: group columns and tags."""
        return (*(column.name for column in self.columns if column.scope == "group"), *self.tags)

    def _stage_mistakes(self) -> Iterator[str]:
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            yield f"stages {names} are not distinct; give each stage a name of its own"
        if self.train_stage not in (*names, "") or bool(self.train_stage) != bool(self.train_flow):
            yield f"train_stage {self.train_stage!r} of flow {self.train_flow!r} is none of {names}"
        for stage in self.stages:
            if stage.name == self.train_stage and stage.flow != self.train_flow:
                yield (
                    f"train_flow is {self.train_flow!r}, but its train stage {stage.name!r} has flow {stage.flow!r}; "
                    "give both the same flow"
                )
            yield from self._group_mistakes(stage)

    def _group_mistakes(self, stage: Stage) -> Iterator[str]:
        """A train stage that takes single slots, and another stage that takes whole groups but is neither of the train
        flow nor of all flows, generates, or makes other columns than inline ones.
        """
        if stage.name == self.train_stage:
            if not stage.whole_groups:
                yield f"stage {stage.name!r} has whole_groups=False; the train stage takes whole groups"
            return
        if not stage.whole_groups:
            return
        if stage.flow not in ("", self.train_flow) or not self.train_stage:
            yield (
                f"stage {stage.name!r} has whole_groups=True and flow {stage.flow!r}; only stages of the flow that is "
                "trained, or of all flows, take whole groups"
            )
        tensors = {column.name for column in self.columns}
        readers = [reader for reader in self.stages if set(stage.makes) & set(reader.needs)]
        if (
            stage.generates
            or not stage.makes
            or tensors & set(stage.makes)
            or any(reader.generates for reader in readers)
        ):
            yield (
                f"stage {stage.name!r} has whole_groups=True; such a stage makes inline columns that no stage which "
                "generates needs, and generates nothing"
            )

    def _name_mistakes(self) -> Iterator[str]:
        """Columns of an unknown type, names that are declared twice, and token columns that are no tensor columns."""
        for column in self.columns:
            if column.dtype not in ITEM_BYTES or column.scope not in ("slot", "group"):
                yield (
                    f"column {column.name!r} has dtype {column.dtype!r} and scope {column.scope!r}; the dtypes are "
                    f"{sorted(ITEM_BYTES)}, the scopes 'slot' and 'group'"
                )
        names = [*(column.name for column in self.columns), *self.tags]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"columns and tags {twice} are declared twice; give each a name of its own"
        tensors = [column.name for column in self.columns]
        for name in self.token_columns:
            if name not in tensors:
                yield f"token_columns names {name!r}, which is no tensor column{suggested(name, tensors)}"

    def _column_mistakes(self) -> Iterator[str]:
        """Stages that can never be ready for a group of a flow, and columns with two makers in one."""
        named = {stage.flow for stage in self.stages if stage.flow}
        for flow in sorted(named) or [""]:
            yield from self._flow_mistakes(flow, [stage for stage in self.stages if stage.flow in ("", flow)])

    def _flow_mistakes(self, flow: str, stages: list[Stage]) -> Iterator[str]:
        of_flow = f" of flow {flow!r}" if flow else ""
        maker: dict[str, str] = {}
        for stage in stages:
            for column in stage.makes:
                if column in self.offered:
                    yield (
                        f"stage {stage.name!r} makes column {column!r}, which comes with the offer: it is a "
                        f"{'tag' if column in self.tags else 'group column'}; give what the stage makes another name"
                    )
                elif column in maker:
                    yield f"stages {maker[column]!r} and {stage.name!r}{of_flow} both make column {column!r}; one may"
                maker[column] = stage.name
        known = {*self.offered, *maker}
        if unknown := [(stage.name, column) for stage in stages for column in stage.needs if column not in known]:
            for stage_name, column in unknown:
                yield (
                    f"stage {stage_name!r} needs column {column!r}, which no stage{of_flow} makes and no offer "
                    f"brings{suggested(column, known)}"
                )
            return
        there, waiting = set(self.offered), list(stages)
        while ready := [stage for stage in waiting if there.issuperset(stage.needs)]:
            there.update(column for stage in ready for column in stage.makes)
            waiting = [stage for stage in waiting if stage not in ready]
        if waiting:
            cycle = ", ".join(f"{stage.name!r} needs {sorted(set(stage.needs) - there)}" for stage in waiting)
            yield f"stages{of_flow} wait for each other's columns: {cycle}; remove the cycle"


class OnLostSample(Enum):
    """What happens to a group of which a sample is lost: too old, lost with its holder, or impossible to generate."""

    REGENERATE = "regenerate"
    """Generate the sample again."""
    DROP_GROUP = "drop_group"
    """Drop the whole group, with a reason in the ledger."""
    TRAIN_REMAINING = "train_remaining"
    """Train the other samples of the group."""


@dataclass(frozen=True, slots=True)
class Policies:
    """One policy for each decision of the controller."""

    admission: Admission
    dispatch: Dispatch
    batcher: Batcher
    weight_sync: WeightSyncPolicy
    rank_balancing: RankBalancing = field(default_factory=OnDemand)
    tokens_per_step: FixedTokens | None = None
    """Train the same number of response tokens in every step; None: all tokens."""
    group_filter: GroupFilter = field(default_factory=KeepAll)
    curriculum: Curriculum = field(default_factory=EveryPrompt)
    guards: tuple[GuardRule, ...] = ()


def check_filter(flow: Dataflow, policies: Policies) -> None:
    """Raises ConfigError for a group filter that reads a column which the train stage does not need."""
    columns = flow.train_inline
    for column in policies.group_filter.needs:
        if column not in columns:
            raise ConfigError(
                f"group filter {type(policies.group_filter).__name__} reads column {column!r}, which is no inline "
                f"column that the train stage needs; those are {sorted(columns)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Roles, limits and timeouts of the run. Names that end in ``_s`` are in seconds."""

    steps: int = 0
    """Optimiser steps of the run."""
    groups_per_step: int = 1
    completing_roles: tuple[str, ...] = ()
    """The run is complete when all workers of these roles have completed their roles; if empty, it never completes."""
    critical_roles: tuple[str, ...] = ()
    """Roles without replacement: the run ends with an error when it loses a worker of one of them."""
    replaceable_roles: tuple[str, ...] = ()
    """Roles that must not stay vacant: the run ends when one has no worker for ``role_vacancy_timeout_s``."""
    role_vacancy_timeout_s: float = 60.0
    checkpointing_roles: tuple[str, ...] = ()
    """Critical roles that train, publish weights, and save a checkpoint when the run is preempted."""
    source_roles: tuple[str, ...] = ()
    """Roles that may offer prompts and end a flow; if empty, all roles but the observer's."""
    preemption_save_timeout_s: float = 60.0
    """Time without progress of the trainers after which a preempted run ends without its checkpoint."""
    model: str = "policy"
    """Name of the model that generates samples; admission bounds its staleness."""
    more_models: tuple[str, ...] = ()
    """Names of the other models whose weights are published (a critic, adapters)."""
    strict_issue_order: bool = False
    """Train groups strictly in order of issue."""
    on_lost_sample: OnLostSample = OnLostSample.REGENERATE
    attempts: int = 8
    """Losses of a sample, over-age samples among them, after which its group is dropped."""
    filter_tries: int = 128
    """Maximum number of groups that the group filter drops in a step; it keeps all others until the step is closed."""
    data_sets: tuple[str, ...] = ()
    """Names of the data sets by their index in prompt numbers; with two or more, each has metrics of its own."""
    sources: int = 1
    """Number of sources that must report the end of a flow before it counts as exhausted."""
    budget_rows: int = 1_000_000
    """Maximum number of live rows outside the train flow; an offer that would exceed it waits."""
    budget_bytes: int = 0
    """Maximum bytes of their tensors, each counted once; an offer that would exceed it waits; 0: no limit."""
    lease_s: float = 600.0
    """Time without progress of a worker after which its slots are given to another one."""
    worker_timeout_s: float = 30.0
    """Silence after which a worker is dismissed."""
    rejoin_timeout_s: float = 30.0
    """How long a restarted controller waits for the workers of its predecessor; a busy one notices the restart late,
    within ``worker_timeout_s``."""
    reconnect_timeout_s: float = 60.0
    """How long workers wait for a controller to return."""
    lanes: str = "auto"
    """The one transport to use, or ``auto``."""
    transfer_idle_timeout_s: float = 60.0
    """Time without data after which a transfer has failed."""
    min_transfer_mb_per_s: float = 1.0
    """Minimum rate of a transfer in MB/s: it fails after ``transfer_idle_timeout_s`` + size / rate seconds."""
    store_bytes: int = 0
    """Maximum bytes of tensors in the store of one worker; 0: no limit."""
    no_progress_timeout_s: float = 900.0
    """Time without progress after which the run ends, once every role has had a worker."""
    connect_timeout_s: float = 120.0
    """While a role has never had a worker, the run ends after this time or ``no_progress_timeout_s`` without progress,
    whichever is longer."""
    position: Position = field(default_factory=Position)
    """Where a resumed run continues."""
    journals: str = ""
    """Directory of the journals of rollout workers, in the run directory; empty: they keep none."""
    journals_unfinished: bool = True
    """Whether the journal of a worker that is killed has its sequences in generation; of one that leaves in order it
    has them."""
