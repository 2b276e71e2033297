"""The producer or consumer of `bench/tensors.py`: a process that puts or gets rows, a child of the bench.

    python bench/data_plane/ends.py ADDRESS NAME

It has a link, a tensor store and lanes, as a worker's session has. Its controller is that of `stub_controller.py`,
which answers each message but has no tables: only the tensor plane and the messages that it needs are measured.
"""

import asyncio
import sys
import time
from typing import Any

import torch
from common.children import serve_commands_on_loop

from flowrt.client.requests import SPIN_S
from flowrt.client.sample_tensors import SampleTransfers
from flowrt.errors import FlowError
from flowrt.net.link import ClientLink
from flowrt.protocol import messages as m
from flowrt.protocol.messages import Column, Part
from flowrt.runtime.event_loop import run_loop
from flowrt.transport.lanes.lane import LaneSet, make_transports
from flowrt.transport.tensor_store import Packed, TensorStore

COLUMN = "x"
LANE_S = 60.0


def payload_of(sizes: list[int], first: int) -> Packed:
    """Packed uint8 rows of these sizes; the first 8 bytes of each are its id (int64), from ``first`` on."""
    flat = torch.ones(sum(sizes), dtype=torch.uint8)
    starts = torch.tensor([0, *sizes[:-1]]).cumsum(0)
    ids = torch.arange(first, first + len(sizes)).view(torch.uint8).view(-1, 8)
    for byte in range(8):
        flat[starts + byte] = ids[:, byte]
    return Packed(flat, tuple(sizes))


def check(rows: Packed, first: int) -> None:
    """Raise ValueError unless the rows begin with the ids from ``first`` on."""
    starts = torch.tensor([0, *rows.lengths[:-1]]).cumsum(0)
    ids = torch.stack([rows.values[starts + byte] for byte in range(8)], 1).contiguous().view(torch.int64).flatten()
    if ids.tolist() != list(range(first, first + len(rows))):
        raise ValueError("the rows that came out are not those that were put")


class End:
    """A producer or a consumer."""

    def __init__(self, address: str, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._link = ClientLink(self._receive, self._failed)
        self._link.connect(address)
        self.store = TensorStore([Column(COLUMN, "uint8", "slot")])

        def signal(peer: str, lane: str, key: str, value: bytes) -> None:
            self._link.send(m.RendezvousKey(peer, lane, key, value))

        self._lanes = LaneSet(name, make_transports(address), LANE_S, signal)
        self._arrivals = SampleTransfers(self.store, self._lanes, lambda *_: None)
        self._answer: asyncio.Future[Any] = self._loop.create_future()
        self._payload = Packed(torch.empty(0, dtype=torch.uint8), ())
        self._link.send(m.Hello(protocol=m.PROTOCOL, worker=name, role=name, host="here", pid=0, lanes=("shm", "gloo")))

    def _receive(self, message: m.Message) -> None:
        match message:
            case m.Grant():
                for incoming in message.incoming:
                    self._arrivals.receive(incoming)
                self._answer.set_result(message)
            case m.Committed():
                self._answer.set_result(message)
            case m.SendSamples():
                self._arrivals.send(message)
            case m.ReleaseTensors(columns, slots, groups):
                self.store.free(columns, slots, groups)
            case m.RendezvousKey(peer, lane, key, value):
                self._lanes.deliver(peer, lane, key, value)

    def _failed(self, error: FlowError) -> None:
        raise error

    async def _ask(self, message: m.Message) -> Any:
        self._answer = self._loop.create_future()
        self._link.send(message)
        self._loop.call_soon(self._link.spin_wait, SPIN_S)  # as a worker with one request outstanding does
        return await self._answer

    async def make(self, sizes: list[int], first: int) -> None:
        self._payload = payload_of(sizes, first)

    async def drop(self) -> None:
        self._payload = Packed(torch.empty(0, dtype=torch.uint8), ())

    async def put(self, first: int) -> float:
        """Store the rows and commit their ids and lengths, as `Session.commit` does; returns the seconds."""
        rows = self._payload
        begin_s = time.perf_counter()
        ids = tuple(range(first, first + len(rows)))
        self.store.put_rows(COLUMN, ids, rows)
        part = Part(COLUMN, ids, tuple(rows.lengths))
        await self._ask(
            m.Commit(request=0, stage="make", slots=ids, leases=(0,) * len(ids), parts=(part,), inline=(), spans=())
        )
        return time.perf_counter() - begin_s

    async def get(self, transport: str, first: int, verify: bool) -> float:
        """Pull a grant and wait for the tensors that it announces, as `Session.pull` does; returns the seconds."""
        begin_s = time.perf_counter()
        grant = await self._ask(m.Pull(request=0, stage=transport, slots=1, tokens=0, step=-1))
        await self.store.wait_for(grant.parts)
        rows = self.store.rows(COLUMN, grant.slots)
        taken_s = time.perf_counter() - begin_s
        if verify:
            assert isinstance(rows, Packed)
            check(rows, first)
        return taken_s


async def main(address: str, name: str) -> None:
    end = End(address, name)
    await serve_commands_on_loop({order: getattr(end, order) for order in ("make", "drop", "put", "get")})
    await end._lanes.close()
    end._link.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_loop(main(*sys.argv[1:]))
