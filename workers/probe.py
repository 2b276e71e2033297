"""What `flowrt doctor` asks torch on one node: does it work, which devices and lanes, and how fast are they?

``python -m flowrt.workers.probe`` prints one line of JSON. With ``--controller`` it also measures the round trip to it,
and with ``--peers N`` a lane in each direction to every other of N probes: bytes per second, and how long a message
took by the two hosts' own clocks, which differ by half the difference of both directions.
"""

import argparse
import asyncio
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from flowrt.workers.rounds import ROUND_S, rounds

from flowrt.errors import EXIT_OK, FlowError, LocalProtocolError, WaitExpired
from flowrt.transport.devices import cuda_is_here, npu_is_here, torch_npu
from flowrt.transport.lane import LaneSet
from flowrt.transport.pieces import Run
from flowrt.transport.transports import abilities, transports
from flowrt.waiting import CONTROLLER, Guard, until
from flowrt.wire import messages as m
from flowrt.wire.keys import worker_keys
from flowrt.wire.link import ClientLink
from flowrt.wire.loops import run_loop
from flowrt.wire.records import LaneTurn

FIRST_BYTES, MOST_BYTES = 2**18, 2**25
GROWTH = 8
MOST_BULKS = 3
LONG_S = 1.0
"""A bulk that took longer says enough of the lane: over a slow link the largest would take the time of all others."""
ROUND_TRIPS = 20
MEASURED = Guard("the deadline of all measurements")
PROBE = "probe"
Facts = dict[str, Any]
Heard = TypeVar("Heard", bound=m.Message)


def devices() -> list[dict[str, Any]]:
    """Name and memory of each accelerator."""
    found: list[dict[str, Any]] = []
    if cuda_is_here():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            found.append({"name": torch.cuda.get_device_name(index), "free_bytes": free, "total_bytes": total})
    elif npu_is_here():
        npu = torch_npu().npu
        for index in range(npu.device_count()):
            free, total = npu.mem_get_info(index)
            found.append({"name": npu.get_device_name(index), "free_bytes": free, "total_bytes": total})
    return found


def following(taken: Sequence[tuple[int, float]]) -> int:
    """The bytes to ask for after bulks of so many bytes and seconds; 0 when they say enough."""
    if not taken:
        return FIRST_BYTES
    size, took_s = taken[-1]
    if took_s > LONG_S or len([one for one, _ in taken if one == MOST_BYTES]) == MOST_BULKS:
        return 0
    return min(size * GROWTH, MOST_BYTES)


def speed(taken: Sequence[tuple[int, float]]) -> float:
    """Bytes per second of the fastest of the largest bulks: small ones say how long the way is, and fill buffers."""
    largest = taken[-1][0]
    return largest / min(took_s for size, took_s in taken if size == largest)


class Meeting:
    """Two probes and the lanes between them."""

    def __init__(self, own: str, peer: str, lanes: LaneSet) -> None:
        self._own, self._peer, self._lanes = own, peer, lanes

    async def give(self) -> None:
        """Greet; once the other end is ready, send the time, then as many bytes as it asks for, until it has enough."""
        await self._lanes.send(self._out("probe", 0), [Run.of(torch.zeros(8, dtype=torch.uint8))])
        await self._lanes.receive(self._in("ready", 0), [[8]])
        await self._lanes.send(self._out("probe", 1), [Run.of(torch.tensor([time.time()], dtype=torch.float64))])
        bulk = torch.zeros(MOST_BYTES, dtype=torch.uint8)
        for number in itertools.count(1):
            (wanted,) = await self._lanes.receive(self._in("ready", number), [[8]])
            size = int(wanted.view(torch.int64).item())
            if not 0 < size <= MOST_BYTES:
                return
            await self._lanes.send(self._out("probe", 1 + number), [Run.of(bulk[:size])])

    async def take(self) -> tuple[float, float]:
        """The other side: the seconds that the time took to come, by both clocks, and the best bytes per second."""
        await self._lanes.receive(self._in("probe", 0), [[8]])
        coming = self._lanes.receive(self._in("probe", 1), [[8]])
        await self._lanes.send(self._out("ready", 0), [Run.of(torch.zeros(8, dtype=torch.uint8))])
        (sent,) = await coming
        delay_s = time.time() - float(sent.view(torch.float64).item())
        taken: list[tuple[int, float]] = []
        for number in itertools.count(1):
            size = following(taken)
            asked = [Run.of(torch.tensor([size], dtype=torch.int64))]
            if size == 0:
                await self._lanes.send(self._out("ready", number), asked)
                break
            coming = self._lanes.receive(self._in("probe", 1 + number), [[size]])
            begun_s = time.monotonic()
            await self._lanes.send(self._out("ready", number), asked)
            await coming
            taken.append((size, time.monotonic() - begun_s))
        return delay_s, speed(taken)

    def _out(self, kind: str, sequence: int) -> LaneTurn:
        return LaneTurn(self._own, self._peer, kind, 0, sequence, "gloo")

    def _in(self, kind: str, sequence: int) -> LaneTurn:
        return LaneTurn(self._peer, self._own, kind, 0, sequence, "gloo")


