"""Runs that get into trouble: from some moment on one role is slow, hangs, has left or is dead, and time passes.

Time is simulated: every action takes a little of it, workers that live send heartbeats, and the controller's deadlines
are looked at twice a second. Such a run must end, soon, in one of few ways, and say why.
"""

from enum import Enum

from flowrt.controller.core import Core
from flowrt.controller.events import MessageReceived, Tick, WorkerConnected, WorkerDisconnected
from flowrt.controller.state.replay import RecoveredState
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import Position
from tests.simulation.cluster import Action, SimulatedCluster, make_core
from tests.simulation.scenario import Scenario
from tests.simulation.worker import Worker

ACT_S, TICK_S, HEARTBEAT_S = 0.01, 0.5, 1.0
SLOW_S = 4.0
"""What an action of a slow worker takes."""
LEASE_S, SILENCE_S, STALL_S, LANE_S, ABSENCE_S = 60.0, 30.0, 300.0, 20.0, 60.0
LIMIT_S = 3600.0
CANCELLED = 130
DATA = 6
"""Prompts that there are, where the data come to their end."""


class Phase(Enum):
    """The moment from which on there is trouble."""

    START = "the start"
    RESUME = "the start of a run that goes on"
    TRAINING = "training"
    EVALUATION = "an evaluation"
    END_OF_DATA = "the end of the data"
    END_OF_RUN = "the last step"
    CANCEL = "a cancellation"
    DEPARTURE = "the departure of another worker"
    DRAIN = "the drain of another worker"


class Kind(Enum):
    """What is wrong with the workers of a role."""

    SLOW = "slow"
    HUNG = "hung"  # it lives and serves others, and its role does nothing
    MISSING = "missing"  # left politely, or never came
    DEAD = "dead"  # says nothing any more, and its connection does not close


