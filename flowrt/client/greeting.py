"""How a worker gets in: hello, welcome."""

import asyncio
import contextlib
import os
import socket

from flowrt.client.session import Session
from flowrt.errors import FlowError, LocalProtocolError, WaitExpired
from flowrt.transport.transports import abilities
from flowrt.waiting import CONTROLLER, until
from flowrt.wire import messages as m
from flowrt.wire.keys import WorkerKeys
from flowrt.wire.link import ClientLink


async def connect(address: str, worker: str, role: str, deadline_s: float, keys: WorkerKeys | None = None) -> Session:
    """Greet the controller at ``tcp://HOST:PORT`` and wait to be let in.

    Raises WaitExpired when nobody answers within ``deadline_s`` seconds, LocalProtocolError when refused, ConfigError
    when it and this worker do not have keys that fit.
    """
    loop = asyncio.get_running_loop()
    welcome: asyncio.Future[m.Welcome] = loop.create_future()
    session: Session | None = None
    early: list[m.Message] = []

    def receive(message: m.Message) -> None:
        if session is not None:
            session.receive(message)
        elif welcome.done():
            early.append(message)
        elif isinstance(message, m.Welcome):
            welcome.set_result(message)
        elif isinstance(message, m.Refused | m.Stop):
            welcome.set_exception(LocalProtocolError(f"controller {address} refused {worker}: {message.reason}"))

    def failed(error: FlowError) -> None:
        if session is not None:
            session.end(error)
        elif not welcome.done():
            welcome.set_exception(error)

    with contextlib.ExitStack() as unless_welcome:
        link = ClientLink(receive, failed, keys)
        unless_welcome.callback(link.close)
        link.connect(address)
        link.send(m.Hello(m.PROTOCOL, worker, role, socket.gethostname(), os.getpid(), abilities()))
        try:
            answer = await until(welcome, deadline_s, f"the welcome of {address}", CONTROLLER)
        except WaitExpired:
            raise WaitExpired(
                f"{worker} waited {deadline_s:.0f} s for a controller at {address} and nobody answered; "
                "is it running, and is the address right?"
            ) from None
        unless_welcome.pop_all()
    session = Session(worker, address, link, answer)
    for message in early:
        session.receive(message)
    return session
