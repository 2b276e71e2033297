"""A connection that only watches: receives the run's status, may end the run."""

import json
import os
import socket
from collections.abc import Callable
from typing import Any

from flowrt.errors import FlowError
from flowrt.waiting import Lifesign
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
        self._link.connect(address)
        name = f"observer-{socket.gethostname()}-{os.getpid()}"
        self._link.send(m.Hello(m.PROTOCOL, name, "observer", socket.gethostname(), os.getpid(), ()))

    def cancel(self, reason: str, code: int) -> None:
        """End the run."""
        self._link.send(m.Stop(reason, code))

    def close(self) -> None:
        self._link.send(m.Bye(""))
        self._link.close()

    def _receive(self, message: m.Message) -> None:
        if isinstance(message, m.Status):
            self._link.send(m.Heartbeat())
            self.heard.give()
            status = json.loads(message.text)
            if status["ended"] is not None:
                self.ended = status["ended"][0]
            self._show(status)

    def _failed(self, error: FlowError) -> None:
        raise error
