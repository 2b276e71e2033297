"""``flowrt drain WORKER``: let a worker leave a running job without losing a sample."""

import argparse
import asyncio
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from flowrt.launch.status import address_of, find_keys
from rich.console import Console

from flowrt.client.line import Line
from flowrt.errors import ConfigError, FlowError, WaitExpired
from flowrt.waiting import until
from flowrt.wire import messages as m
from flowrt.wire.keys import WorkerKeys

OBSERVER = "observer"
JOIN_S = 10.0


def drain(words: Sequence[str], console: Console) -> int:
    """Ask, and wait until the worker has left; returns the exit code. Raises ConfigError when it cannot leave."""
    parser = argparse.ArgumentParser("flowrt drain", description="let a worker leave without losing a sample")
    parser.add_argument("worker", help="its name, as flowrt run or --name gave it")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--run", type=Path, help="directory of the running job")
    where.add_argument("--controller", help="tcp://HOST:PORT")
    parser.add_argument("--keys", default="", help="directory of keys (else those of the run, or FLOWRT_KEYS)")
    parser.add_argument("--within-s", type=float, default=600.0, help="how long to wait until it has left, in seconds")
    asked = parser.parse_args(words)
    address = asked.controller or address_of(asked.run)
    asyncio.run(Draining(asked.worker, address, find_keys(asked.keys, asked.run)).until_left(asked.within_s))
    console.print(f"{asked.worker} has left the run", highlight=False)
    return 0


class Draining:
    """One request, and its end."""

    def __init__(self, worker: str, address: str, keys: WorkerKeys | None) -> None:
        self._worker = worker
        self._address = address
        self._keys = keys

    async def until_left(self, within_s: float) -> None:
        """Return when the worker has left. Raises WaitExpired if it has not by then."""
        name = f"drain-{socket.gethostname()}-{os.getpid()}"
        hello = m.Hello(m.PROTOCOL, name, OBSERVER, socket.gethostname(), os.getpid(), ())
        line = Line(self._address, hello, self._keys)
        await line.greet(JOIN_S)
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line = line
        line.hand_over(self._receive, self._fail, lambda: self._fail(FlowError("the controller has gone")))
        line.send(m.Drain(1, self._worker))
        try:
            await until(self._gone, within_s, f"{self._worker} to leave", self._worker)
        except WaitExpired:
            raise WaitExpired(
                f"{self._worker} is leaving, but what it holds is still needed after {within_s:.0f} s; "
                "it goes when it can"
            ) from None
        finally:
            line.send(m.Bye(""))
            line.close()

    def _receive(self, message: m.Message) -> None:
        match message:
            case m.Refused(_, reason):
                self._fail(ConfigError(reason))
            case m.Stop(reason):
                self._fail(FlowError(f"the run has ended: {reason}"))
            case m.Status(text):
                self._line.send(m.Heartbeat())
                if self._worker not in json.loads(text)["workers"] and not self._gone.done():
                    self._gone.set_result(None)
            case _:
                pass

    def _fail(self, error: FlowError) -> None:
        if not self._gone.done():
            self._gone.set_exception(error)
