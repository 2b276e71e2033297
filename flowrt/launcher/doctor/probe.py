"""Probe of one node: the facts that need torch, and the measurements between nodes.

``python -m flowrt.launcher.doctor.probe`` prints one line of JSON: devices and transports; with ``--controller`` the
round trip to that controller; with ``--peers N`` delay and bandwidth of the lane from each of the other probes.
"""

import argparse
import asyncio
import itertools
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from flowrt.errors import EXIT_OK, FlowError, LocalProtocolError, WaitExpired
from flowrt.ids import OBSERVER
from flowrt.launcher.doctor.facts import ROUND_S, Accelerator, rounds
from flowrt.net.curve_keys import worker_keys
from flowrt.net.link import ClientLink
from flowrt.protocol import messages as m
from flowrt.protocol.messages import LaneTurn
from flowrt.runtime.bounds import seconds
from flowrt.runtime.event_loop import run_loop
from flowrt.runtime.waits import CONTROLLER, BoundedElsewhere, wait_until
from flowrt.transport.devices import cuda_is_here, npu_is_here, torch_npu
from flowrt.transport.lanes.channel import ColumnRun
from flowrt.transport.lanes.lane import LaneSet, available_transports, make_transports

FIRST_BYTES = 2**18
MAX_BYTES = 2**25
GROWTH = 8
LARGEST_TRANSFERS = 3
SLOW_TRANSFER_S = 1.0
"""A transfer that took longer is the last one: over a slow link, a larger one would not end within the round."""
ROUND_TRIPS = 20
MEASUREMENTS = BoundedElsewhere("the deadline of all measurements")
PROBE = "probe"
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
    found = []
    for index in range(backend.device_count()):
        free, total = backend.mem_get_info(index)
        found.append(Accelerator(name=backend.get_device_name(index), free_bytes=free, total_bytes=total))
    return found


def next_size(transfers: Sequence[tuple[int, float]]) -> int:
    """Size of the next transfer in bytes, after these (bytes, seconds); 0 to end the measurement."""
    if not transfers:
        return FIRST_BYTES
    size, took_s = transfers[-1]
    largest = [one for one, _ in transfers if one == MAX_BYTES]
    if took_s > SLOW_TRANSFER_S or len(largest) == LARGEST_TRANSFERS:
        return 0
    return min(size * GROWTH, MAX_BYTES)


def bandwidth(transfers: Sequence[tuple[int, float]]) -> float:
    """Bytes per second of the fastest of the largest transfers (bytes, seconds); small ones measure latency."""
    largest = transfers[-1][0]
    return largest / min(took_s for size, took_s in transfers if size == largest)


class LaneTest:
    """Measures the lanes between two probes, one direction at a time; the receiver orders each transfer."""

    def __init__(self, own: str, peer: str, lanes: LaneSet) -> None:
        self._own = own
        self._peer = peer
        self._lanes = lanes

    async def send(self) -> None:
        """Send this host's time when the receiver is ready, then data of each size that it orders; 0 ends the test."""
        await self._put("probe", 0, torch.zeros(8, dtype=torch.uint8))
        await self._get("ready", 0, 8)
        await self._put("probe", 1, torch.tensor([time.time()], dtype=torch.float64))
        data = torch.zeros(MAX_BYTES, dtype=torch.uint8)
        for number in itertools.count(1):
            (order,) = await self._get("ready", number, 8)
            size = int(order.view(torch.int64).item())
            if not 0 < size <= MAX_BYTES:
                return
            await self._put("probe", 1 + number, data[:size])

    async def receive(self) -> tuple[float, float]:
        """Order transfers of growing size.

        Returns:
            The delay of a message in seconds, including the difference of the two clocks, and the bandwidth in bytes
            per second.
        """
        await self._get("probe", 0, 8)
        arriving = self._get("probe", 1, 8)
        await self._put("ready", 0, torch.zeros(8, dtype=torch.uint8))
        (sent,) = await arriving
        delay_s = time.time() - float(sent.view(torch.float64).item())
        transfers: list[tuple[int, float]] = []
        for number in itertools.count(1):
            size = next_size(transfers)
            order = torch.tensor([size], dtype=torch.int64)
            if size == 0:
                await self._put("ready", number, order)
                break
            arriving = self._get("probe", 1 + number, size)
            start_s = time.monotonic()
            await self._put("ready", number, order)
            await arriving
            transfers.append((size, time.monotonic() - start_s))
        return delay_s, bandwidth(transfers)

    async def _put(self, kind: str, sequence: int, tensor: torch.Tensor) -> None:
        turn = LaneTurn(
            sender=self._own, receiver=self._peer, kind=kind, incarnation=0, sequence=sequence, transport="gloo"
        )
        await self._lanes.send(turn, [ColumnRun.of(tensor)])

    def _get(self, kind: str, sequence: int, size: int) -> "asyncio.Future[list[torch.Tensor]]":
        """Start to receive; has to be called before the other side sends."""
        turn = LaneTurn(
            sender=self._peer, receiver=self._own, kind=kind, incarnation=0, sequence=sequence, transport="gloo"
        )
        return self._lanes.receive(turn, [[size]])