class Prober:
    """This node's side of the measurements: one connection to watch the others come, one for the lanes."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._peers: int = arguments.peers
        self._deadline_s: float = arguments.deadline_s
        self._address: str = arguments.controller
        self._name = f"{PROBE}-{arguments.node}-{os.getpid()}"
        self._keys = worker_keys(Path(arguments.keys), self._name) if arguments.keys else None
        self._awaited = f"the controller at {self._address}"
        self._heard: asyncio.Queue[m.Message | FlowError] = asyncio.Queue()
        self._lanes = LaneSet(self._name, transports(self._address), ROUND_S, self._signal)
        self._watching = self._connect(f"{self._name}-watching", "observer", self._heard.put_nowait)
        self._link: ClientLink | None = None

    async def run(self) -> Facts:
        """Everything there is to measure; what went wrong is one of the facts."""
        facts: Facts = {"probe": self._name, "delay_s": {}, "bytes_per_s": {}, "round_trip_s": None, "peer_error": ""}
        facts["lane_errors"] = {}
        try:
            names = await until(self._gather(facts), self._deadline_s, "all others", "the others")
        except WaitExpired:
            facts["peer_error"] = f"waited {self._deadline_s:.0f} s for {self._awaited}"
        except FlowError as error:
            facts["peer_error"] = str(error)
        else:
            await self._meet_all(names, facts)
        return facts

    async def _gather(self, facts: Facts) -> list[str]:
        """The names of all who are to meet, in one order for all, once they are there."""
        await self._hear(m.Welcome)
        facts["round_trip_s"] = await self._round_trip_s()
        if self._peers == 1:
            return []
        self._awaited = f"{self._peers - 1} other nodes"
        return await self._all_there()

    async def _meet_all(self, names: list[str], facts: Facts) -> None:
        """Meet one after the other; a pair that takes longer than a round is given up, and holds nobody else up."""
        begun_s = time.monotonic()
        for number, pairs in enumerate(rounds(len(names)), start=1):
            for pair in pairs:
                first, second = (names[index] for index in pair)
                if self._name not in (first, second):
                    continue
                peer = second if first == self._name else first
                # By the clock of all: who was held up by another still comes in time for the next.
                left_s = begun_s + number * ROUND_S - time.monotonic()
                try:
                    await until(self._meet(first, second, facts), left_s, "its turn", peer)
                except WaitExpired:
                    facts["lane_errors"][peer] = f"gave up {peer} after {left_s:.0f} s"
                except FlowError as error:
                    facts["lane_errors"][peer] = str(error)

    async def close(self) -> None:
        for link in (self._watching, self._link):
            if link is not None:
                link.send(m.Bye(""))
                link.close()
        await self._lanes.close()

    async def _round_trip_s(self) -> float:
        """Median of a heartbeat and its answer."""
        taken = []
        for _ in range(ROUND_TRIPS):
            begun_s = time.monotonic()
            self._watching.send(m.Heartbeat())
            await self._hear(m.Heartbeat)
            taken.append(time.monotonic() - begun_s)
        return sorted(taken)[ROUND_TRIPS // 2]

    async def _all_there(self) -> list[str]:
        """Join, and wait until as many probes as were announced have joined."""
        self._link = self._connect(self._name, PROBE, self._deliver)
        while True:
            status = await self._hear(m.Status)
            names = sorted(name for name, role in json.loads(status.text)["workers"].items() if role == PROBE)
            if len(names) >= self._peers and self._name in names:
                return names

    async def _meet(self, first: str, second: str, facts: Facts) -> None:
        """Both directions, one after the other: the first gives first."""
        peer = second if first == self._name else first
        meeting = Meeting(self._name, peer, self._lanes)
        if self._name == first:
            await meeting.give()
        facts["delay_s"][peer], facts["bytes_per_s"][peer] = await meeting.take()
        if self._name == second:
            await meeting.give()

    async def _hear(self, kind: type[Heard]) -> Heard:
        """The next message of that kind; raises what the connection failed with."""
        while True:
            message = await until(self._heard.get(), MEASURED, self._awaited, CONTROLLER)
            if isinstance(message, kind):
                return message
            if isinstance(message, FlowError):
                raise message
            if isinstance(message, m.Refused | m.Stop):
                raise LocalProtocolError(f"the controller at {self._address} refused this node: {message.reason}")

    def _connect(self, name: str, role: str, receive: Callable[[m.Message], None]) -> ClientLink:
        link = ClientLink(receive, self._heard.put_nowait, self._keys)
        link.connect(self._address)
        link.send(m.Hello(m.PROTOCOL, name, role, socket.gethostname(), os.getpid(), abilities()))
        return link

    def _deliver(self, message: m.Message) -> None:
        if isinstance(message, m.Signal):
            self._lanes.deliver(message.peer, message.lane, message.key, message.value)

    def _signal(self, peer: str, lane: str, key: str, value: bytes) -> None:
        assert self._link is not None
        self._link.send(m.Signal(peer, lane, key, value))


async def measure(arguments: argparse.Namespace) -> Facts:
    prober = Prober(arguments)
    try:
        return await prober.run()
    finally:
        await prober.close()


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description="facts about this node that only torch knows, as JSON")
    parser.add_argument("--node", default=socket.gethostname())
    parser.add_argument("--controller", default="", help="tcp://HOST:PORT")
    parser.add_argument("--keys", default="", help="directory of keys")
    parser.add_argument("--peers", type=int, default=1, help="how many probes there are, this one included")
    parser.add_argument("--deadline-s", type=float, default=60.0, help="for the controller and the others to come")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    facts: Facts = {"lanes": [lane.partition(":")[0] for lane in abilities()], "devices": devices()}
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
