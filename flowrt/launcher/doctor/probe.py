"""The facts of a node that need torch, and the measurements between nodes.

With a controller its round trip is measured, and with several nodes the bandwidth of the lane from each of the others.
"""

import asyncio
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from flowrt.errors import FlowError, LocalProtocolError, WaitExpired
from flowrt.ids import OBSERVER
from flowrt.launcher.doctor.facts import ROUND_S, Accelerator, rounds
from flowrt.net.curve_keys import worker_keys
from flowrt.net.link import ClientLink
from flowrt.protocol import messages as m
from flowrt.protocol.messages import LaneTurn
from flowrt.runtime.event_loop import run_loop
from flowrt.runtime.waits import CONTROLLER, BoundedElsewhere, wait_until
from flowrt.transport.devices import cuda_is_here, npu_is_here, torch_npu
from flowrt.transport.lanes.channel import ColumnRun
from flowrt.transport.lanes.lane import LaneSet, available_transports, make_transports

MIB = 2**20
FEW_MIB, MANY_MIB = 1, 32
"""Sizes of test transfers: three of the smaller one end within a round even over a link of 0.5 MB/s."""
FAST_S = 0.05
"""A small transfer that took less is followed by a large one, so that the lane's latency does not count."""
TRANSFERS = 4
ROUND_TRIPS = 20
MEASUREMENTS = BoundedElsewhere("the deadline of all measurements")
PROBE, READY = "probe", "ready"
Facts = dict[str, Any]
Received = TypeVar("Received", bound=m.Message)


def devices() -> list[Accelerator]:
    """Name and memory of each accelerator."""
    if cuda_is_here():
        backend: Any = torch.cuda
    elif npu_is_here():
        backend = torch_npu().npu
    else:
        return []
    accelerators = []
    for index in range(backend.device_count()):
        free, _ = backend.mem_get_info(index)
        accelerators.append(Accelerator(name=backend.get_device_name(index), free_bytes=free))
    return accelerators


async def send_test(lanes: LaneSet, source: str, sink: str) -> None:
    """Send each test transfer when the receiver is ready for it."""
    data = torch.zeros(MANY_MIB * MIB, dtype=torch.uint8)
    for number in range(TRANSFERS):
        (size,) = await lanes.receive(_turn(sink, source, READY, number), [[1]])
        await lanes.send(_turn(source, sink, PROBE, number), [ColumnRun.of(data[: int(size) * MIB])])


async def receive_test(lanes: LaneSet, source: str, sink: str) -> float:
    """Receive test transfers of the sizes that it asks for; returns the bytes per second of the fastest."""
    fastest = 0.0
    size = FEW_MIB
    for number in range(TRANSFERS):
        arriving = lanes.receive(_turn(source, sink, PROBE, number), [[size * MIB]])
        start_s = time.monotonic()
        await lanes.send(_turn(sink, source, READY, number), [ColumnRun.of(torch.tensor([size], dtype=torch.uint8))])
        await arriving
        took_s = time.monotonic() - start_s
        fastest = max(fastest, size * MIB / took_s)
        size = MANY_MIB if took_s < FAST_S else FEW_MIB
    return fastest


def _turn(sender: str, receiver: str, kind: str, sequence: int) -> LaneTurn:
    return LaneTurn(sender=sender, receiver=receiver, kind=kind, incarnation=0, sequence=sequence, transport="gloo")


