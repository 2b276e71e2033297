"""A whole cluster in one process: simulated workers around a real `Core`, in a seeded order, with a driven clock.

Messages are FIFO between a worker and the controller, transfers are FIFO within a lane, and everything else is
interleaved at random: the same scenario always produces the same events. Workers may be slow, die and rejoin; lanes
may break; leases may expire. A run that has no possible action before its end raises AssertionError.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from flowrt.controller.core import Core
from flowrt.controller.events import (
    AppendLedger,
    AppendRestartLog,
    Command,
    Event,
    MessageReceived,
    Persist,
    Send,
    StepClosed,
    Tick,
    WorkerConnected,
)
from flowrt.controller.policies.admission import StrictLag
from flowrt.controller.settings import Policies, Settings
from flowrt.controller.state.controller_restart import RecoveredState
from flowrt.controller.state.kept_samples import KeptSample
from flowrt.controller.state.reward_history import Outcome
from flowrt.errors import FlowError
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import LaneTurn, Position
from flowrt.runtime.clock import DrivenClock
from tests.simulation.controller_restart import DurableState, RejoiningWorker
from tests.simulation.fault_injection import FaultInjection
from tests.simulation.rows import LaneId, Row, Shared, lane_of
from tests.simulation.scenario import LEASE_S, MODEL, Scenario, grpo_dataflow
from tests.simulation.worker import Worker

WORKING = ("rollout", "reward", "reference", "filter")
"""Roles of workers that may be lost at any time."""
Action = tuple[float, Callable[[], None]]
"""The relative probability that it is next, and the function that performs it."""


def make_core(
    scenario: Scenario,
    position: Position | None = None,
    term: int = 1,
    recovered: RecoveredState | None = None,
    outcomes: Sequence[Outcome] = (),
    kept: Sequence[KeptSample] = (),
    /,
    **overrides: Any,
) -> Core:
    """The core of the simulated run; by default a strict staleness bound, FIFO dispatch and immediate fetches.

    ``overrides`` replace settings; by default workers and progress have no timeout.
    """
    settings = Settings(
        steps=scenario.steps,
        groups_per_step=scenario.groups_per_step,
        strict_issue_order=scenario.strict_issue_order,
        model=MODEL,
        on_lost_sample=scenario.on_lost_sample,
        attempts=scenario.attempts,
        filter_tries=scenario.filter_tries,
        completing_roles=("source", "trainer"),
        checkpointing_roles=("trainer",),
        source_roles=("source",),
        lease_s=LEASE_S,
        worker_timeout_s=float("inf"),
        no_progress_timeout_s=float("inf"),
        position=position or Position(),
        journals=scenario.journals,
    )
    policies = Policies(
        admission=StrictLag(scenario.bound),
        dispatch=scenario.dispatch,
        batcher=scenario.batcher,
        weight_sync=scenario.weight_sync,
        rank_balancing=scenario.rank_balancing,
        tokens_per_step=scenario.tokens_per_step,
        group_filter=scenario.group_filter,
        curriculum=scenario.curriculum,
        guards=scenario.guards,
    )
    changed = dataclasses.replace(settings, **overrides)
    return Core(
        settings=changed,
        flow=grpo_dataflow(scenario.references > 0, scenario.filters > 0),
        policies=policies,
        term=term,
        recovered=recovered,
        outcomes=outcomes,
        kept=kept,
    )


class SimulatedCluster:
    """Create one, `run` it, and read its records."""

    def __init__(
        self,
        scenario: Scenario,
        position: Position | None = None,
        outcomes: Sequence[Outcome] = (),
        kept: Sequence[KeptSample] = (),
    ) -> None:
        """Where a resumed run begins, the rewards of its earlier executions, and samples that their journals have."""
        self._kept = kept
        self.scenario = scenario
        self._outcomes = list(outcomes)
        self.rng = random.Random(scenario.seed)
        self.clock = DrivenClock()
        self.core = self._make_core(position)
        self.shared = Shared(scenario, self.rng, lambda: self.core.state.models.policy.latest)
        self.shared.passed = {epoch: frozenset(of) for epoch, of in self.core.env.passed.items()}
        self.workers: dict[str, RejoiningWorker] = {}
        self.term = 1
        self.disk = DurableState()
        self.records: list[AppendLedger] = []
        self.state: dict[tuple[int, int], str] = {}  # state in the ledger, by (epoch, prompt)
        self.steps: list[StepClosed] = []
        self.trained: list[tuple[int, Row]] = []  # (step, row) as the trainer received them
        self.log: list[Event | Command] = []
        self.actions = 0
        self.durable = 0  # number of records that are certainly on disk
        self._ends: dict[LaneId, tuple[Worker, Worker]] = {}
        self._finished = False
        self.delayed = ""  # the worker whose inventory is late
        self._late = scenario.late_inventories
        self.faults = FaultInjection(self)
        roles = {"rollout": scenario.rollouts, "reward": scenario.rewards, "reference": scenario.references}
        roles["filter"] = scenario.filters
        roles |= {"trainer": scenario.ranks, "source": scenario.sources, "evaluate": 1}
        for role, count in roles.items():
            for rank in range(count):
                self.workers[f"{role}{rank}"] = RejoiningWorker(f"{role}{rank}", role, self.shared)
        self.shared.broken_links = {(f"rollout{number}", "trainer0") for number in range(scenario.broken_links)}
        self._sources = [worker.id for worker in self.workers.values() if worker.role == "source"]
        self._ranks = [worker for worker in self.workers.values() if worker.role == "trainer"]
        first_step = self.core.settings.position.step
        for trainer in self._ranks:
            trainer.step, trainer.closed = first_step, first_step == scenario.steps
        self._ranks[0].unpublished = first_step or None
        if first_step == scenario.steps:
            self._report_finished()

    def _make_core(self, position: Position | None, term: int = 1, recovered: RecoveredState | None = None) -> Core:
        return make_core(self.scenario, position, term, recovered, self._outcomes, self._kept)

    def run(self, max_actions: int | None = None) -> "SimulatedCluster":
        """Run until all is complete and nothing is in flight, or for ``max_actions`` actions.

        Raises AssertionError if the run cannot complete.
        """
        while self.actions != max_actions and self.step():
            assert self.actions < self.scenario.max_actions, f"{self.actions} actions; {self.describe_waits()}"
        if self.actions == max_actions and any(True for _ in self.possible()):
            return self
        assert self.core.ended is not None, f"no action is possible; {self.describe_waits()}"
        assert self.core.ended.code == 0, self.core.ended.reason
        return self

    def step(self) -> bool:
        """Perform one action; False if none is possible."""
        actions = list(self.possible()) or self.faults.back_offs()
        if not actions:
            return False
        self.actions += 1
        if not self.faults.inject():
            _, action = self.rng.choices(actions, [weight for weight, _ in actions])[0]
            action()
        return True

    def describe_waits(self) -> str:
        """What each worker waits for."""
        window = self.core.state.window
        waits = "; ".join(f"{who} waits for {what}" for who, what, _ in self.core.waiting())
        return f"step {window.step}, {len(window.taken)} groups taken, {len(window.waiting)} waiting: {waits}"

    # ---- possible actions

    def possible(self) -> Iterator[Action]:
        speeds = dict(self.scenario.speeds)
        any_action = False
        recovery = self.core.state.recovery
        if self.delayed and (not recovery.is_active or not recovery.awaited.keys() - {self.delayed}):
            any_action = True
            yield (1.0, self.faults.end_recovery) if recovery.is_active else (0.02, self._let_inventory_come)
        for worker in self._active_workers():
            speed = speeds.get(worker.id, 1.0)
            for action in self._deliveries(worker):
                any_action = True
                yield action
            for work in worker.options() if worker.alive else ():
                any_action = True
                yield (speed, work)
        if self._step_is_complete():
            any_action = True
            yield (1.0, self._end_step)
        # Only if no other action is possible, so that what remains at the end is never used.
        if not any_action and self._source_is_done():
            yield (1.0, self._finish)

    def _source_is_done(self) -> bool:
        are_closed = all(self.workers[source].closed for source in self._sources)
        return are_closed and not self._finished and not self.faults.back_offs()

    def _active_workers(self) -> list[Worker]:
        """The workers that may act now."""
        return list(self.workers.values())

    def _deliveries(self, worker: Worker) -> Iterator[Action]:
        """Messages and transfers of one worker that can be delivered, and its restart if it is dead."""
        if worker.outbox:
            if not self._is_held_up(worker):
                yield (1.0, partial(self._deliver, worker))
        elif not worker.alive:
            yield (1.0, partial(self._rejoin, worker))
        if worker.inbox:
            yield (1.0, lambda: worker.receive(worker.inbox.popleft()))
        for lane, turns in worker.expected.items() if worker.alive else ():
            if turns and (self._is_broken(lane) or self.shared.sent[lane]):
                speed = self.scenario.fetch_speed if lane[2] == "weights" else 1.0
                yield (speed, partial(self._transfer, worker, lane))

    def _is_broken(self, lane: LaneId) -> bool:
        is_broken = lane in self.shared.broken or lane[:2] in self.shared.broken_links
        return is_broken or not all(end.alive for end in self._ends[lane])

    def _is_held_up(self, worker: Worker) -> bool:
        event = worker.outbox[0]
        is_inventory = isinstance(event, MessageReceived) and isinstance(event.message, m.Inventory)
        return worker.id == self.delayed and is_inventory

    def _let_inventory_come(self) -> None:
        self.delayed = ""

    def _step_is_complete(self) -> bool:
        """All ranks know that the step is closed and have done their share of it."""
        return all(
            rank.closed
            and not rank.jobs
            and not rank.pulling
            and rank.unpublished is None
            and rank.step < self.scenario.steps
            for rank in self._ranks
        )

    # ---- actions

    def _deliver(self, worker: Worker) -> None:
        event = worker.outbox.popleft()
        if isinstance(event, WorkerConnected) and worker.role == "source" and not event.term:
            self._welcome_source()
        if self.core.ended is None or worker.id in self.core.state.membership:  # no worker joins after the end
            self.handle(event)

    def handle(self, event: Event) -> list[Command]:
        """Handle one event and execute the commands of the core."""
        self.log.append(event)
        self.faults.observe(event)
        try:
            commands = self.core.transition(event, self.clock.now())
        except (LookupError, FlowError) as error:
            raise AssertionError(f"the core failed at {event}: {error!r}") from error
        self.core.check()
        self.execute(commands)
        if isinstance(event, Tick):
            overdue = [
                lease.id for lease in self.core.state.table.leases.values() if lease.deadline_s <= self.clock.now()
            ]
            assert not overdue, f"leases {overdue} are past their deadlines and have not expired"
        return commands

    def execute(self, commands: Sequence[Command]) -> None:
        """Execute commands of the core."""
        self.log += commands
        for command in commands:
            match command:
                case Send(worker, message):
                    self._send(worker, message)
                case AppendLedger(prompt, epoch, state):
                    self.records.append(command)
                    if command.reward is not None:
                        self._outcomes.append(Outcome(command.step, epoch, prompt, command.reward))
                    if state in ("dropped", "unread"):
                        self.disk.dropped[command.reason.split(";")[0]] += 1
                    self.state[epoch, prompt] = state
                case StepClosed():
                    self.steps.append(command)
                case AppendRestartLog(entry):
                    self.disk.keep(entry)
                case Persist(worker, request):
                    self.durable = len(self.records)
                    self._send(worker, m.Committed(request, (), ""))

    def _send(self, receiver: WorkerId, message: m.Message) -> None:
        match message:
            case m.Grant():
                turns: list[LaneTurn] = [incoming.turn for incoming in message.incoming]
            case m.SendSamples(turn) | m.ReceiveWeights(turn) | m.SendWeights(turn):
                turns = [turn]
            case m.RendezvousKey():
                return  # a peer has left: its lanes fail by themselves
            case _:
                turns = []
        for turn in turns:
            # A worker that rejoins under its old name is not an end of this lane.
            self._ends.setdefault(lane_of(turn), (self.workers[turn.sender], self.workers[turn.receiver]))
        if self.workers[receiver].alive:
            self.workers[receiver].inbox.append(message)

    def _transfer(self, worker: Worker, lane: LaneId) -> None:
        turn, packet = worker.expected[lane].popleft()
        if self._is_broken(lane):
            worker.lost(turn, packet)
            return
        sent = self.shared.sent[lane].popleft()
        assert sent == (turn, packet), f"{worker.id} expects {turn} {packet}, but {sent} was sent"
        worker.arrived(turn, packet)

    def _end_step(self) -> None:
        """The optimiser steps on all ranks at once."""
        first = self._ranks[0]
        step = first.step
        for rank in self._ranks:
            self.trained += [(step, row) for row in rank.trained]
            rank.trained.clear()
            rank.step, rank.closed = step + 1, False
        first.send(m.StepCompleted(step, (("loss", 0.5),)))
        if (step + 1) % self.scenario.publish_every == 0:
            first.unpublished = step + 1
        if self.scenario.checkpoint_every and (step + 1) % self.scenario.checkpoint_every == 0:
            first.requests += 1
            first.send(m.CheckpointWritten(first.requests, step + 1))
        if step + 1 == self.scenario.steps:
            self._report_finished()

    def _report_finished(self) -> None:
        for rank in self._ranks:
            rank.send(m.RoleCompleted())
            rank.closed = True

    def _finish(self) -> None:
        self._finished = True
        for source in self._sources:
            self.workers[source].send(m.RoleCompleted())

    def crash(self) -> None:
        """The controller crashes and restarts from disk. Some of the last messages that it sent are still received."""
        for worker in self.workers.values():
            for _ in range(self.rng.randint(0, len(worker.inbox)) if worker.alive else 0):
                worker.receive(worker.inbox.popleft())
        self.term += 1
        self.core = self._make_core(self.core.settings.position, self.term, self.disk.recovered())
        self.shared.sent.clear()
        for worker in self.workers.values():
            if worker.role == "source" and worker.alive and worker.is_new:
                continue  # it joins the next controller instead
            worker.outbox.clear()  # with the disconnections of dead workers, which are not received
            if worker.alive:
                worker.reconnect(self.term - 1)
        self.delayed = ""
        working = [worker.id for worker in self.workers.values() if worker.alive and worker.role in WORKING]
        if self._late and working:
            self._late -= 1
            self.delayed = self.rng.choice(working)

    def open_sources(self) -> list[Worker]:
        """The sources that may die: those whose role is not completed."""
        return [] if self._finished else [source for name in self._sources if (source := self.workers[name]).alive]

    def _welcome_source(self) -> None:
        """A new source is sent the prompts that it must not offer: all in the ledger that are not unread."""
        self.shared.passed = {epoch: frozenset(of) for epoch, of in self.core.env.passed.items()}
        for (epoch, prompt), state in self.state.items():
            if state != "unread":
                self.shared.passed[epoch] = self.shared.passed.get(epoch, frozenset()) | {prompt}

    def _rejoin(self, dead: Worker) -> None:
        if dead.role == "source":  # a new source offers the evaluations again whose results it does not have
            self.shared.evaluations = {
                group: evaluation
                for group, evaluation in self.shared.evaluations.items()
                if evaluation.is_closed or evaluation.source != dead.id
            }
        self.workers[dead.id] = RejoiningWorker(dead.id, dead.role, self.shared)
