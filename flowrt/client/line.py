"""The line to the controller: a connection that says hello first, and hands over what comes after the welcome."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from flowrt.errors import EXIT_DISMISSED, FlowError, LocalProtocolError, Stopped, WaitExpired
from flowrt.waiting import CONTROLLER, until
from flowrt.wire import messages as m
from flowrt.wire.keys import WorkerKeys
from flowrt.wire.link import ClientLink


class Line:
    """One connection, from its hello to its end; a worker whose controller comes back takes a new one."""

    def __init__(self, address: str, hello: m.Hello, keys: WorkerKeys | None) -> None:
        self.address = address
        self.hello = hello
        self.keys = keys
        self._welcome: asyncio.Future[m.Welcome] = asyncio.get_running_loop().create_future()
        self._early: list[m.Message] = []
        self._failed: Callable[[FlowError], None] = self._turned_away
        self._broken: Callable[[], None] | None = None
        self._link = ClientLink(self._greeted, lambda error: self._failed(error), keys)
        self._closed = False
        with self._or_close():
            self._link.connect(address, self._lost)
            self._link.send(hello)

    async def greet(self, deadline_s: float) -> m.Welcome:
        """Wait to be let in.

        Raises WaitExpired when nobody answers by then, LocalProtocolError when refused, ConfigError for keys that do
        not fit, Stopped for a worker that comes back to a run that is over; the line is closed then.
        """
        with self._or_close():
            try:
                return await until(self._welcome, deadline_s, f"the welcome of {self.address}", CONTROLLER)
            except WaitExpired:
                raise WaitExpired(
                    f"{self.hello.worker} waited {deadline_s:.0f} s for a controller at {self.address} and nobody "
                    "answered; is it running, and is the address right?"
                ) from None

    def hand_over(
        self, receive: Callable[[m.Message], None], failed: Callable[[FlowError], None], broken: Callable[[], None]
    ) -> None:
        """From now on these are called: with each message, with what is wrong with one, and when the line is cut."""
        self._link.receive, self._failed, self._broken = receive, failed, broken
        for message in self._early:
            receive(message)
        self._early.clear()

    def send(self, message: m.Message) -> None:
        self._link.send(message)

    def watch(self, for_s: float) -> None:
        """Look for what comes, for so many seconds at most, without sleeping."""
        if not self._closed:
            self._link.watch(for_s)

    def close(self, linger_ms: int | None = None) -> None:
        """Drop the connection; what is still to be sent gets so many milliseconds (None: the usual ones)."""
        if not self._closed:
            self._closed = True
            self._link.close(linger_ms)

    @contextlib.contextmanager
    def _or_close(self) -> Iterator[None]:
        with contextlib.ExitStack() as unless_done:
            unless_done.callback(self.close, 0)
            yield
            unless_done.pop_all()

    def _greeted(self, message: m.Message) -> None:
        if self._welcome.done():
            self._early.append(message)
        elif isinstance(message, m.Welcome):
            self._welcome.set_result(message)
        elif isinstance(message, m.Stop) and self.hello.term:
            self._welcome.set_exception(Stopped(message.reason, message.code))
        elif isinstance(message, m.Refused) and message.request == m.FOR_GOOD:
            self._welcome.set_exception(Stopped(message.reason, EXIT_DISMISSED))
        elif isinstance(message, m.Refused | m.Stop):
            reason = f"controller {self.address} refused {self.hello.worker}: {message.reason}"
            self._welcome.set_exception(LocalProtocolError(reason))

    def _turned_away(self, error: FlowError) -> None:
        if not self._welcome.done():
            self._welcome.set_exception(error)

    def _lost(self) -> None:
        if self._broken is not None and not self._closed:
            self._broken()
