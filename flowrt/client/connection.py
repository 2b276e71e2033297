"""Connection of a worker to its controller: an asynchronous iterator of messages that reconnects by itself.

- Messages are returned in order of arrival: those of a lost connection first, then `ConnectionLost`, then, once a
  controller has accepted the worker again, `Reconnected` and the messages of the new connection.
- While there is no connection, `send` drops messages. `requests.resync_messages` has those to send after `Reconnected`.
- ZeroMQ's I/O threads show that the process is alive, however busy it is; heartbeats show that its event loop runs.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable

import msgspec

from flowrt.errors import (
    EXIT_DISMISSED,
    PROGRAMMING_ERRORS,
    ConfigError,
    FlowError,
    LocalProtocolError,
    Stopped,
    WaitExpired,
)
from flowrt.net.curve_keys import WorkerKeys
from flowrt.net.link import ClientLink
from flowrt.protocol import messages as m
from flowrt.runtime.clock import OwnAbsence
from flowrt.runtime.waits import CONTROLLER, pause, wait_until

log = logging.getLogger(__name__)
MAX_MISSED_HEARTBEATS = 30
"""The controller counts as gone if no message has arrived during this many heartbeat intervals in succession."""
CONNECT_ATTEMPT_S = 5.0
"""Limit of one attempt to reconnect: a controller may fail again before it sends its welcome."""
RETRY_S = 0.25
NAME_RETRY_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The connection was closed, or the controller does not answer heartbeats."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reconnected:
    """A controller has accepted this worker again; it has to be resynchronised before anything else is sent."""


Event = m.Message | ConnectionLost | Reconnected


class NameTaken(LocalProtocolError):
    """Another worker in the run has the name of this worker; it may leave, if this worker replaces it."""


class Connection:
    """Iterates over the messages of the controller and over changes of the connection.

    Example:
        connection = Connection("tcp://10.0.0.1:5555", hello, keys=None)
        welcome = await connection.open(deadline_s=60)
        async for event in connection:
            match event:
                case m.Grant(): ...
    """

    welcome: m.Welcome
    """The welcome of the present controller, once `open` has returned."""

    def __init__(self, address: str, hello: m.Hello, keys: WorkerKeys | None) -> None:
        """Make a connection that is not open yet.

        Args:
            address: ``tcp://HOST:PORT`` of the controller.
            hello: the request to join.
            keys: CURVE keys, for a controller that has them.
        """
        self.address = address
        self.is_away = True
        """Whether there is no connection at present."""
        self._hello = hello
        self._keys = keys
        self._loop = asyncio.get_running_loop()
        self._link: ClientLink | None = None
        self._inbox: deque[Event | Exception] = deque()
        self._handler: Callable[[m.Message], None] | None = None
        self._arrival: asyncio.Future[None] = self._loop.create_future()  # done once the inbox is not empty
        self._received = self._missed = 0  # messages received; heartbeat intervals without any in succession
        self._reconnects = True

    async def open(self, deadline_s: float) -> m.Welcome:
        """Connect, and return the controller's welcome.

        Raises:
            WaitExpired: no answer within ``deadline_s`` seconds, or another worker kept the name of this one.
            LocalProtocolError: the controller refused this worker.
            Stopped: the controller refused this worker for good.
            ConfigError: the address is malformed, or the keys do not match.
        """
        taken = ""

        async def join() -> m.Welcome:
            nonlocal taken
            while True:
                try:
                    return await self._handshake(self._hello, deadline_s)
                except NameTaken as refusal:
                    if not taken:
                        log.warning("%s; waiting up to %.0f s for it to leave", refusal, deadline_s)
                    taken = str(refusal)
                await pause(NAME_RETRY_S)

        try:
            self.welcome = await wait_until(join(), deadline_s, f"the welcome of {self.address}", CONTROLLER)
        except WaitExpired:
            if taken:
                raise WaitExpired(f"{taken}; the other one did not leave within {deadline_s:.0f} s") from None
            raise WaitExpired(
                f"{self._hello.worker} waited {deadline_s:.0f} s for a controller at {self.address} and got no "
                "answer; check that it is running and that the address is right"
            ) from None
        return self.welcome

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        """The next event.

        Raises:
            WaitExpired: the controller went away, and none accepted this worker within the run's reconnect timeout.
            Stopped: the run ended while this worker was not connected.
            RemoteProtocolError: the controller sent bytes that are not a message.
        """
        if self.is_away and not self._inbox:
            await self._reconnect()
            return Reconnected()
        event = await self._next()
        if isinstance(event, ConnectionLost) and not self._reconnects:
            raise StopAsyncIteration
        return event

    def handle_directly(self, handler: Callable[[m.Message], None]) -> None:
        """Call ``handler`` with each message as it arrives, which saves a switch between tasks for every answer.

        The iteration still returns the messages that have arrived before, those of a handshake, and all other events,
        so that the order of arrival is kept. The iteration raises the errors of ``handler``; one ends direct handling.
        """
        self._handler = handler

    def send(self, message: m.Message) -> None:
        """Send a message; dropped while there is no connection. Raises LocalProtocolError if it cannot be encoded."""
        if self._link is not None and not self.is_away:
            self._link.send(message)

    def spin_wait(self, for_s: float) -> None:
        """Poll for a message without sleeping, for at most ``for_s`` seconds. Returns at once if one has arrived."""
        if self._link is not None and not self.is_away and not self._inbox:
            self._link.spin_wait(for_s)

    async def heartbeat(self, message: m.Heartbeat) -> None:
        """Send this heartbeat, wait until the next one is due, and check that the controller still answers."""
        interval_s = self.welcome.heartbeat_s
        received, sent_s = self._received, self._loop.time()
        self.send(message)
        await pause(interval_s)
        # Intervals are counted, not time, and only those in which this process ran: otherwise messages may have arrived
        # that it has not read, and the controller may have been stopped with it.
        if self._received != received:
            self._missed = 0
        elif self._loop.time() - sent_s < 2 * interval_s:
            self._missed += 1
        if self._missed > MAX_MISSED_HEARTBEATS:
            self._lose()

    def stop_reconnecting(self) -> None:
        """From now on, end the iteration when the connection is lost."""
        self._reconnects = False

    def close(self) -> None:
        """Close the connection. Unsent messages are still sent, for at most the socket's linger time."""
        if self._link is not None and not self.is_away:
            self.is_away = True
            self._link.close()

    async def _handshake(self, hello: m.Hello, deadline_s: float) -> m.Welcome:
        """Connect, send the hello and wait for the welcome. Messages that follow it stay in the inbox."""
        self._inbox.clear()
        link = ClientLink(self._receive, self._put, self._keys)
        with contextlib.ExitStack() as on_error:
            on_error.callback(link.close, 0)
            link.connect(self.address, self._on_link_closed)
            link.send(hello)
            welcome = await wait_until(self._accepted(hello), deadline_s, f"the welcome of {self.address}", CONTROLLER)
            on_error.pop_all()
        self._link = link
        self._missed = 0
        self.is_away = False
        return welcome

    async def _accepted(self, hello: m.Hello) -> m.Welcome:
        """The first welcome in the inbox. Raises Stopped or LocalProtocolError for a refusal."""
        while True:
            match await self._next():
                case m.Welcome() as welcome:
                    return welcome
                case m.Stop(reason, code) if hello.term:
                    raise Stopped(reason, code)
                case m.Rejected(m.PERMANENT, reason):
                    raise Stopped(reason, EXIT_DISMISSED)
                case m.Rejected(m.NAME_TAKEN, reason):
                    raise NameTaken(f"controller {self.address} refused {hello.worker}: {reason}")
                case m.Rejected(reason=reason) | m.Stop(reason=reason):
                    raise LocalProtocolError(f"controller {self.address} refused {hello.worker}: {reason}")
                case _:
                    pass

    async def _reconnect(self) -> None:
        """Connect to a restarted controller at the same address, within the run's reconnect timeout."""
        before = self.welcome
        hello = msgspec.structs.replace(self._hello, term=before.term)
        log.warning("the controller %s is gone; waiting for it", self.address)
        end_s = self._loop.time() + before.reconnect_timeout_s
        absence = OwnAbsence(CONNECT_ATTEMPT_S)
        reason = "no answer"
        while True:
            end_s += absence.take(now := self._loop.time())
            if (left_s := end_s - now) <= 0:
                break
            try:
                self.welcome = await self._handshake(hello, min(left_s, CONNECT_ATTEMPT_S))
            except (LocalProtocolError, ConfigError) as refusal:
                # The controller may not have noticed yet that the old connection is closed, or another process may be
                # listening at its address for the moment, since the keys did match before.
                reason = str(refusal)
                await pause(RETRY_S)
            except WaitExpired:
                reason = "no answer"
            else:
                log.warning("the controller %s is back (term %d, was %d)", self.address, self.welcome.term, before.term)
                return
        raise WaitExpired(
            f"controller {self.address} went away and did not come back within {before.reconnect_timeout_s:.0f} s: "
            f"{reason}"
        )

    def _receive(self, message: m.Message) -> None:
        self._received += 1
        if self._handler is None or self._inbox or self.is_away:
            self._put(message)
            return
        try:
            self._handler(message)
        except (*PROGRAMMING_ERRORS, OSError, FlowError) as error:
            self._put(error)  # raised by the iteration

    def _put(self, event: Event | Exception) -> None:
        self._inbox.append(event)
        if not self._arrival.done():
            self._arrival.set_result(None)

    async def _next(self) -> Event:
        """The next event in the inbox. If that is an error, raises it."""
        # Not an asyncio.Queue: that takes twice as long, for every message.
        while not self._inbox:
            self._arrival = self._loop.create_future()
            await self._arrival
        event = self._inbox.popleft()
        if isinstance(event, Exception):
            self._handler = None
            raise event
        return event

    def _on_link_closed(self) -> None:
        """A TCP connection was closed. During the handshake ZeroMQ connects again by itself."""
        if not self.is_away:
            self._lose()

    def _lose(self) -> None:
        if self._link is not None and self._reconnects and not self.is_away:
            self.is_away = True
            self._link.close(0)
            self._put(ConnectionLost())
