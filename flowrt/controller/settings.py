"""What the mind is told about the run: a dataflow, numbers, and a policy for each of its seams."""

from dataclasses import dataclass, field
from enum import Enum

from flowrt.controller.admission import Admission
from flowrt.controller.batchers import Batcher, FixedTokens
from flowrt.controller.dispatch import Dispatch
from flowrt.controller.refresh import Refresh
from flowrt.controller.sharing import OnDemand, Sharing
from flowrt.errors import ConfigError
from flowrt.wire.records import ITEM_BYTES, Column, Position, Stage


@dataclass(frozen=True, slots=True)
class Dataflow:
    """The stages of a recipe and the columns between them.

    ``train_stage`` ends the flow ``train_flow``; a dataflow without them is a stream: a row is freed when all its
    stages are done, and a stage is closed when its flows are exhausted.
    """

    columns: tuple[Column, ...]
    stages: tuple[Stage, ...]
    train_stage: str = ""
    train_flow: str = ""
    token_columns: tuple[str, ...] = ()  # their lengths add up to a sample's tokens
    tags: tuple[str, ...] = ()  # inline columns that come with the offer

    def __post_init__(self) -> None:
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ConfigError(f"stages {names} are not distinct; give each stage a name of its own")
        if self.train_stage not in (*names, "") or bool(self.train_stage) != bool(self.train_flow):
            raise ConfigError(f"train_stage {self.train_stage!r} of flow {self.train_flow!r} is none of {names}")
        for stage in self.stages:
            if stage.whole_groups != (stage.name == self.train_stage):
                raise ConfigError(
                    f"stage {stage.name!r} has whole_groups={stage.whole_groups}; the train stage takes whole groups, "
                    "and no other does"
                )
        for column in self.columns:
            if column.dtype not in ITEM_BYTES or column.scope not in ("slot", "group"):
                raise ConfigError(
                    f"column {column.name!r} has dtype {column.dtype!r} and scope {column.scope!r}; the dtypes are "
                    f"{sorted(ITEM_BYTES)}, the scopes 'slot' and 'group'"
                )


class LostMember(Enum):
    """What becomes of a group when one of its samples is lost: too old, gone with its holder, impossible to make."""

    REFILL = "refill"  # make the sample again
    DROP = "drop"  # drop the whole group, with a reason in the ledger
    REST = "rest"  # train the others


@dataclass(frozen=True, slots=True)
class Policies:
    """One value for each seam that the controller asks."""

    admission: Admission
    dispatch: Dispatch
    batcher: Batcher
    refresh: Refresh
    sharing: Sharing = field(default_factory=OnDemand)
    cut: FixedTokens | None = None  # train the same number of tokens in every step


@dataclass(frozen=True, slots=True)
class Settings:
    """Numbers of the run."""

    steps: int = 0
    groups_per_step: int = 1
    finishers: tuple[str, ...] = ()  # the run is complete when all workers of these roles have finished; none: never
    vital_roles: tuple[str, ...] = ()  # the run ends when one of these is lost
    needed_roles: tuple[str, ...] = ()  # the run ends when one of these has had nobody for ``absence_s``
    absence_s: float = 60.0
    savers: tuple[str, ...] = ()  # vital ones, that save what is trained when the run is told to end
    drain_s: float = 60.0  # how long they may take
    model: str = "policy"  # the model that generates: its age is what admission bounds
    more_models: tuple[str, ...] = ()  # others whose weights are published (a critic, adapters), by name
    in_order: bool = False  # train groups strictly in issue order
    lost_member: LostMember = LostMember.REFILL
    attempts: int = 8  # a sample that was lost so often takes its group with it
    sources: int = 1  # a stream is exhausted when so many workers have said so
    budget_rows: int = 1_000_000  # live rows outside training, beyond which offers wait
    budget_bytes: int = 0  # the same for the bytes of their tensors, wherever they are; 0: no limit
    lease_s: float = 600.0
    silence_s: float = 30.0
    regroup_s: float = 10.0  # how long a controller that came back waits for the workers that were in
    return_s: float = 60.0  # how long workers wait for a controller that went away
    lanes: str = "auto"  # or the name of the one transport to use
    lane_s: float = 60.0  # a lane on which nothing moved for so long has failed
    lane_mb_per_s: float = 1.0  # and so has one that moves less than this, once it has had so long
    store_bytes: int = 0  # most bytes of tensors that a worker's store may hold; 0: no limit
    stall_s: float = 900.0
    position: Position = field(default_factory=Position)  # where a run that is resumed goes on