class Prober:
    """The probe of this node: an observer connection that sees the other probes join, and one for the lanes."""

    def __init__(self, node: str, controller: str, keys: str, nodes: int, deadline_s: float) -> None:
        self._nodes = nodes
        self._deadline_s = deadline_s
        self._address = controller
        self._name = f"{PROBE}-{node}-{os.getpid()}"
        self._keys = worker_keys(Path(keys), self._name) if keys else None
        self._awaited = f"the controller at {self._address}"
        self._inbox: asyncio.Queue[m.Message | FlowError] = asyncio.Queue()
        self._lanes = LaneSet(self._name, make_transports(self._address), ROUND_S, self._send_key)
        self._observer = self._connect(f"{self._name}-watching", OBSERVER, self._inbox.put_nowait)
        self._link: ClientLink | None = None

    async def run(self) -> Facts:
        """All measurements; errors are among the facts."""
        facts: Facts = {"probe": self._name, "bytes_per_s": {}, "round_trip_s": None, "peer_error": ""}
        facts["lane_errors"] = {}
        try:
            names = await wait_until(self._join(facts), self._deadline_s, "all probes", "the other probes")
        except WaitExpired:
            facts["peer_error"] = f"waited {self._deadline_s:.0f} s for {self._awaited}"
        except FlowError as error:
            facts["peer_error"] = str(error)
        else:
            await self._test_lanes(names, facts)
        return facts

    async def _join(self, facts: Facts) -> list[str]:
        """Measure the round trip and wait for all probes; returns their names, in the same order on every node."""
        await self._receive(m.Welcome)
        facts["round_trip_s"] = await self._round_trip_s()
        if self._nodes == 1:
            return []
        self._awaited = f"{self._nodes - 1} other nodes"
        return await self._all_probes()

    async def _test_lanes(self, names: list[str], facts: Facts) -> None:
        """Test the lanes to the other probes, one by one; the facts get an error for a pair that exceeds its round."""
        start_s = time.monotonic()
        for number, pairs in enumerate(rounds(len(names)), start=1):
            for pair in pairs:
                first, second = (names[index] for index in pair)
                if self._name not in (first, second):
                    continue
                peer = second if first == self._name else first
                # Rounds end at the same time on all nodes: a pair that fails delays no other.
                left_s = start_s + number * ROUND_S - time.monotonic()
                try:
                    await wait_until(self._test_lane(first, second, facts), left_s, "a lane test", peer)
                except WaitExpired:
                    facts["lane_errors"][peer] = f"no result with {peer} within {left_s:.0f} s"
                except FlowError as error:
                    facts["lane_errors"][peer] = str(error)

    async def close(self) -> None:
        """Leave the controller and close all lanes."""
        for link in (self._observer, self._link):
            if link is not None:
                link.send(m.Leave(""))
                link.close()
        await self._lanes.close()

    async def _round_trip_s(self) -> float:
        """Median time between a heartbeat and its answer, in seconds."""
        times_s = []
        for _ in range(ROUND_TRIPS):
            start_s = time.monotonic()
            self._observer.send(m.Heartbeat())
            await self._receive(m.Heartbeat)
            times_s.append(time.monotonic() - start_s)
        return statistics.median(times_s)

    async def _all_probes(self) -> list[str]:
        """Join as a probe and wait until all probes have joined; returns their names, sorted."""
        self._link = self._connect(self._name, PROBE, self._deliver)
        while True:
            status = await self._receive(m.Status)
            names = sorted(name for name, role in json.loads(status.text)["workers"].items() if role == PROBE)
            if len(names) >= self._nodes and self._name in names:
                return names

    async def _test_lane(self, first: str, second: str, facts: Facts) -> None:
        """Measure the lane from the first probe to the second, then the reverse one."""
        for source, sink in ((first, second), (second, first)):
            if self._name == source:
                await send_test(self._lanes, source, sink)
            else:
                facts["bytes_per_s"][source] = await receive_test(self._lanes, source, sink)

    async def _receive(self, kind: type[Received]) -> Received:
        """The next message of this type. Raises the connection's error, LocalProtocolError if the node is refused."""
        while True:
            message = await wait_until(self._inbox.get(), MEASUREMENTS, self._awaited, CONTROLLER)
            if isinstance(message, kind):
                return message
            if isinstance(message, FlowError):
                raise message
            if isinstance(message, m.Rejected | m.Stop):
                raise LocalProtocolError(f"the controller at {self._address} refused this node: {message.reason}")

    def _connect(self, name: str, role: str, receive: Callable[[m.Message], None]) -> ClientLink:
        link = ClientLink(receive, self._inbox.put_nowait, self._keys)
        link.connect(self._address)
        link.send(
            m.Hello(
                protocol=m.PROTOCOL,
                worker=name,
                role=role,
                host=socket.gethostname(),
                pid=os.getpid(),
                lanes=available_transports(),
            )
        )
        return link

    def _deliver(self, message: m.Message) -> None:
        if isinstance(message, m.RendezvousKey):
            self._lanes.deliver(message.peer, message.lane, message.key, message.value)

    def _send_key(self, peer: str, lane: str, key: str, value: bytes) -> None:
        assert self._link is not None
        self._link.send(m.RendezvousKey(peer, lane, key, value))


async def _opened(node: str, controller: str, keys: str, nodes: int, deadline_s: float) -> Facts:
    prober = Prober(node, controller, keys, nodes, deadline_s)
    try:
        return await prober.run()
    finally:
        await prober.close()


def measure(node: str, controller: str, keys: str, nodes: int, deadline_s: float) -> Facts:
    """The facts of this node that need torch: devices and transports, and what is measured with a controller.

    Args:
        node: name of this node.
        controller: address of the controller; empty: none.
        keys: directory of the keys for it; empty: it has none.
        nodes: number of nodes that measure lanes at a time.
        deadline_s: time limit for the controller and the other nodes to answer.
    """
    torch.set_num_threads(1)
    facts: Facts = {"lanes": [lane.partition(":")[0] for lane in available_transports()], "devices": devices()}
    if controller:
        try:
            facts |= run_loop(_opened(node, controller, keys, nodes, deadline_s))
        except FlowError as error:
            facts["peer_error"] = str(error)
    return facts
