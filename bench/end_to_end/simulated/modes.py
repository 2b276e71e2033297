"""The modes of the ablation, each adding to the one before, and the dataflow and policies that they amount to."""

import dataclasses
import json
from dataclasses import dataclass, field

from end_to_end.simulated.workloads import WORKLOADS, Workload

from flowrt import api
from flowrt.controller.policies.weight_sync import Rolling
from flowrt.recipes import grpo
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import defaults


@dataclass(frozen=True)
class Mode:
    """How much of the runtime is used."""

    name: str
    bound: int
    barriers: bool = False  # every task waits until the task before it has done the whole step
    refresh: api.WeightSyncPolicy = field(default_factory=api.DelayedUpdate)
    in_flight: bool = False  # new weights are put into use while sequences run
    tail_lanes: bool = False

    def dispatch(self, workload: Workload) -> api.Dispatch:
        """Tail lanes know the workload's decoding cost, as a user would who has profiled the engine once."""
        return api.LengthAware(workload.decode.step_s, workload.samples) if self.tail_lanes else api.Fifo()


SYNC = Mode("sync", bound=0, barriers=True)
STREAMING = Mode("streaming", bound=0)
DELAYED = Mode("delayed", bound=1)
# Sub-step asynchrony: a few workers at a time take new weights, and put them into use between two tokens of what runs.
ROLLING = Mode("rolling", bound=1, refresh=Rolling(at_once=2, max_behind=1), in_flight=True)
TAIL = dataclasses.replace(ROLLING, name="tail", tail_lanes=True)
MODES = {mode.name: mode for mode in (SYNC, STREAMING, DELAYED, ROLLING, TAIL)}
ASIDE = {
    # Not rungs of the ladder: what a rung does alone.
    mode.name: mode
    for mode in (
        dataclasses.replace(ROLLING, name="rolling_drained", in_flight=False),
        Mode("delayed_in_flight", bound=1, in_flight=True),
        Mode("delayed_tail", bound=1, tail_lanes=True),
    )
}


@dataclass(frozen=True)
class Play:
    """One run: everything that a process needs to know, handed on by the controller."""

    workload_name: str
    mode_name: str
    seed: int
    steps: int
    real_s: float  # real seconds that a simulated one takes

    @classmethod
    def from_json(cls, text: str) -> "Play":
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.workload_name]

    @property
    def mode(self) -> Mode:
        return (MODES | ASIDE)[self.mode_name]

    def config(self) -> RunConfig:
        """What the shipped GRPO recipe needs to know: its dataflow and its workers' loops are used as they are."""
        base, workload = defaults("arithmetic"), self.workload
        return dataclasses.replace(
            base,
            seed=self.seed,
            steps=self.steps,
            prompts_per_step=workload.groups,
            group_size=workload.members,
            max_staleness=self.mode.bound,
            trainer=dataclasses.replace(base.trainer, micro_batch_tokens=workload.micro_batch_tokens),
            controller=dataclasses.replace(base.controller, lanes=workload.lanes),
        )

    def policies(self) -> api.Policies:
        """Training begins with the first micro-batch, or, with barriers, when the whole step is there."""
        whole_step = api.GroupCount(self.workload.groups)
        batcher = whole_step if self.mode.barriers else api.TokenBudget(self.workload.micro_batch_tokens)
        return api.Policies(
            api.StrictLag(self.mode.bound), self.mode.dispatch(self.workload), batcher, self.mode.refresh
        )

    def settings(self) -> api.Settings:
        return grpo.settings(self.config())
