"""The state of a run and its environment: the only inputs of a transition besides its event.

- The state is one object of tables. A table alone changes its rows, and refuses illegal changes. Transitions set the
  attributes that no rule restricts, such as the end of the run.
- The environment (settings, dataflow and policies) does not change during the run.
"""

from dataclasses import dataclass
from functools import cached_property

from flowrt.controller.events import Command, EndRun, PreemptRun
from flowrt.controller.policies.admission import Admission, OnPolicy
from flowrt.controller.policies.group_filter import KeepAll
from flowrt.controller.settings import Dataflow, Policies, Settings
from flowrt.controller.state.controller_restart import UNDECIDED, Recovery, RunPreempted
from flowrt.controller.state.counters import BoundedCounter
from flowrt.controller.state.dataflow import Sizes
from flowrt.controller.state.evaluations import ReportedResults
from flowrt.controller.state.guards import Guards
from flowrt.controller.state.kept_samples import KeptSamples
from flowrt.controller.state.membership import Membership
from flowrt.controller.state.opened_prompts import OpenedPrompts
from flowrt.controller.state.parked_requests import ParkedRequests
from flowrt.controller.state.reward_history import RewardHistory
from flowrt.controller.state.sample_table import SampleTable
from flowrt.controller.state.training_window import StepPlan, TrainingWindow
from flowrt.controller.state.transfers import Lanes, RendezvousLimits
from flowrt.controller.state.weights import Models
from flowrt.controller.state.worklist import Worklist
from flowrt.errors import EXIT_OK
from flowrt.protocol.messages import NO_LIMIT, Offer, PromptSet, unpack


@dataclass(frozen=True)
class Environment:
    """Settings, dataflow and policies, and the lookup tables derived from them."""

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
    def passed(self) -> dict[int, PromptSet]:
        """Prompts by epoch that the run had trained or dropped when it was resumed."""
        return unpack(self.settings.position.passed)


TERM_BITS = 40
"""Number of low bits of an id. The bits above are term - 1, so ids of two controllers of a run never coincide."""


@dataclass(slots=True)
class Preemption:
    """The order to preempt the run, if there is one, and the progress of its execution."""

    order: PreemptRun | None = None
    until_s: float | None = None  # deadline for the checkpoint; None: from the next step of the execution on
    steps: int | None = None
    """Number of steps after which the trainers leave; None before they are told."""
    is_saved: bool = False

    @property
    def is_ordered(self) -> bool:
        """Whether the run is being preempted."""
        return self.order is not None

    def restore(self, ordered: RunPreempted) -> None:
        """Carry on with the order of an earlier controller; the time to save begins anew."""
        self.order = PreemptRun(ordered.reason, ordered.code, ordered.kept)
        self.steps = None if ordered.steps == UNDECIDED else ordered.steps

    def set_deadline(self, until_s: float) -> float:
        """Set the deadline unless it is set; returns it."""
        if self.until_s is None:
            self.until_s = until_s
        return self.until_s

    def move_deadline(self, seconds: float) -> None:
        """Move the deadline, if it is set, to that much later."""
        if self.until_s is not None:
            self.until_s += seconds

    def entry(self) -> RunPreempted:
        """The restart entry of the order. It must be ordered."""
        assert self.order is not None
        steps = UNDECIDED if self.steps is None else self.steps
        return RunPreempted(self.order.reason, self.order.code, self.order.kept, steps)

    def end_of(self, reason: str, code: int) -> EndRun:
        """The end of the run for this reason; of a preempted run that is not saved, with the code of its preemption."""
        if self.order is None or self.is_saved or code == EXIT_OK:
            return EndRun(reason, code)
        return EndRun(
            f"{self.order.reason}, and what was trained since the last checkpoint is not saved: {reason}",
            self.order.code,
        )


@dataclass(slots=True)
class State:
    """The tables of a run's controller."""

    work: Worklist
    membership: Membership
    table: SampleTable
    window: TrainingWindow
    plan: StepPlan
    requests: ParkedRequests
    models: Models
    lanes: Lanes
    key_limits: RendezvousLimits
    recovery: Recovery
    history: RewardHistory
    preemption: Preemption
    guards: Guards
    results: ReportedResults
    """Results of evaluations."""
    dropped: BoundedCounter
    """Lost samples and dropped groups by reason."""
    opened: OpenedPrompts
    """Prompts that were opened for training and are not in `Environment.passed`."""
    kept: KeptSamples
    ended: EndRun | None = None
    progress_s: float | None = None
    """Time of the last progress; None before the first event."""

    @classmethod
    def of(cls, env: Environment, term: int) -> "State":
        """The state at the start of the controller with the number ``term``, counted from 1."""
        settings, flow = env.settings, env.flow
        first = (term - 1) << TERM_BITS
        after_window = [stage.name for stage in flow.stages if stage.generates or stage.name == flow.train_stage]
        work = Worklist([stage.name for stage in flow.stages], after_window)
        table = SampleTable(flow.columns, flow.stages, env.policies.dispatch.queue, work)
        table.begin_at(first)
        return cls(
            work=work,
            membership=Membership(settings.worker_timeout_s, work),
            table=table,
            window=TrainingWindow(
                groups_per_step=settings.groups_per_step,
                steps=settings.steps,
                strict_issue_order=settings.strict_issue_order,
                step=settings.position.step,
                work=work,
            ),
            plan=StepPlan(),
            requests=ParkedRequests(table.stages),
            models=Models((settings.model, *settings.more_models)),
            lanes=Lanes(settings.lanes, first),
            key_limits=RendezvousLimits(),
            recovery=Recovery(),
            history=RewardHistory(env.policies.curriculum.history),
            preemption=Preemption(),
            guards=Guards([0] * len(env.policies.guards), [None] * len(env.policies.guards)),
            results=ReportedResults(),
            dropped=BoundedCounter(),
            opened=OpenedPrompts(),
            kept=KeptSamples(),
        )

    def admission(self, env: Environment) -> Admission:
        """The admission policy, with a staleness bound of 0 while a guard holds the run."""
        usual, until = env.policies.admission, self.guards.held_until
        return OnPolicy(usual, until) if self.window.step < until else usual

    def exact_version(self, offer: Offer) -> int | None:
        """The version that has to generate all samples of the offer; None if any version may."""
        if offer.at_most == NO_LIMIT:
            return None
        return self.window.step if offer.at_most < 0 else offer.at_most

    def extend_deadlines(self, seconds: float) -> None:
        """Extend every deadline, of workers and of the run, by a time in which the controller did not run."""
        self.membership.extend_deadlines(seconds)
        self.table.extend_deadlines(seconds)
        self.recovery.extend_deadline(seconds)
        self.preemption.move_deadline(seconds)
        if self.progress_s is not None:
            self.progress_s += seconds

    def end(self, reason: str, code: int) -> list[Command]:
        """End the run with this exit code; returns the command to do so, or nothing if the run has ended already."""
        if self.ended is not None:
            return []
        self.ended = self.preemption.end_of(reason, code)
        return [self.ended]
