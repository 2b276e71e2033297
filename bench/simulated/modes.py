"""The modes of the ablation, each adding to the one before, and the dataflow and policies that they amount to."""

import dataclasses
import json
from dataclasses import dataclass, field

from flowrt import api
from flowrt.controller.refresh import Rolling
from flowrt.recipes import grpo
from flowrt.recipes.config import RunConfig
from flowrt.recipes.load import defaults
from simulated.workloads import WORKLOADS, Workload


@dataclass(frozen=True)
class Mode:
    """How much of the runtime is used."""

    name: str
    bound: int
    barriers: bool = False  # every task waits until the task before it has done the whole step
    refresh: api.Refresh = field(default_factory=api.DelayedUpdate)
    in_flight: bool = False  # new weights are put into use while sequences run
    dispatch: api.Dispatch = field(default_factory=api.Fifo)


# The dispatch policy of the modes from `tail` on is chosen here and nowhere else.
TAIL_DISPATCH: api.Dispatch = api.Fifo()

SYNC = Mode("sync", bound=0, barriers=True)
STREAMING = Mode("streaming", bound=0)
DELAYED = Mode("delayed", bound=1)
ROLLING = dataclasses.replace(DELAYED, name="rolling", refresh=Rolling(at_once=2, max_behind=1))
TAIL = dataclasses.replace(ROLLING, name="tail", dispatch=TAIL_DISPATCH)
IN_FLIGHT = dataclasses.replace(TAIL, name="in_flight", in_flight=True)
MODES = {mode.name: mode for mode in (SYNC, STREAMING, DELAYED, ROLLING, TAIL, IN_FLIGHT)}
ASIDE = {
    # Not rungs of the ladder: what a rung does alone.
    mode.name: mode
    for mode in (
        Mode("rolling_1", bound=1, refresh=Rolling(at_once=1, max_behind=1)),
        Mode("rolling_3", bound=1, refresh=Rolling(at_once=3, max_behind=1)),
        Mode("delayed_in_flight", bound=1, in_flight=True),
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
            staleness=self.mode.bound,
            trainer=dataclasses.replace(base.trainer, micro_batch_tokens=workload.micro_batch_tokens),
        )

    def policies(self) -> api.Policies:
        """Training begins with the first micro-batch, or, with barriers, when the whole step is there."""
        whole_step = api.GroupCount(self.workload.groups)
        batcher = whole_step if self.mode.barriers else api.TokenBudget(self.workload.micro_batch_tokens)
        return api.Policies(api.StrictLag(self.mode.bound), self.mode.dispatch, batcher, self.mode.refresh)

    def settings(self) -> api.Settings:
        return grpo.settings(self.config())
