"""Processes of a bench on one machine, each behind a rate-limited network link of its own.

The process of the bench moves to a new network namespace, in which it makes a bridge; every process that it forks moves
to another one, with a rate-limited veth pair between the two. The namespaces have no names and the processes end with
the bench, so the kernel removes everything, and other processes see nothing of it.
"""

import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, cast

from flowrt.runtime.event_loop import run_loop
from flowrt.runtime.parent_death import die_with_parent

log = logging.getLogger(__name__)
_CLONE_NEWNET = 0x40000000
_FORK = multiprocessing.get_context("fork")
BURST = "256kb"
QUEUE = "4mb"
Result = TypeVar("Result")
SHORT_PACKETS = "0xc000"
"""Bits that are not set in the length of a packet of less than 16,384 bytes."""
ANSWER_S = 120.0
LEAVE_S = 10.0
FORKED_S = 1800.0
Orders = Mapping[str, Callable[..., Any]]
"""The commands of a process: coroutine functions by name."""


class Unavailable(Exception):
    """This machine does not support such links; the message is the reason."""


def become_switch() -> None:
    """Move this process to a new network namespace with nothing but a bridge. Raises Unavailable."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is not installed (package iproute2)")
    _leave_network()
    try:
        _command("ip link add switch type bridge")
        _command("ip link set switch up")
        _command("ip link add probe type veth peer name borep")
        _limit("probe", 100)
        _command("ip link del probe")
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error


def limited_loopback(mbit_s: float) -> None:
    """Move this process to a network namespace with only a loopback of ``mbit_s`` Mbit/s. Raises Unavailable.

    Short packets do not queue behind the weights, as with the fair queues of hosts and switches.
    """
    if shutil.which("tc") is None:
        raise Unavailable("tc is not installed (package iproute2)")
    _leave_network()
    try:
        _command("tc qdisc add dev lo root handle 1: htb default 1")
        _command(f"tc class add dev lo parent 1: classid 1:1 htb rate {mbit_s}mbit burst {BURST}")
        _command("tc class add dev lo parent 1: classid 1:2 htb rate 10gbit")
        _command(f"tc filter add dev lo parent 1: protocol ip u32 match u16 0 {SHORT_PACKETS} at 2 flowid 1:2")
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error


def sent_bytes(number: int) -> int:
    """Bytes that a process has sent over its link, headers included. Raises ValueError for an unknown number."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == f"port{number}":
            return int(counters.split()[0])  # what the switch has received from it
    raise ValueError(f"no worker has number {number}")


def forked(measure: Callable[..., Result], *arguments: object) -> Result:
    """The result of a function in a forked process, which may change its network. Raises Unavailable, as it does."""
    receiver, sender = _FORK.Pipe(duplex=False)

    def run() -> None:
        try:
            sender.send((measure(*arguments), None))
        except Unavailable as error:
            sender.send((None, error))

    process = _FORK.Process(target=run)
    process.start()
    sender.close()  # so that the receiver reports the end of the child
    try:
        if not receiver.poll(FORKED_S):
            raise TimeoutError(f"process {process.pid} has not ended after {FORKED_S:.0f} s")
        result, error = receiver.recv()
    finally:
        process.kill()
        process.join()
    if error is not None:
        raise error
    return cast(Result, result)


class LinkedProcess:
    """A forked process that executes commands; with a number, behind a link of its own as 10.77.0.NUMBER.

    The link is limited to ``mbit_s`` Mbit/s in both directions; 0: not limited.
    """

    def __init__(self, make_orders: Callable[[], Orders], number: int = 0, mbit_s: float = 0.0) -> None:
        self.number = number
        self._pipe, end = _FORK.Pipe()
        self._process = _FORK.Process(target=_run_process, args=(make_orders, end, number > 0), daemon=True)
        self._process.start()
        end.close()
        self.answer()
        if number:
            port = f"port{number}"
            _command(f"ip link add {port} type veth peer name wire netns {self._process.pid}")
            _command(f"ip link set {port} master switch up")
            if mbit_s:
                _limit(port, mbit_s)
            self.ask("plug_in", address=f"10.77.0.{number}/24", mbit_s=mbit_s)

    def tell(self, order: str, **values: Any) -> None:
        """Send a command; `answer` returns its result, so that several processes can work at once."""
        self._pipe.send((order, values))

    def answer(self) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError(f"process {self._process.pid} did not answer within {ANSWER_S:.0f} s")
        return self._pipe.recv()

    def ask(self, order: str, **values: Any) -> Any:
        self.tell(order, **values)
        return self.answer()

    def leave(self) -> None:
        """Tell the process to end; kill it if it has not after LEAVE_S seconds."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(None)
        self._process.join(LEAVE_S)
        self._process.kill()
        self._process.join()


def _run_process(make_orders: Callable[[], Orders], pipe: Connection, isolated: bool) -> None:
    die_with_parent()
    if isolated:
        _leave_network()
    try:
        run_loop(_serve_commands({"plug_in": _plug_in, **make_orders()}, pipe))
    except Exception:
        log.exception("a process of the bench failed")
    os._exit(0)  # threads of lanes may wait for a peer that has left


async def _serve_commands(orders: Orders, pipe: Connection) -> None:
    pipe.send(None)
    while (message := await asyncio.to_thread(pipe.recv)) is not None:
        order, values = message
        pipe.send(await orders[order](**values))


async def _plug_in(address: str, mbit_s: float) -> None:
    _command(f"ip addr add {address} dev wire")
    _command("ip link set wire up")
    if mbit_s:
        _limit("wire", mbit_s)


def _leave_network() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise Unavailable(f"no network namespace: {os.strerror(ctypes.get_errno())}; it takes root")
    _command("ip link set lo up")


def _limit(device: str, mbit_s: float) -> None:
    _command(f"tc qdisc add dev {device} root tbf rate {mbit_s}mbit burst {BURST} limit {QUEUE}")


def _command(line: str) -> None:
    subprocess.run(line.split(), check=True, capture_output=True, text=True, timeout=10)
