"""Runs with a faulty worker: from some moment on it is slow, hangs, has left or is dead, and time passes.

Time is simulated: every action takes a little of it, live workers send heartbeats, and the controller checks its
deadlines twice a second. Such a run must end in bounded time, with one of few outcomes and a reason.
"""

from enum import Enum

from flowrt.controller.core import Core
from flowrt.controller.events import MessageReceived, Tick, WorkerConnected, WorkerDisconnected
from flowrt.controller.state.controller_restart import RecoveredState
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import Position
from tests.simulation.cluster import Action, SimulatedCluster, make_core
from tests.simulation.scenario import Scenario
from tests.simulation.worker import Worker

ACT_S, TICK_S, HEARTBEAT_S = 0.01, 0.5, 1.0
SLOW_S = 4.0
"""Duration of an action of a slow worker."""
LEASE_S, SILENCE_S, STALL_S, LANE_S, ABSENCE_S = 60.0, 30.0, 300.0, 20.0, 60.0
LIMIT_S = 3600.0
CANCELLED = 130
MAX_PROMPTS = 6
"""Number of prompts in runs whose data end."""


class Phase(Enum):
    """When the fault begins."""

    START = "the start"
    RESUME = "the start of a resumed run"
    TRAINING = "training"
    EVALUATION = "an evaluation"
    END_OF_DATA = "the end of the data"
    END_OF_RUN = "the last step"
    CANCEL = "a cancellation"
    DEPARTURE = "the departure of another worker"
    DRAIN = "the drain of another worker"


class Kind(Enum):
    """The kind of fault."""

    SLOW = "slow"
    HUNG = "hung"  # sends heartbeats and serves transfers, but does no work
    MISSING = "missing"  # has disconnected, or never joined
    DEAD = "dead"  # sends nothing more, and its connection stays open


