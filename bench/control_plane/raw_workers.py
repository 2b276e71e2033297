"""Thousands of workers in one process, each a DEALER socket with one request outstanding. A child of a bench.

They send `Hello` and then pull one slot at a time. They use flowrt's codec and socket options but not its sessions,
because 4,096 sessions would take most of the time.
"""

import os
import select
import socket
import time
from heapq import heappop, heappush

import zmq
from common.children import raise_open_files, serve_commands

from flowrt.net.link import client_options
from flowrt.protocol import messages as m
from flowrt.protocol.codec import decode, encode

STAGE = "consume"
PULL = encode(m.Pull(request=1, stage=STAGE, slots=1, tokens=0, step=-1))
DEADLINE_S = 60.0
PORTION = 64
NOBLOCK, POLLIN = int(zmq.NOBLOCK), int(zmq.POLLIN)


class Workers:
    """All workers of this process, by the file descriptors of their sockets."""

    def __init__(self) -> None:
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 16384)
        self._epoll = select.epoll()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._ready: list[int] = []

    def join(self, address: str, first: int, count: int) -> int:
        """Connect ``count`` more workers, in portions that fit into the server's backlog.

        Returns the number of connected workers. Raises TimeoutError if one is not welcomed within DEADLINE_S.
        """
        end_s = time.monotonic() + DEADLINE_S
        for start in range(first, first + count, PORTION):
            numbers = range(start, min(start + PORTION, first + count))
            for number in numbers:
                self._connect(address, f"w{os.getpid()}-{number}")
            waiting = len(numbers)
            while waiting:
                if time.monotonic() > end_s:
                    raise TimeoutError(f"{waiting} workers were not greeted by {address}; is ulimit -n large enough?")
                waiting -= sum(self._receive(descriptor) is not None for descriptor in self._wait(1.0))
        return len(self._sockets)

    def _connect(self, address: str, name: str) -> None:
        dealer = self._context.socket(zmq.DEALER)
        for option, value in {zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.LINGER: 0, **client_options()}.items():
            dealer.setsockopt(option, value)
        dealer.connect(address)
        descriptor = int(dealer.getsockopt(zmq.FD))
        self._sockets[descriptor] = dealer
        self._epoll.register(descriptor, select.EPOLLIN)
        dealer.send(
            encode(
                m.Hello(
                    protocol=m.PROTOCOL, worker=name, role="bench", host=socket.gethostname(), pid=os.getpid(), lanes=()
                )
            )
        )
        self._check_readable(descriptor)

    def _wait(self, request_timeout_s: float) -> list[int]:
        """Sockets that may have something to read."""
        if self._ready:
            ready, self._ready = self._ready, []
            return ready
        return [descriptor for descriptor, _ in self._epoll.poll(max(request_timeout_s, 0.0))]

    def _receive(self, descriptor: int) -> m.Message | None:
        try:
            message = decode(zmq.backend.Socket.recv(self._sockets[descriptor], NOBLOCK))
        except zmq.Again:
            return None
        self._check_readable(descriptor)
        return message

    def _check_readable(self, descriptor: int) -> None:
        """Note a socket that is readable already: its descriptor is edge-triggered and does not wake the next poll."""
        if zmq.backend.zmq_poll([(self._sockets[descriptor], POLLIN)], 0):
            self._ready.append(descriptor)

    def sample(self) -> str:
        """The encoded answer to a pull of one slot, in hexadecimal. Raises TimeoutError if there is none."""
        descriptor, dealer = next(iter(self._sockets.items()))
        zmq.backend.Socket.send(dealer, PULL, NOBLOCK)
        if not dealer.poll(int(1000 * DEADLINE_S)):
            raise TimeoutError("a pull was never answered: was the queue filled?")
        grant = zmq.backend.Socket.recv(dealer, NOBLOCK)
        self._check_readable(descriptor)
        return grant.hex()

    def pull(self, at_s: float, warm_s: float, window_s: float, pause_s: float = 0.0) -> dict[str, object]:
        """From ``at_s`` on each worker pulls one slot and, ``pause_s`` after it is served, the next.

        Returns ``trips``, the seconds of each round trip that ended in the window after the warm-up, and ``served``,
        the number of all round trips. Raises TimeoutError if a pull is not answered.
        """
        clock, send = time.monotonic, zmq.backend.Socket.send
        begin_s, end_s, served = at_s + warm_s, at_s + warm_s + window_s, 0
        sent_s: dict[int, float] = {}
        trips: list[float] = []
        # The first pulls are spread over ``pause_s``; without a pause, all are sent at once.
        due = [
            (at_s + pause_s * place / len(self._sockets), descriptor) for place, descriptor in enumerate(self._sockets)
        ]
        while (now := clock()) < end_s or sent_s:
            if now > end_s + DEADLINE_S:
                raise TimeoutError(f"{len(sent_s)} workers were never answered: was the queue filled?")
            while due and due[0][0] <= now < end_s:
                descriptor = heappop(due)[1]
                sent_s[descriptor] = clock()
                send(self._sockets[descriptor], PULL, NOBLOCK)
                self._check_readable(descriptor)
            for descriptor in self._wait(min(due[0][0] - now, 0.1) if due else 0.1):
                grant = self._receive(descriptor)
                if grant is None or isinstance(grant, m.Heartbeat):
                    continue
                now = clock()
                if not isinstance(grant, m.Grant) or len(grant.slots) != 1:
                    raise ValueError(f"expected a grant of one slot, got {grant}")
                served += 1
                trip_s = now - sent_s.pop(descriptor)
                if begin_s <= now < end_s:
                    trips.append(trip_s)
                if pause_s:
                    heappush(due, (now + pause_s, descriptor))
                elif now < end_s:
                    sent_s[descriptor] = now
                    send(self._sockets[descriptor], PULL, NOBLOCK)
                    self._check_readable(descriptor)
        return {"trips": trips, "served": served}

    def part(self) -> int:
        """Disconnect all workers without a `Leave`; returns their number."""
        count = len(self._sockets)
        for descriptor, dealer in self._sockets.items():
            self._epoll.unregister(descriptor)
            dealer.close(0)
        self._sockets.clear()
        self._ready.clear()
        return count


if __name__ == "__main__":
    raise_open_files()
    workers = Workers()
    serve_commands({order: getattr(workers, order) for order in ("join", "sample", "pull", "part")}, os.getpid())
