"""Two ends of lanes for tests: one in this process, one in another, and a relay for their rendezvous keys."""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import threading
from collections import defaultdict
from collections.abc import Awaitable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from flowrt.errors import TransferError
from flowrt.protocol.messages import LaneTurn
from flowrt.runtime.process_sessions import SHARED
from flowrt.transport.lanes.lane import LaneSet, lane_name
from tests.integration.helpers import lane_peer
from tests.integration.helpers.forked import CONTEXT

HERE, THERE = "here", "there"
WITHIN_S = 60.0
NOT_HERE = {}
if torch.cuda.device_count() < 2:
    NOT_HERE["nccl"] = "nccl needs two CUDA devices"
if lane_peer.npu_count() < 2:
    NOT_HERE["hccl"] = "hccl needs two NPUs; it has never run on one"


class Pair:
    """``deadline_s`` is that of both ends; the end in this process is shared with the pair ``shares_with``."""

    def __init__(
        self,
        transport: str,
        deadline_s: float,
        ends: dict[str, Any],
        idle_s: float,
        name: str = THERE,
        shares_with: "Pair | None" = None,
    ) -> None:
        self.transport, self.name = transport, name
        self.deadline_s, self.idle_s = deadline_s, idle_s
        self._pairs: dict[str, Pair] = {} if shares_with is None else shares_with._pairs
        self._pairs[name] = self
        self.lanes: LaneSet = (
            LaneSet(worker=HERE, transports=ends, deadline_s=deadline_s, signal=self._signal, idle_s=idle_s)
            if shares_with is None
            else shares_with.lanes
        )
        self._reports: dict[tuple[str, int], asyncio.Future[dict[str, Any]]] = {}
        self._issued: dict[tuple[str, int], asyncio.Event] = defaultdict(asyncio.Event)
        self._process: ForkServerProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self.named_memory: set[Path] = set()
        """Named shared memory that this process or the peer had mapped before a signal to the peer, or at the end."""

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = (theirs, self.name, self.deadline_s, self.idle_s)
            self._process = CONTEXT.Process(target=lane_peer.serve, args=arguments, daemon=True)
            self._process.start()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        async with asyncio.timeout(60):
            assert json.loads(await reader.readline()) == {"ready": self.name}
        self._listener = asyncio.create_task(self._listen(reader))

    def turn(self, sending: bool, sequence: int = 0, incarnation: int = 0, kind: str = "samples") -> LaneTurn:
        ends = (HERE, self.name) if sending else (self.name, HERE)
        return LaneTurn(*ends, kind, incarnation, sequence, self.transport)

    def order(
        self, turn: LaneTurn, columns: Any, seed: int = 0, pause_s: float = 0.0
    ) -> asyncio.Future[dict[str, Any]]:
        """Let the peer run its side of this turn, row by row with pauses if given. The future holds its report."""
        report = asyncio.get_running_loop().create_future()
        self._reports[lane_name(turn), turn.sequence] = report
        fields = [turn.sender, turn.receiver, turn.kind, turn.incarnation, turn.sequence, turn.transport]
        self._send(turn=fields, columns=columns, seed=seed, pause_s=pause_s)
        return report

    async def issued(self, turn: LaneTurn) -> None:
        """Wait until the peer has begun its side of this turn."""
        async with asyncio.timeout(WITHIN_S):
            await self._issued[lane_name(turn), turn.sequence].wait()

    def forget(self) -> None:
        """Let the peer drop all tensors that it has received."""
        self._send(forget=True)

    def kill(self, number: signal.Signals) -> None:
        assert self._process is not None
        assert self._process.pid is not None
        self.named_memory |= named_memory(os.getpid()) | named_memory(self._process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def worked_s(self) -> float:
        """CPU time of the peer so far, in seconds."""
        assert self._process is not None
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    async def close(self) -> None:
        assert self._process is not None
        assert self._process.pid is not None
        self.named_memory |= named_memory(os.getpid()) | named_memory(self._process.pid)
        await self.lanes.close()
        assert self._writer is not None
        if self._process.is_alive():
            self.kill(signal.SIGCONT)
        self._writer.close()
        await asyncio.to_thread(self._process.join, 60)
        has_ended = self._process.exitcode is not None
        if not has_ended:
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        if self._listener is not None:
            await self._listener
        self._process.close()
        assert has_ended, f"{self.name} did not end"

    def _send(self, **fields: Any) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(fields).encode() + b"\n")

    def _signal(self, peer: str, lane: str, key: str, value: bytes) -> None:
        self._pairs[peer]._send(signal=[HERE, lane, key, value.hex()])

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await _line(reader):
            message = json.loads(line)
            if "signal" in message:
                _, lane, key, value = message["signal"]
                self.lanes.deliver(self.name, lane, key, bytes.fromhex(value))
            elif "issued" in message:
                self._issued[tuple(message["issued"])].set()
            else:
                report = self._reports.pop(tuple(message["done"]))
                if not report.done():
                    report.set_result(message)


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line of a peer; empty if it has ended."""
    try:
        line = await reader.readline()
    except ConnectionError:  # also at the end of a peer that was killed while it was sent something
        return b""
    return line if line.endswith(b"\n") else b""


def lane_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("lane ")]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped() -> int:
    """Number of segments mapped into this process."""
    return Path("/proc/self/maps").read_text().count("memfd:flowrt-lane")


def named_memory(process: int) -> set[Path]:
    """The named shared memory that a process has mapped; none if it has ended."""
    try:
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {Path(line.split(maxsplit=5)[5]) for line in lines if f"{SHARED}/" in line}


def flat_bytes(message: list[list[torch.Tensor]]) -> list[bytes]:
    return [b"".join(row.view(torch.uint8).numpy().tobytes() for row in rows) for rows in message]


async def moved(pair: Pair, sending: bool, columns: Any, seed: int = 0, **which: Any) -> list[torch.Tensor]:
    """Move one message and check every byte at its receiver. Returns it if this process is the receiver."""
    turn, message = pair.turn(sending, **which), lane_peer.message_of(seed, columns)
    report = pair.order(turn, columns, seed)
    async with asyncio.timeout(WITHIN_S):
        if sending:
            await pair.lanes.send(turn, lane_peer.runs_of(message))
            digest = hashlib.sha256(b"".join(flat_bytes(message))).hexdigest()
            assert (await report)["digest"] == digest
            return []
        received = await pair.lanes.receive(turn, lane_peer.sizes_of(columns))
        assert (await report)["error"] is None
    assert [flat.numpy().tobytes() for flat in received] == flat_bytes(message)
    return received


async def failed(work: Awaitable[Any], match: str = "lane ") -> None:
    """Assert that the work fails, with the name of a lane by default."""
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(TransferError, match=match):
            await work


def take(pair: Pair, sending: bool, columns: Any, **which: Any) -> "asyncio.Future[Any]":
    """Run this process's side of a turn."""
    turn = pair.turn(sending, **which)
    if sending:
        return pair.lanes.send(turn, lane_peer.runs_of(lane_peer.message_of(0, columns)))
    return pair.lanes.receive(turn, lane_peer.sizes_of(columns))
