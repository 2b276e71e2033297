"""A connection that only watches: receives the run's status, may end the run."""

import asyncio
import json
import os
import socket
from collections.abc import Callable
from typing import Any

from flowrt.errors import ConfigError, FlowError, WaitExpired
from flowrt.waiting import CONTROLLER, Lifesign, until
from flowrt.wire import messages as m
from flowrt.wire.keys import WorkerKeys
from flowrt.wire.link import ClientLink


class Observer:
    """Calls ``show`` with every status of the run, a dictionary as `Server.status` makes it."""

    def __init__(
        self, address: str, show: Callable[[dict[str, Any]], None], keys: WorkerKeys | None, silence_s: float
    ) -> None:
        self._show = show
        self.heard = Lifesign(silence_s)
        """Given with every status: a controller that says nothing for so long is stuck."""
        self.ended = ""
        """Why the run has ended, once it has."""
        self._link = ClientLink(self._receive, self._failed, keys)
        # A controller that came back does not know us.
        self._link.connect(address, lambda: self._link.send(_hello()))
        self._link.send(_hello())

    def cancel(self, reason: str, code: int) -> None:
        """End the run."""
        self._link.send(m.Stop(reason, code))

    def close(self) -> None:
        self._link.send(m.Bye(""))
        self._link.close(0 if self.ended else None)

    def _receive(self, message: m.Message) -> None:
        if isinstance(message, m.Status):
            self._link.send(m.Heartbeat())
            self.heard.give()
            status = json.loads(message.text)
            if status["ended"] is not None:
                self.ended = status["ended"][0]
            self._show(status)

    def _failed(self, error: FlowError) -> None:
        # Where the controller was that we know, somebody else listens: whoever starts the next one hears of that.
        if not isinstance(error, ConfigError):
            raise error


async def look(address: str, keys: WorkerKeys | None, deadline_s: float, where: str) -> dict[str, Any]:
    """The first status of a run. Raises WaitExpired when none comes in time, FlowError when there will be none."""
    found: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    def receive(message: m.Message) -> None:
        if found.done():
            return
        if isinstance(message, m.Status):
            found.set_result(json.loads(message.text))
        elif isinstance(message, m.Refused | m.Stop):
            found.set_exception(FlowError(f"the controller at {where} says: {message.reason}"))

    def failed(error: FlowError) -> None:
        if not found.done():
            found.set_exception(error)

    link = ClientLink(receive, failed, keys)
    try:
        link.connect(address)
        link.send(_hello())
        return await until(found, deadline_s, f"a word of the controller at {address}", CONTROLLER)
    except WaitExpired:
        raise WaitExpired(
            f"nothing answers at {where} within {deadline_s:.0f} s: its controller was killed, hangs, or is elsewhere; "
            "look at its log"
        ) from None
    finally:
        # Where nobody let us in there is nobody to say goodbye to, and no connection to say it over.
        if found.done() and not found.cancelled() and found.exception() is None:
            link.send(m.Bye(""))
        link.close()


def _hello() -> m.Hello:
    host = socket.gethostname()
    return m.Hello(m.PROTOCOL, f"observer-{host}-{os.getpid()}", "observer", host, os.getpid(), ())
