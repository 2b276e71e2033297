"""A whole cluster in one process: simulated workers around a real `Core`, in a seeded order, with a driven clock.

Messages are FIFO between a worker and the controller, transfers are FIFO within a lane, and everything else is
interleaved at random: the same scenario always takes the same course. Workers may be slow, die and come back; lanes
may break; leases may expire. A run in which nobody can do anything any more raises AssertionError.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial

from flowrt.clock import DrivenClock
from flowrt.controller.admission import StrictLag
from flowrt.controller.core import Core
from flowrt.controller.events import Command, End, Event, Gone, Keep, Record, Send, StepClosed, Tick
from flowrt.controller.settings import Policies, Settings
from flowrt.controller.walk import Remains
from flowrt.ids import WorkerId
from flowrt.testing.scenario import MODEL, Scenario, grpo_dataflow
from flowrt.testing.simreturn import Durable, Survivor
from flowrt.testing.simrows import LaneId, Row, lane_of
from flowrt.testing.simworker import Shared, Worker
from flowrt.wire import messages as m
from flowrt.wire.records import LaneTurn

LEASE_S = 100.0
FAULT_CHANCE = 0.02
Action = tuple[float, Callable[[], None]]
"""How likely it is next, relative to the others, and what it does."""


def make_core(scenario: Scenario, term: int = 1, remains: Remains | None = None) -> Core:
    """The mind of the simulated run: strict staleness bound, first in first out, everyone fetches at once."""
    settings = Settings(
        steps=scenario.steps,
        groups_per_step=scenario.groups_per_step,
        in_order=scenario.in_order,
        model=MODEL,
        lost_member=scenario.lost_member,
        attempts=scenario.attempts,
        vital_roles=(),
        finishers=("source", "trainer"),
        lease_s=LEASE_S,
        silence_s=float("inf"),
        stall_s=float("inf"),
    )
    policies = Policies(
        StrictLag(scenario.bound),
        scenario.dispatch,
        scenario.batcher,
        scenario.refresh,
        scenario.sharing,
        scenario.cut,
    )
    return Core(settings, grpo_dataflow(scenario.references > 0), policies, term, remains)


class Cluster:
    """Make one, `run` it, look at what it recorded."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed)
        self.clock = DrivenClock()
        self.core = make_core(scenario)
        self.shared = Shared(scenario, self.rng, lambda: self.core.weights.latest)
        self.workers: dict[str, Survivor] = {}
        self.term = 1
        self.durable = Durable()
        self.records: list[Record] = []
        self.state: dict[tuple[int, int], str] = {}  # what the ledger would say, by (epoch, prompt)
        self.steps: list[StepClosed] = []
        self.trained: list[tuple[int, Row]] = []  # (step, slot) as the trainer saw them
        self.log: list[Event | Command] = []
        self.actions = 0
        self._ends: dict[LaneId, tuple[Worker, Worker]] = {}
        self._finished = False
        self._faults = ["kill"] * scenario.kills
        self._faults += ["break"] * scenario.broken_lanes + ["expire"] * scenario.expiries
        self._faults += ["lose"] * scenario.losses + ["withdraw"] * scenario.withdrawals
        self._faults += ["crash"] * scenario.crashes
        self.rng.shuffle(self._faults)
        roles = {"rollout": scenario.rollouts, "reward": scenario.rewards, "reference": scenario.references}
        roles |= {"trainer": scenario.ranks, "source": 1, "evaluate": 1}
        for role, count in roles.items():
            for rank in range(count):
                self.workers[f"{role}{rank}"] = Survivor(f"{role}{rank}", role, self.shared)
        self._ranks = [worker for worker in self.workers.values() if worker.role == "trainer"]

    def run(self) -> "Cluster":
        """Until the run is complete and nothing is on its way. Raises AssertionError when it cannot be completed."""
        while self.step():
            assert self.actions < self.scenario.max_actions, f"{self.actions} actions and no end; {self.stuck()}"
        assert self.core.ended is not None, f"nobody can do anything; {self.stuck()}"
        assert self.core.ended.code == 0, self.core.ended.reason
        return self

    def step(self) -> bool:
        """Let one thing happen; False when nothing can."""
        actions = list(self.possible())
        if not actions:
            return False
        self.actions += 1
        if self._faults and self.rng.random() < FAULT_CHANCE:
            self._misfortune(self._faults[-1])
        else:
            _, action = self.rng.choices(actions, [weight for weight, _ in actions])[0]
            action()
        return True

    def stuck(self) -> str:
        """What everybody waits for."""
        window = self.core.samples.window
        waits = "; ".join(f"{who} waits for {what}" for who, what, _ in self.core.samples.waiting())
        return f"step {window.step}, {len(window.taken)} groups taken, {len(window.waiting)} waiting: {waits}"

    # ---- what can happen next

    def possible(self) -> Iterator[Action]:
        speeds = dict(self.scenario.speeds)
        some = False
        for worker in self.workers.values():
            speed = speeds.get(worker.id, 1.0)
            for action in self._of(worker):
                some = True
                yield action
            for work in worker.options() if worker.alive else ():
                some = True
                yield (speed, work)
        if self._step_is_complete():
            some = True
            yield (1.0, self._end_step)
        # Only when all else is done, so that what is left over at the end is left over for good.
        if not some and self.workers["source0"].closed and not self._finished:
            yield (1.0, self._finish)

    def _of(self, worker: Worker) -> Iterator[Action]:
        """Messages and transfers of one worker that can be delivered, and its return if it is dead."""
        if worker.outbox:
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
        return lane in self.shared.broken or not all(end.alive for end in self._ends[lane])

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

    # ---- what happens

    def _deliver(self, worker: Worker) -> None:
        self.handle(worker.outbox.popleft())

    def handle(self, event: Event) -> list[Command]:
        """Let the core take one event and carry out what it commands."""
        self.log.append(event)
        commands = self.core.handle(event, self.clock.now())
        self.core.check()
        self.log += commands
        for command in commands:
            match command:
                case Send(worker, message):
                    self._send(worker, message)
                case Record(prompt, epoch, state):
                    self.records.append(command)
                    if state in ("dropped", "unread"):
                        self.durable.dropped[command.reason.split(";")[0]] += 1
                    self.state[epoch, prompt] = state
                case StepClosed():
                    self.steps.append(command)
                case Keep(entry):
                    self.durable.keep(entry)
                case End():
                    pass
        return commands

    def _send(self, receiver: WorkerId, message: m.Message) -> None:
        match message:
            case m.Grant():
                turns: list[LaneTurn] = [one.turn for one in message.incoming]
            case m.Serve(turn) | m.Fetch(turn) | m.ServeWeights(turn):
                turns = [turn]
            case m.Signal():
                return  # that a peer is gone: the lanes here fail by themselves
            case _:
                turns = []
        for turn in turns:
            # A worker that comes back under its old name is not the one that this lane was made for.
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
        first.say(m.StepDone(step, (("loss", 0.5),)))
        if (step + 1) % self.scenario.publish_every == 0:
            first.unpublished = step + 1
        if step + 1 == self.scenario.steps:
            for rank in self._ranks:
                rank.say(m.Finished())
                rank.closed = True

    def _finish(self) -> None:
        self._finished = True
        self.workers["source0"].say(m.Finished())

    # ---- misfortunes

    def _misfortune(self, kind: str) -> None:
        if kind == "expire":
            self._faults.pop()
            self.clock.advance(LEASE_S + 1)
            self.handle(Tick())
            return
        working = [w for w in self.workers.values() if w.alive and w.role in ("rollout", "reward", "reference")]
        if kind == "crash":
            if self.core.ended is None:
                self._faults.pop()
                self.crash()
            return
        if kind == "kill":
            if working and self.core.ended is None:
                self._faults.pop()
                self.kill(self.rng.choice(working))
            return
        if kind == "lose":
            if jobs := [(worker, job) for worker in working for job in worker.jobs]:
                self._faults.pop()
                worker, job = self.rng.choice(jobs)
                worker.abandon(job, True, "its environment broke")
            return
        if kind == "withdraw":
            if waiting := [worker for worker in self.workers.values() if worker.alive and worker.pulling]:
                self._faults.pop()
                self.rng.choice(waiting).withdraw()
            return
        lanes = [lane for worker in self.workers.values() for lane, turns in worker.expected.items() if turns]
        if lanes:
            self._faults.pop()
            self.shared.broken.add(self.rng.choice(lanes))

    def crash(self) -> None:
        """The controller vanishes, and comes back with what is on disk. Some of what it said last is still heard."""
        for worker in self.workers.values():
            for _ in range(self.rng.randint(0, len(worker.inbox)) if worker.alive else 0):
                worker.receive(worker.inbox.popleft())
        self.term += 1
        self.core = make_core(self.scenario, self.term, self.durable.remains())
        self.shared.sent.clear()
        for worker in self.workers.values():
            worker.outbox.clear()  # of the dead, nobody has anything to hear any more
            if worker.alive:
                worker.come_back(self.term - 1)

    def kill(self, worker: Worker) -> None:
        """It vanishes; some of what it said last is still heard, then the controller learns of it."""
        worker.alive = False
        worker.inbox.clear()
        for _ in range(self.rng.randint(0, len(worker.outbox))):
            worker.outbox.pop()
        worker.outbox.append(Gone(worker.id, ""))

    def _rejoin(self, dead: Worker) -> None:
        self.workers[dead.id] = Survivor(dead.id, dead.role, self.shared)
