"""Faults of a simulated cluster at random moments: workers die, lanes break, messages come twice or late."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from flowrt.controller.events import (
    ControllerStalled,
    Dismiss,
    EndRun,
    Event,
    MessageReceived,
    Send,
    Tick,
    WorkerConnected,
    WorkerDisconnected,
)
from flowrt.errors import RemoteProtocolError
from flowrt.ids import OBSERVER, WorkerId
from flowrt.protocol import messages as m
from tests.simulation.scenario import LEASE_S
from tests.simulation.state_dump import snapshot
from tests.simulation.worker import Worker

if TYPE_CHECKING:
    from tests.simulation.cluster import SimulatedCluster

OPERATOR = WorkerId("operator")
FAULT_PROBABILITY = 0.02
ILLEGAL: tuple[m.Message, ...] = (
    m.OfferAccepted(1, 1),
    m.Commit(request=1, stage="no such stage", slots=(0,), leases=(0,), parts=(), inline=(), spans=()),
    m.Commit(request=1, stage="train", slots=(0,), leases=(0,), parts=(), inline=(), spans=()),
    m.ReleaseLease(stage="rollout", slots=(0, 1), leases=(0,), lost=False, reason=""),
    m.Publish((), ()),
    m.WeightsActivated("another model", 0),
    m.Drain(1, "trainer0"),
    m.StepCompleted(-1, ()),
)
"""Messages that no worker may send at any time."""
REPEATED = m.Commit | m.ReleaseLease | m.CancelRequest | m.StepCompleted | m.RoleCompleted
"""Messages that may come twice, or long after the end of their lease or step, and must not count again."""


class FaultInjection:
    """The faults of one scenario in random order; each waits until it has a target."""

    def __init__(self, cluster: "SimulatedCluster") -> None:
        self._cluster = cluster
        self._rng = cluster.rng
        self._messages: list[MessageReceived] = []
        scenario = cluster.scenario
        self._pending = ["kill"] * scenario.kills + ["kill source"] * scenario.source_kills
        self._pending += ["break"] * scenario.broken_lanes + ["expire"] * scenario.expiries
        self._pending += ["lose"] * scenario.losses + ["withdraw"] * scenario.withdrawals
        self._pending += ["repeat"] * scenario.repeats + ["crash"] * scenario.crashes
        self._pending += ["violate"] * scenario.violations + ["terminate"] * scenario.terminations
        self._pending += ["stall"] * scenario.stalls
        self._pending += ["drain"] * scenario.drains
        self._rng.shuffle(self._pending)

    def inject(self) -> bool:
        """With FAULT_PROBABILITY, inject the next fault; returns whether this was the turn of a fault."""
        if not self._pending or self._rng.random() >= FAULT_PROBABILITY:
            return False
        if self._inject(self._pending[-1]):
            self._pending.pop()
        return True

    def back_offs(self) -> list[tuple[float, Callable[[], None]]]:
        """The action that advances the clock to the end of the first back-off after failed fetches, if there is one."""
        now, back_offs = self._cluster.clock.now(), self._cluster.core.state.models.backing_off.values()
        left_s = [end_s - now for by_worker in back_offs for end_s in by_worker.values() if end_s > now]
        return [(1.0, partial(self._advance, min(left_s)))] if left_s else []

    def _advance(self, seconds: float) -> None:
        """Advance the clock, and let the controller check its deadlines."""
        self._cluster.clock.advance(seconds)
        self._cluster.handle(Tick())

    def end_recovery(self) -> None:
        """Let the rejoin timeout of a restarted controller pass."""
        self._cluster.handle(Tick())  # the timeout begins with the first event
        self._advance(self._cluster.core.settings.rejoin_timeout_s + 1)

    def observe(self, event: Event) -> None:
        """Record a message that may be repeated by the same process, not by a later one with the same name."""
        if isinstance(event, WorkerConnected):
            self._messages = [message for message in self._messages if message.worker != event.worker]
        if isinstance(event, MessageReceived) and isinstance(event.message, REPEATED):
            self._messages.append(event)

    def _inject(self, kind: str) -> bool:  # noqa: C901 - one case for each fault
        cluster, rng = self._cluster, self._rng
        workers = [worker for worker in cluster.workers.values() if worker.alive]
        working = [worker for worker in workers if worker.role in ("rollout", "reward", "reference", "filter")]
        match kind:
            case "expire":
                self._advance(LEASE_S + 1)
                return True
            case "stall" if cluster.core.ended is None:
                self._stall()
                return True
            case "kill" if working and cluster.core.ended is None:
                self.kill(rng.choice(working))
                return True
            case "kill source" if cluster.core.ended is None and (sources := cluster.open_sources()):
                self.kill(rng.choice(sources))
                return True
            case "crash" if cluster.core.ended is None:
                cluster.crash()
                return True
            case "lose" if jobs := [(worker, job) for worker in working for job in worker.jobs]:
                worker, job = rng.choice(jobs)
                worker.abandon(job, True, "its environment broke")
                return True
            case "withdraw" if waiting := [worker for worker in workers if worker.pulling]:
                rng.choice(waiting).withdraw()
                return True
            case "terminate" if (
                len(left := [peer for peer in working if peer.role == "rollout" and not peer.leaving]) > 1
            ):
                rng.choice(left).terminate()
                return True
            case "drain" if len(left := [peer for peer in working if self._may_drain(peer)]) > 1:
                self._drain(rng.choice(left))
                return True
            case "break" if lanes := [
                lane for worker in cluster.workers.values() for lane, turns in worker.expected.items() if turns
            ]:
                cluster.shared.broken.add(rng.choice(lanes))
                return True
            case "violate" if working and cluster.core.ended is None:
                self._violate(rng.choice(working))
                return True
            case "repeat" if self._messages:
                self._repeat(rng.choice(self._messages))
                return True
        return False

    def _stall(self) -> None:
        """The controller does not run for longer than a lease, and no lease is lost by that."""
        cluster, seconds = self._cluster, 2 * LEASE_S
        leases = set(cluster.core.state.table.leases)
        was_recovering = cluster.core.state.recovery.is_active
        cluster.clock.advance(seconds)
        commands = cluster.handle(ControllerStalled(seconds)) + cluster.handle(Tick())
        ends = [command for command in commands if isinstance(command, Dismiss | EndRun)]
        assert not ends, f"the controller did not run for {seconds} s, which led to {ends}"
        ended = leases - set(cluster.core.state.table.leases)
        assert not ended, f"leases {ended} have expired while the controller did not run"
        is_recovering = cluster.core.state.recovery.is_active
        assert is_recovering or not was_recovering, "recovery has ended while the controller did not run"

    def _may_drain(self, worker: Worker) -> bool:
        return worker.role == "rollout" and not worker.leaving and worker.id in self._cluster.core.state.membership

    def _drain(self, worker: Worker) -> None:
        """An operator orders the worker to leave."""
        worker.terminated = True
        self._cluster.handle(WorkerConnected(OPERATOR, OBSERVER, "host"))
        self._cluster.handle(MessageReceived(OPERATOR, m.Drain(1, worker.id)))
        self._cluster.handle(WorkerDisconnected(OPERATOR, ""))

    def kill(self, worker: Worker) -> None:
        """The worker dies; some of its last messages are still delivered, then its disconnection."""
        worker.alive = False
        worker.inbox.clear()
        for _ in range(self._rng.randint(0, len(worker.outbox))):
            worker.outbox.pop()
        worker.outbox.append(WorkerDisconnected(worker.id, ""))

    def _violate(self, worker: Worker) -> None:
        """The worker sends an illegal message and is dismissed; another one takes its place."""
        if worker.id not in self._cluster.core.state.membership:
            return
        commands = self._cluster.core.handle(
            MessageReceived(worker.id, self._rng.choice(ILLEGAL)), self._cluster.clock.now()
        )
        assert isinstance(commands[0], Dismiss), f"{worker.id} broke the protocol, which led to {commands}"
        worker.alive = False
        worker.inbox.clear()
        worker.outbox.clear()
        self._cluster.core.check()
        self._cluster.execute(commands)

    def _repeat(self, event: MessageReceived) -> None:
        """The same message comes again: it may be answered, and changes nothing."""
        core = self._cluster.core
        if event.worker not in core.state.membership:
            return
        if core.state.recovery.is_active:
            return  # deferred messages are answered later, each copy separately
        before = snapshot(core)
        try:
            commands = core.transition(event, self._cluster.clock.now())
        except RemoteProtocolError:
            commands = []
        unexpected = [
            command
            for command in commands
            if not (isinstance(command, Send) and isinstance(command.message, m.Committed))
        ]
        assert not unexpected, f"{event} came twice, and the second time led to {unexpected}"
        assert snapshot(core) == before, f"{event} came twice, and the second time changed something"