class DegradedRun(SimulatedCluster):
    """A run in which the first worker of a role is faulty from a phase on."""

    def __init__(
        self,
        phase: Phase,
        role: str,
        kind: Kind,
        seed: int = 0,
        *,
        drained: str = "",
        position: Position | None = None,
    ) -> None:
        """``drained``: the role whose second worker is drained when the fault begins, in phase DRAIN."""
        self.phase, self.kind = phase, kind
        self.fault_s: float | None = None
        self._next_slow_s = 0.0
        self._is_victims_turn = False
        self._last_action_s = 0.0
        self._next_tick_s, self._next_heartbeat_s = 0.0, 0.0
        self._exhausted = False
        super().__init__(_scenario(phase, seed), position)
        self.victim = self.workers[f"{role}0"]
        self.drained = self.workers[f"{drained}1"] if drained else None
        self.left_s: float | None = None  # when the drained worker had left

    def _make_core(self, position: Position | None, term: int = 1, recovered: RecoveredState | None = None) -> Core:
        critical: tuple[str, ...] = ("source", "trainer", "reward", "reference")
        replaceable: tuple[str, ...] = ()
        if self.phase is Phase.DRAIN:
            critical, replaceable = ("trainer",), ("source", "rollout", "reward", "reference")
        elif self.phase is not Phase.DEPARTURE:
            critical += ("rollout",)
        return make_core(
            self.scenario,
            position,
            term,
            recovered,
            critical_roles=critical,
            replaceable_roles=replaceable,
            role_vacancy_timeout_s=ABSENCE_S,
            lease_s=LEASE_S,
            worker_timeout_s=SILENCE_S,
            no_progress_timeout_s=STALL_S,
        )

    def play(self, for_s: float = LIMIT_S) -> "DegradedRun":
        """Run to the end, or for ``for_s`` after the fault. Raises AssertionError if the run does not end."""
        while self.core.ended is None and (self.fault_s is None or self.took_s < for_s):
            assert self.clock.now() < LIMIT_S, f"no end after {LIMIT_S} s: {self.describe_waits()}"
            if self.fault_s is None and self._is_phase_reached():
                self._begin_fault()
            actions = self._actions()
            if actions:
                _, action = self.rng.choices(actions, [weight for weight, _ in actions])[0]
                action()
                self._last_action_s = self.clock.now()
            elif self.clock.now() - self._last_action_s > LANE_S:
                self._break_lanes()
            self._pass_time(ACT_S if actions else TICK_S)
        return self

    @property
    def took_s(self) -> float:
        """Time from the beginning of the fault to the end of the run."""
        assert self.fault_s is not None, f"{self.phase} was not reached"
        return self.clock.now() - self.fault_s

    # ---- time

    def _pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        now = self.clock.now()
        if now >= self._next_heartbeat_s and self.core.ended is None:
            self._next_heartbeat_s = now + HEARTBEAT_S
            for worker in self.workers.values():
                if worker.alive and worker.id in self.core.state.membership:
                    self.handle(MessageReceived(worker.id, m.Heartbeat()))
        if now >= self._next_tick_s and self.core.ended is None:
            self._next_tick_s = now + TICK_S
            self.handle(Tick())

    def _actions(self) -> list[Action]:
        """The possible actions; a slow victim acts as soon as it may, and then not for SLOW_S."""
        if self.fault_s is not None and self.kind is Kind.SLOW and self.clock.now() >= self._next_slow_s:
            self._is_victims_turn = True
            if actions := list(self.possible()):
                self._next_slow_s = self.clock.now() + SLOW_S
                return actions
        self._is_victims_turn = False
        return list(self.possible())

    def _may_act(self, worker: Worker) -> bool:
        if self.fault_s is None or self.kind is Kind.HUNG:
            return True
        return (worker is self.victim) == self._is_victims_turn

    def _active_workers(self) -> list[Worker]:
        able = [worker for worker in super()._active_workers() if worker.alive and self._may_act(worker)]
        return [worker for worker in able if not self._waits_for_last_offers(worker)]

    def _step_is_complete(self) -> bool:
        return self._may_act(self._ranks[0]) and not self._ranks[0].hung and super()._step_is_complete()

    def _end_step(self) -> None:
        if any(rank.trained for rank in self._ranks):
            super()._end_step()
            return
        for rank in self._ranks:  # the data ended before the steps
            rank.send(m.RoleCompleted())
            rank.step = self.scenario.steps

    def _source_is_done(self) -> bool:
        source = self.workers["source0"]
        return source.alive and not source.hung and self._may_act(source) and super()._source_is_done()

    def _waits_for_last_offers(self, worker: Worker) -> bool:
        """At the end of the data the source waits until all its offers are accepted, and reports the end."""
        if (
            worker.role != "source"
            or self.phase is not Phase.END_OF_DATA
            or worker.prompts < MAX_PROMPTS
            or self._exhausted
        ):
            return False
        if not worker.offers:
            worker.send(m.EndOfData("train"))
            self._exhausted = True
        return not (self._exhausted or worker.inbox or worker.outbox)

    def _break_lanes(self) -> None:
        """Break the lanes of the victim on which workers wait: no action was possible for LANE_S."""
        for worker in self.workers.values():
            self.shared.broken |= {lane for lane, turns in worker.expected.items() if turns and self.victim.id in lane}

    def _deliver(self, worker: Worker) -> None:
        is_leaving = worker.outbox[0] == MessageReceived(worker.id, m.Leave(""))
        super()._deliver(worker)
        if is_leaving:
            worker.alive = False
            self.left_s = self.clock.now()

    def _send(self, receiver: WorkerId, message: m.Message) -> None:
        if receiver in self.workers and not isinstance(message, m.Heartbeat):
            super()._send(receiver, message)

    # ---- the fault

    def _is_phase_reached(self) -> bool:
        window = self.core.state.window
        match self.phase:
            case Phase.START | Phase.RESUME:
                return True
            case Phase.EVALUATION:
                return any(group.flow == "eval" for group in self.core.state.table.groups.values())
            case Phase.END_OF_DATA:
                return window.exhausted
            case Phase.END_OF_RUN:
                return window.step == self.scenario.steps - 1
            case Phase.TRAINING if self.kind is Kind.HUNG:
                return window.step >= 1 and bool(self.victim.jobs or self.victim.role in ("source", "evaluate"))
            case _:
                return window.step >= 1

    def _begin_fault(self) -> None:
        self.fault_s = self._next_slow_s = self.clock.now()
        victim = self.victim
        if self.kind is Kind.MISSING:
            self._leave(victim)
        elif self.kind is Kind.HUNG:
            victim.hung = True
        elif self.kind is Kind.DEAD:
            victim.alive = False
            victim.inbox.clear()
            victim.outbox.clear()
            if victim.id not in self.core.state.membership:
                self.handle(WorkerConnected(victim.id, victim.role, "host"))
        if self.phase is Phase.CANCEL:
            self.handle(WorkerConnected(WorkerId("observer"), "observer", "host"))
            self.handle(MessageReceived(WorkerId("observer"), m.Stop("cancelled", CANCELLED)))
        elif self.phase is Phase.DEPARTURE:
            self._leave(self.workers["rollout1"])
        elif self.drained is not None:
            self.handle(WorkerConnected(WorkerId("observer"), "observer", "host"))
            self.handle(MessageReceived(WorkerId("observer"), m.Drain(1, self.drained.id)))

    def _leave(self, worker: Worker) -> None:
        worker.alive = False
        worker.inbox.clear()
        worker.outbox.clear()
        if worker.id in self.core.state.membership:
            self.handle(WorkerDisconnected(worker.id, ""))


def _scenario(phase: Phase, seed: int) -> Scenario:
    """A small scenario with the data, evaluations, workers and checkpoints that the phase needs."""
    match phase:
        case Phase.END_OF_DATA:
            return Scenario(seed=seed, steps=100)
        case Phase.EVALUATION:
            return Scenario(seed=seed, evals=3)
        case Phase.DRAIN:
            return Scenario(seed=seed, rewards=2, references=2, checkpoint_every=1)
        case _:
            return Scenario(seed=seed, checkpoint_every=1)
