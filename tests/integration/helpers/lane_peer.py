"""The remote end of lanes, in a separate process: runs the turns that it receives, and reports, as lines of JSON."""

import asyncio
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, TextIO

import torch

from flowrt.protocol.messages import ITEM_BYTES, LaneTurn
from flowrt.transport.devices import Device, npu_is_here, torch_npu
from flowrt.transport.lanes.channel import ColumnRun
from flowrt.transport.lanes.device import HcclTransport, NcclTransport
from flowrt.transport.lanes.gloo import GlooTransport
from flowrt.transport.lanes.lane import LaneSet, lane_name
from flowrt.transport.lanes.shared_memory import ShmTransport
from tests.integration.helpers.socket_lanes import SocketTransport


def npu_count() -> int:
    return int(torch_npu().npu.device_count()) if npu_is_here() else 0


def transports(device: int = 0) -> dict[str, Any]:
    if torch.cuda.device_count() > 1:
        torch.zeros(1, device=f"cuda:{device}")
        torch.cuda.set_device(device)
    if npu_count() > 1:
        Device("npu", device).use()
        torch.zeros(1, device=f"npu:{device}")
    here = {"gloo": GlooTransport("127.0.0.1"), "shm": ShmTransport(), "socket": SocketTransport()}
    return here | {"nccl": NcclTransport(), "hccl": HcclTransport()}


def message_of(seed: int, columns: list[tuple[str, list[int]]]) -> list[list[torch.Tensor]]:
    """The rows of a message: for each column its dtype and the lengths of its rows."""
    generator = torch.Generator().manual_seed(seed)
    message = []
    for dtype, lengths in columns:
        size = ITEM_BYTES[dtype]
        top = 2 if dtype == "bool" else 256
        flat = torch.randint(0, top, (sum(lengths) * size,), generator=generator, dtype=torch.uint8)
        rows = flat.split([length * size for length in lengths])
        # Each row in its own memory, so that gathering is tested.
        message.append([row.clone().view(getattr(torch, dtype)) for row in rows])
    return message


def runs_of(message: list[list[torch.Tensor]]) -> list[ColumnRun]:
    return [ColumnRun([row.nbytes for row in rows], rows) for rows in message]


def sizes_of(columns: list[tuple[str, list[int]]]) -> list[list[int]]:
    return [[length * ITEM_BYTES[dtype] for length in lengths] for dtype, lengths in columns]


def digest_of(flats: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for flat in flats:
        digest.update(flat.numpy().data)
    return digest.hexdigest()


def trickle(message: list[list[torch.Tensor]], pause_s: float) -> Iterator[torch.Tensor]:
    """All rows, one by one, with a pause after each."""
    for row in (row for rows in message for row in rows):
        yield row
        threading.Event().wait(pause_s)


async def _run(orders: TextIO, reports: TextIO, name: str, deadline_s: float, idle_s: float) -> None:
    loop = asyncio.get_running_loop()

    def report(**fields: Any) -> None:
        reports.write(json.dumps(fields) + "\n")
        reports.flush()

    def signal(peer: str, lane: str, key: str, value: bytes) -> None:
        report(signal=[peer, lane, key, value.hex()])

    lanes = LaneSet(worker=name, transports=transports(device=1), deadline_s=deadline_s, signal=signal, idle_s=idle_s)
    results: list[Any] = []

    def report_done(turn: LaneTurn, done: asyncio.Future[Any]) -> None:
        error = done.exception()
        what = "" if error is not None or done.result() is None else digest_of(done.result())
        results.append(None if error is not None else done.result())
        report(done=[lane_name(turn), turn.sequence], digest=what, error=None if error is None else str(error))

    report(ready=name)
    while line := await loop.run_in_executor(None, orders.readline):
        order = json.loads(line)
        if "signal" in order:
            peer, lane, key, value = order["signal"]
            lanes.deliver(peer, lane, key, bytes.fromhex(value))
        elif "forget" in order:
            results.clear()
        else:
            turn, columns = LaneTurn(*order["turn"]), order["columns"]
            if order["pause_s"]:
                each = lanes.send_each if turn.sender == name else lanes.receive_each
                done: asyncio.Future[Any] = each(turn, trickle(message_of(order["seed"], columns), order["pause_s"]))
            elif turn.sender == name:
                done = lanes.send(turn, runs_of(message_of(order["seed"], columns)))
            else:
                done = lanes.receive(turn, sizes_of(columns))
            report(issued=[lane_name(turn), turn.sequence])
            done.add_done_callback(partial(report_done, turn))
    await lanes.close()


def serve(connection: socket.socket, name: str, deadline_s: float, idle_s: float) -> None:
    """Run the turns that are ordered over a connection, until it is closed."""
    torch.set_num_threads(1)
    with connection.makefile("r") as orders, connection.makefile("w") as reports:
        asyncio.run(_run(orders, reports, name, deadline_s, idle_s))
