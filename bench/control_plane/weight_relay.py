"""Simulation of one weight publication: a real `Core`, and workers that forward chunks of a version over their links.

Each worker sends with a rate of its own, which its receivers share chunk by chunk. A link between two workers can be
slower, and workers can die. Nothing is computed; the virtual time is that of the transfers.
"""

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from flowrt.controller.core import Core
from flowrt.controller.events import Event, MessageReceived, Send, Tick, WorkerConnected, WorkerDisconnected
from flowrt.controller.policies.admission import StrictLag
from flowrt.controller.policies.batching import TokenBudget
from flowrt.controller.policies.dispatch.base import Fifo
from flowrt.controller.policies.weight_sync import DelayedUpdate
from flowrt.controller.settings import Policies, Settings
from flowrt.ids import ROLLOUT, TRAINER, WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import NO_BASE, LaneTurn, Weights
from flowrt.simulation.cluster import FLOW, TRAINER_WORKER

MODEL = "policy"
TICK_S = 1.0


@dataclass(frozen=True)
class RelayPlan:
    """One publication to ``receivers`` workers; times are in simulated seconds."""

    receivers: int
    chunks: int = 128
    """Chunks of the version; a receiver forwards each as soon as it has arrived."""
    version_s: float = 10.0
    """Time in which a worker sends the whole version to one receiver."""
    message_s: float = 0.001
    """Time of a message to or from the controller."""
    slow: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """How many times slower the link from one worker to another one is."""
    deaths: Mapping[str, float] = field(default_factory=dict)
    """When a receiver dies."""


@dataclass(eq=False)
class _Transfer:
    turn: LaneTurn
    receiver: "_Node"
    first: int
    is_sending: bool = False
    is_over: bool = False

    def __post_init__(self) -> None:
        self.next_chunk = self.first


@dataclass(eq=False)
class _Node:
    """A worker, the chunks that it has, and the transfers that it serves."""

    id: WorkerId
    chunks: int = 0
    is_alive: bool = True
    is_busy: bool = False  # its own link sends a chunk
    serves: deque[_Transfer] = field(default_factory=deque)
    fetches: _Transfer | None = None


