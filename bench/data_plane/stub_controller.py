"""A stub controller for `bench/tensors.py`: flowrt's messages and links, without the tables of a controller."""

import asyncio

from flowrt.controller.state.transfers import Lanes
from flowrt.ids import WorkerId
from flowrt.net.link import ServerLink
from flowrt.protocol import messages as m
from flowrt.protocol.messages import Incoming

PRODUCER, CONSUMER = "producer", "consumer"
TRANSPORTS = ("shm", "gloo")


class StubController:
    """Answers as the controller does, but without tables: the slots of the last commit are granted to the next pull."""

    def __init__(self) -> None:
        self._link = ServerLink(self._receive, self._garbled, lambda: None)
        self.address = self._link.bind("tcp://127.0.0.1:0")
        self._peer_of: dict[str, bytes] = {}
        self._name_of: dict[bytes, str] = {}
        self._lanes = {name: Lanes(name) for name in TRANSPORTS}
        self._offered: m.Commit | None = None
        self.all_joined = asyncio.Event()

    def _garbled(self, peer: bytes, reason: str) -> None:
        raise RuntimeError(f"{peer!r}: {reason}")

    def _receive(self, peer: bytes, message: m.Message) -> None:
        match message:
            case m.Hello():
                self._link.filter.on_joined(peer, self._link.source())
                self._peer_of[message.worker], self._name_of[peer] = peer, message.worker
                for lanes in self._lanes.values():
                    lanes.join(WorkerId(message.worker), message.lanes)
                if len(self._peer_of) == 2:
                    self.all_joined.set()
            case m.RendezvousKey(other, lane, key, value):
                self._link.send(self._peer_of[other], m.RendezvousKey(self._name_of[peer], lane, key, value))
            case m.Commit():
                self._offered = message
                self._link.send(peer, m.Committed(message.request, (), ""))
            case m.Pull():
                self._grant(peer, message)

    def _grant(self, peer: bytes, pull: m.Pull) -> None:
        commit = self._offered
        assert commit is not None
        # A lane for each transport, so that both stay open.
        turn = self._lanes[pull.stage].next_turn(WorkerId(PRODUCER), WorkerId(CONSUMER), pull.stage)
        slots, zeros = commit.slots, (0,) * len(commit.slots)
        incoming = (Incoming(turn, commit.parts),)
        flows = ("data",)
        self._link.send(
            peer,
            m.Grant(
                request=0,
                lease=0,
                slots=slots,
                flows=flows,
                groups=slots,
                members=zeros,
                prompts=slots,
                epochs=zeros,
                attempts=zeros,
                spans=(),
                inline=(),
                parts=commit.parts,
                incoming=incoming,
                closed=False,
            ),
        )
        self._link.send(self._peer_of[PRODUCER], m.SendSamples(turn, commit.parts))

    def free(self, slots: tuple[int, ...]) -> None:
        for peer in self._peer_of.values():
            self._link.send(peer, m.ReleaseTensors((), slots, ()))

    def close(self) -> None:
        self._link.close()
