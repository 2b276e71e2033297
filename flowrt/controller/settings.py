"""What the mind is told about the run: a dataflow, numbers, and a policy for each of its seams."""

from dataclasses import dataclass

from flowrt.controller.admission import Admission
from flowrt.controller.dispatch import Batcher, Dispatch
from flowrt.controller.versions import Refresh
from flowrt.errors import ConfigError
from flowrt.wire.records import Column, Stage


@dataclass(frozen=True, slots=True)
class Dataflow:
    """The stages of a recipe and the tensor columns between them; ``train_stage`` ends the flow ``train_flow``."""

    columns: tuple[Column, ...]
    stages: tuple[Stage, ...]
    train_stage: str
    train_flow: str
    token_columns: tuple[str, ...]  # their lengths add up to a sample's tokens

    def __post_init__(self) -> None:
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ConfigError(f"stages {names} are not distinct; give each stage a name of its own")
        if self.train_stage not in names:
            raise ConfigError(f"train_stage {self.train_stage!r} is none of the stages {names}")


@dataclass(frozen=True, slots=True)
class Policies:
    """One value for each seam that the controller asks."""

    admission: Admission
    dispatch: Dispatch
    batcher: Batcher
    refresh: Refresh


@dataclass(frozen=True, slots=True)
class Settings:
    """Numbers of the run."""

    steps: int
    groups_per_step: int
    finishers: tuple[str, ...]  # the run is complete when all workers of these roles have finished
    vital_roles: tuple[str, ...] = ()  # the run ends when one of these is lost
    model: str = "policy"
    in_order: bool = False  # train groups strictly in issue order
    lease_s: float = 600.0
    silence_s: float = 30.0
    stall_s: float = 300.0
