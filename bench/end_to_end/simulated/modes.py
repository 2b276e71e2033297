"""The modes of the ablation, each an extension of the previous one, and their dataflow and policies."""

import dataclasses
import json
from dataclasses import dataclass, field

from end_to_end.simulated.workloads import WORKLOADS, Workload

from flowrt import api
from flowrt.controller.policies.weight_sync import Rolling
from flowrt.recipes import grpo
from flowrt.recipes.config import RunConfig, changed
from flowrt.recipes.config_io import defaults


@dataclass(frozen=True)
class Mode:
    """The features of the runtime that a run uses."""

    name: str
    bound: int
    barriers: bool = False  # every task waits until the previous task has done the whole step
    weight_sync: api.WeightSyncPolicy = field(default_factory=api.DelayedUpdate)
    in_flight: bool = False  # new weights are swapped in while sequences run
    tail_lanes: bool = False

    def dispatch(self, workload: Workload) -> api.Dispatch:
        """The dispatch policy; tail lanes get the workload's decoding cost, as from a profile of the engine."""
        return api.LengthAware(workload.decode.step_s, workload.samples) if self.tail_lanes else api.Fifo()


SYNC = Mode("sync", bound=0, barriers=True)
STREAMING = Mode("streaming", bound=0)
DELAYED = Mode("delayed", bound=1)
# Sub-step asynchrony: two workers at a time fetch new weights, and swap between two tokens of running sequences.
ROLLING = Mode("rolling", bound=1, weight_sync=Rolling(max_concurrent=2, max_behind=1), in_flight=True)
TAIL = dataclasses.replace(ROLLING, name="tail", tail_lanes=True)
MODES = {mode.name: mode for mode in (SYNC, STREAMING, DELAYED, ROLLING, TAIL)}


@dataclass(frozen=True)
class RunSpec:
    """The parameters of one run, which workers get from the controller."""

    workload_name: str
    mode_name: str
    seed: int
    steps: int
    real_s: float  # real seconds that a simulated one takes

    @classmethod
    def from_json(cls, text: str) -> "RunSpec":
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.workload_name]

    @property
    def mode(self) -> Mode:
        return MODES[self.mode_name]

    def config(self) -> RunConfig:
        """The configuration of the GRPO recipe, whose dataflow and worker loops are used unchanged."""
        base, workload = defaults("arithmetic"), self.workload
        return dataclasses.replace(
            base,
            seed=self.seed,
            steps=self.steps,
            prompts_per_step=workload.groups,
            group_size=workload.members,
            max_staleness=self.mode.bound,
            trainer=dataclasses.replace(base.trainer, micro_batch_tokens=workload.micro_batch_tokens),
            controller=changed(base.controller, {"lanes": workload.lanes}),
        )

    def policies(self) -> api.Policies:
        """The policies of the mode; with barriers a micro-batch is a whole step."""
        whole_step = api.GroupCount(self.workload.groups)
        batcher = whole_step if self.mode.barriers else api.TokenBudget(self.workload.micro_batch_tokens)
        return api.Policies(
            api.StrictLag(self.mode.bound), self.mode.dispatch(self.workload), batcher, self.mode.weight_sync
        )

    def settings(self) -> api.Settings:
        return grpo.settings(self.config())
