"""How a worker gets in: hello, welcome."""

import os
import socket

from flowrt.client.line import Line
from flowrt.client.session import Session
from flowrt.transport.transports import abilities
from flowrt.wire import messages as m
from flowrt.wire.keys import WorkerKeys


async def connect(address: str, worker: str, role: str, deadline_s: float, keys: WorkerKeys | None = None) -> Session:
    """Greet the controller at ``tcp://HOST:PORT`` and wait to be let in.

    Raises WaitExpired when nobody answers within ``deadline_s`` seconds, LocalProtocolError when refused, ConfigError
    when it and this worker do not have keys that fit.
    """
    line = Line(address, m.Hello(m.PROTOCOL, worker, role, socket.gethostname(), os.getpid(), abilities()), keys)
    welcome = await line.greet(deadline_s)
    session = Session(worker, line, welcome)
    session.listen()
    return session