class DegradedRun(SimulatedCluster):
    """A run in which the first worker of a role is in trouble from a phase on."""

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
        """``drained``: the role whose second worker is told to leave when the trouble begins, in phase DRAIN."""
        self.phase, self.kind = phase, kind
        self.struck_s: float | None = None
        self._done_s = 0.0
        self._victims_turn = False
        self._acted_s = 0.0
        self._tick_s, self._beat_s = 0.0, 0.0
        self._exhausted = False
        super().__init__(_scenario(phase, seed), position)
        self.victim = self.workers[f"{role}0"]
        self.drained = self.workers[f"{drained}1"] if drained else None
        self.left_s: float | None = None  # when that had left

    def _make_core(self, position: Position | None, term: int = 1, recovered: RecoveredState | None = None) -> Core:
        vital: tuple[str, ...] = ("source", "trainer", "reward", "reference")
        needed: tuple[str, ...] = ()
        if self.phase is Phase.DRAIN:
            vital, needed = ("trainer",), ("source", "rollout", "reward", "reference")
        elif self.phase is not Phase.DEPARTURE:
            vital += ("rollout",)
        return make_core(
            self.scenario,
            position,
            term,
            recovered,
            critical_roles=vital,
            replaceable_roles=needed,
            role_vacancy_timeout_s=ABSENCE_S,
            lease_s=LEASE_S,
            worker_timeout_s=SILENCE_S,
            no_progress_timeout_s=STALL_S,
        )

    def play(self, for_s: float = LIMIT_S) -> "DegradedRun":
        """Until the run has ended, or for so long after the trouble began; AssertionError when it does not end."""
        while self.core.ended is None and (self.struck_s is None or self.took_s < for_s):
            assert self.clock.now() < LIMIT_S, f"no end after {LIMIT_S} s: {self.stuck()}"
            if self.struck_s is None and self._has_come():
                self._strike()
            actions = self._actions()
            if actions:
                _, action = self.rng.choices(actions, [weight for weight, _ in actions])[0]
                action()
                self._acted_s = self.clock.now()
            elif self.clock.now() - self._acted_s > LANE_S:
                self._break_lanes()
            self._pass_time(ACT_S if actions else TICK_S)
        return self

    @property
    def took_s(self) -> float:
        """From the beginning of the trouble to the end of the run."""
        assert self.struck_s is not None, f"{self.phase} never came"
        return self.clock.now() - self.struck_s

    # ---- time

    def _pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        now = self.clock.now()
        if now >= self._beat_s and self.core.ended is None:
            self._beat_s = now + HEARTBEAT_S
            for worker in self.workers.values():
                if worker.alive and worker.id in self.core.state.membership:
                    self.handle(MessageReceived(worker.id, m.Heartbeat()))
        if now >= self._tick_s and self.core.ended is None:
            self._tick_s = now + TICK_S
            self.handle(Tick())

    def _actions(self) -> list[Action]:
        """What may happen next; a slow victim acts as soon as it may, and then not for a while."""
        if self.struck_s is not None and self.kind is Kind.SLOW and self.clock.now() >= self._done_s:
            self._victims_turn = True
            if found := list(self.possible()):
                self._done_s = self.clock.now() + SLOW_S
                return found
        self._victims_turn = False
        return list(self.possible())

    def _acts(self, worker: Worker) -> bool:
        if self.struck_s is None or self.kind is Kind.HUNG:
            return True
        return (worker is self.victim) == self._victims_turn

    def _awake(self) -> list[Worker]:
        able = [one for one in super()._awake() if one.alive and self._acts(one)]
        return [one for one in able if not self._waits_for_its_last_offers(one)]

    def _step_is_complete(self) -> bool:
        return self._acts(self._ranks[0]) and not self._ranks[0].hung and super()._step_is_complete()

    def _end_step(self) -> None:
        if any(rank.trained for rank in self._ranks):
            super()._end_step()
            return
        for rank in self._ranks:  # the data have come to their end before the steps
            rank.send(m.RoleCompleted())
            rank.step = self.scenario.steps

    def _source_is_done(self) -> bool:
        source = self.workers["source0"]
        return source.alive and not source.hung and self._acts(source) and super()._source_is_done()

    def _waits_for_its_last_offers(self, worker: Worker) -> bool:
        """At the end of the data the source waits until all are open, says so, and asks for the end."""
        if worker.role != "source" or self.phase is not Phase.END_OF_DATA or worker.prompts < DATA or self._exhausted:
            return False
        if not worker.offers:
            worker.send(m.EndOfData("train"))
            self._exhausted = True
        return not (self._exhausted or worker.inbox or worker.outbox)

    def _break_lanes(self) -> None:
        """Nothing has moved for long: whoever waits for the victim's end of a lane gives up."""
        for worker in self.workers.values():
            self.shared.broken |= {lane for lane, turns in worker.expected.items() if turns and self.victim.id in lane}

    def _deliver(self, worker: Worker) -> None:
        says_goodbye = worker.outbox[0] == MessageReceived(worker.id, m.Leave(""))
        super()._deliver(worker)
        if says_goodbye:
            worker.alive = False
            self.left_s = self.clock.now()

    def _send(self, receiver: WorkerId, message: m.Message) -> None:
        if receiver in self.workers and not isinstance(message, m.Heartbeat):
            super()._send(receiver, message)

    # ---- trouble

    def _has_come(self) -> bool:
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

    def _strike(self) -> None:
        self.struck_s = self._done_s = self.clock.now()
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
    """Small; where somebody has to be spared there are two of all that can be, and where it goes on, checkpoints."""
    match phase:
        case Phase.END_OF_DATA:
            return Scenario(seed=seed, steps=100)
        case Phase.EVALUATION:
            return Scenario(seed=seed, evals=3)
        case Phase.DRAIN:
            return Scenario(seed=seed, rewards=2, references=2, checkpoint_every=1)
        case _:
            return Scenario(seed=seed, checkpoint_every=1)