class Prober:
    """The probe of this node: an observer connection that sees the other probes join, and one for the lanes."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._peers: int = arguments.peers
        self._deadline_s: float = arguments.deadline_s
        self._address: str = arguments.controller
        self._name = f"{PROBE}-{arguments.node}-{os.getpid()}"
        self._keys = worker_keys(Path(arguments.keys), self._name) if arguments.keys else None
        self._awaited = f"the controller at {self._address}"
        self._inbox: asyncio.Queue[m.Message | FlowError] = asyncio.Queue()
        self._lanes = LaneSet(self._name, make_transports(self._address), ROUND_S, self._send_key)
        self._observer = self._connect(f"{self._name}-watching", OBSERVER, self._inbox.put_nowait)
        self._link: ClientLink | None = None

    async def run(self) -> Facts:
        """All measurements; errors are among the facts."""
        facts: Facts = {"probe": self._name, "delay_s": {}, "bytes_per_s": {}, "round_trip_s": None, "peer_error": ""}
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
        if self._peers == 1:
            return []
        self._awaited = f"{self._peers - 1} other nodes"
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
            if len(names) >= self._peers and self._name in names:
                return names

    async def _test_lane(self, first: str, second: str, facts: Facts) -> None:
        """Measure the lane from the first probe to the second, then the reverse one."""
        peer = second if first == self._name else first
        test = LaneTest(self._name, peer, self._lanes)
        if self._name == first:
            await test.send()
        facts["delay_s"][peer], facts["bytes_per_s"][peer] = await test.receive()
        if self._name == second:
            await test.send()

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


async def measure(arguments: argparse.Namespace) -> Facts:
    """The facts that need a controller."""
    prober = Prober(arguments)
    try:
        return await prober.run()
    finally:
        await prober.close()


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description="print facts about this node that need torch, as JSON")
    parser.add_argument("--node", default=socket.gethostname())
    parser.add_argument("--controller", default="", help="tcp://HOST:PORT")
    parser.add_argument("--keys", default="", help="directory of keys")
    parser.add_argument("--peers", type=int, default=1, help="number of probes, this one included")
    parser.add_argument(
        "--deadline-s", type=seconds, default=60.0, help="time limit for the controller and the other probes to answer"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    facts: Facts = {"lanes": [lane.partition(":")[0] for lane in available_transports()], "devices": devices()}
    if arguments.controller:
        try:
            facts |= run_loop(measure(arguments))
        except FlowError as error:
            facts["peer_error"] = str(error)
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()
    os._exit(EXIT_OK)  # a lane's thread may be inside gloo, which cannot be interrupted


if __name__ == "__main__":
    main()