class RelaySimulation:
    """One publication.

    Attributes:
        now_s: the virtual time in seconds.
        staged_s: when each receiver had the whole version.
        holder_of: the holder from which each receiver was last ordered to fetch.
        core: the state machine.
    """

    def __init__(self, plan: RelayPlan) -> None:
        self.plan = plan
        self.now_s = 0.0
        self.staged_s: dict[WorkerId, float] = {}
        self.holder_of: dict[WorkerId, WorkerId] = {}
        policies = Policies(StrictLag(1), Fifo(), TokenBudget(1), DelayedUpdate())
        self.core = Core(Settings(steps=2, worker_timeout_s=1e9, no_progress_timeout_s=1e9), FLOW, policies)
        self._receivers = [WorkerId(f"{ROLLOUT}{number}") for number in range(plan.receivers)]
        self._of = {name: _Node(name) for name in (TRAINER_WORKER, *self._receivers)}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._weights = Weights(model=MODEL, version=1, base=NO_BASE, bucket_bytes=(plan.chunks,), checksum=0)
        self._early: dict[LaneTurn, _Transfer] = {}  # one end of the turn has its order

    def run(self) -> float:
        """Run until every living receiver has the version; returns the virtual seconds from its publication on.

        Raises AssertionError if no event is left before that.
        """
        self._handle(WorkerConnected(TRAINER_WORKER, TRAINER, "host"))
        for name in self._receivers:
            self._handle(WorkerConnected(name, ROLLOUT, "host"))
            self._handle(MessageReceived(name, m.WeightsActivated(MODEL, 0)))
        for victim, at_s in self.plan.deaths.items():
            self._at(at_s, partial(self._die, self._of[WorkerId(victim)]))
        self._of[TRAINER_WORKER].chunks = self.plan.chunks
        self._handle(MessageReceived(TRAINER_WORKER, m.Publish((self._weights,), ())))
        self._at(TICK_S, self._tick)
        while self._agenda:
            self.now_s, _, action = heapq.heappop(self._agenda)
            action()
        left = [name for name in self._receivers if name not in self.staged_s and self._of[name].is_alive]
        assert not left, f"{left[:3]} wait for a version, and nothing happens any more"
        return max(self.staged_s.values())

    def _tick(self) -> None:
        """Let the controller check its deadlines, while anything else happens."""
        if self._agenda:
            self._handle(Tick())
            self._at(self.now_s + TICK_S, self._tick)

    # ---- messages

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (at_s, next(self._order), action))

    def _send(self, worker: WorkerId, message: m.Message) -> None:
        self._at(self.now_s + self.plan.message_s, partial(self._deliver, worker, message))

    def _deliver(self, worker: WorkerId, message: m.Message) -> None:
        if self._of[worker].is_alive:
            self._handle(MessageReceived(worker, message))

    def _handle(self, event: Event) -> None:
        for command in self.core.transition(event, self.now_s):
            if isinstance(command, Send):
                at_s = self.now_s + self.plan.message_s
                self._at(at_s, partial(self._receive, self._of[command.worker], command.message))

    def _receive(self, node: _Node, message: m.Message) -> None:
        if not node.is_alive:
            return
        match message:
            case m.ReceiveWeights(turn, first=first):
                self._fetch(node, turn, first)
            case m.SendWeights(turn, first=first):
                self._serve(turn, first)
            case m.StopFetch(turn) if node.fetches is not None and node.fetches.turn == turn:
                self._fail(node, "it is slow")

    # ---- transfers

    def _fetch(self, node: _Node, turn: LaneTurn, first: int) -> None:
        assert node.fetches is None, f"{node.id} fetches already"
        assert node.chunks == first, f"{node.id} has {node.chunks} chunks, and is sent those from {first} on"
        transfer = self._early.pop(turn, None)
        if transfer is None:
            transfer = self._early[turn] = _Transfer(turn, node, first)
        else:
            self._begin(transfer)
        node.fetches = transfer
        holder = self._of[WorkerId(turn.sender)]
        self.holder_of[node.id] = holder.id
        if not holder.is_alive:
            self._fail(node, "its sender has died")

    def _serve(self, turn: LaneTurn, first: int) -> None:
        transfer = self._early.pop(turn, None)
        if transfer is None:
            self._early[turn] = _Transfer(turn, self._of[WorkerId(turn.receiver)], first)
        else:
            self._begin(transfer)

    def _begin(self, transfer: _Transfer) -> None:
        holder = self._of[WorkerId(transfer.turn.sender)]
        holder.serves.append(transfer)
        self._send_chunks(holder)

    def _send_chunks(self, holder: _Node) -> None:
        """Begin to send the next chunk to the receiver whose turn it is, and over each slow link that is free."""
        holder.serves = deque(
            transfer for transfer in holder.serves if not transfer.is_over and transfer.receiver.is_alive
        )
        for transfer in list(holder.serves):
            factor = self.plan.slow.get((holder.id, transfer.receiver.id), 1.0)
            if transfer.is_sending or transfer.next_chunk >= holder.chunks or (factor == 1.0 and holder.is_busy):
                continue
            transfer.is_sending = True
            holder.is_busy = holder.is_busy or factor == 1.0
            holder.serves.remove(transfer)
            holder.serves.append(transfer)
            seconds = factor * self.plan.version_s / self.plan.chunks
            self._at(self.now_s + seconds, partial(self._arrived, holder, transfer, factor))

    def _arrived(self, holder: _Node, transfer: _Transfer, factor: float) -> None:
        transfer.is_sending = False
        holder.is_busy = holder.is_busy and factor != 1.0
        node = transfer.receiver
        if holder.is_alive and node.is_alive and not transfer.is_over:
            transfer.next_chunk += 1
            node.chunks = transfer.next_chunk
            if node.chunks == max(self.plan.chunks // 8, transfer.first + 1):
                self._send(node.id, m.WeightsArriving(transfer.turn, MODEL))
            if node.chunks == self.plan.chunks:
                transfer.is_over = True
                node.fetches = None
                self.staged_s[node.id] = self.now_s
                self._send(node.id, m.WeightsStaged(MODEL, 1))
                self._send(node.id, m.WeightsActivated(MODEL, 1))
            self._send_chunks(node)
        if holder.is_alive:
            self._send_chunks(holder)

    def _die(self, node: _Node) -> None:
        node.is_alive = False
        self._fail_receivers(node)
        self._handle(WorkerDisconnected(node.id, "killed"))

    def _fail_receivers(self, node: _Node) -> None:
        waiting: dict[str, list[_Transfer]] = defaultdict(list)
        for transfer in [*node.serves, *self._early.values()]:
            if transfer.turn.sender == node.id and not transfer.is_over:
                waiting[transfer.turn.receiver].append(transfer)
        for transfers in waiting.values():
            for transfer in transfers:
                if transfer.receiver.fetches is transfer and transfer.receiver.is_alive:
                    self._fail(transfer.receiver, "its sender has died")

    def _fail(self, node: _Node, reason: str) -> None:
        transfer = node.fetches
        assert transfer is not None
        transfer.is_over = True
        node.fetches = None
        self._send(node.id, m.FetchFailed(transfer.turn, self._weights, reason, node.chunks))
        if not node.chunks:
            self._fail_receivers(node)  # else its relays wait for the rest
