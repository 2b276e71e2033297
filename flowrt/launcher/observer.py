"""Observers: connections that receive the status of a run, and may end it or drain a worker; lookup of addresses."""

import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrt.client.connection import Connection, ConnectionLost
from flowrt.errors import ConfigError, FlowError, WaitExpired
from flowrt.ids import OBSERVER
from flowrt.launcher.supervision import read_summary
from flowrt.net.curve_keys import KEYS_VARIABLE, WorkerKeys, worker_keys
from flowrt.net.link import ClientLink
from flowrt.protocol import messages as m
from flowrt.recipes.config_io import read_toml
from flowrt.recipes.run_dir import CONFIG, read_address
from flowrt.runtime.waits import CONTROLLER, LivenessTimeout, wait_until


def hello() -> m.Hello:
    """The first message of an observer."""
    host = socket.gethostname()
    pid = os.getpid()
    return m.Hello(protocol=m.PROTOCOL, worker=f"{OBSERVER}-{host}-{pid}", role=OBSERVER, host=host, pid=pid, lanes=())


class Observer:
    """The launcher's connection: passes every status to a callback, and reconnects to a restarted controller."""

    def __init__(
        self,
        address: str,
        on_status: Callable[[dict[str, Any]], None],
        keys: WorkerKeys | None,
        worker_timeout_s: float,
        follow: Sequence[str],
    ) -> None:
        """Connect.

        Args:
            address: of the controller.
            on_status: called with each status, as made by `Server.status`.
            keys: CURVE keys; None for a controller without.
            worker_timeout_s: seconds without a status after which the controller counts as hung.
            follow: names of the workers that "followed" of each status tells of, whatever the size of the run.
        """
        self._follow = tuple(follow)
        self._unjoined: tuple[tuple[str, str], ...] = ()
        self._order: m.Stop | None = None  # to end the run
        self._on_status = on_status
        self.liveness = LivenessTimeout(worker_timeout_s)
        """Renewed by every status; the controller counts as hung when it expires."""
        self.end_reason = ""
        """Why the run has ended; empty until then."""
        self._link = ClientLink(self._receive, self._on_error, keys)
        # A restarted controller does not know this observer.
        self._link.connect(address, self._introduce)
        self._introduce()

    def _introduce(self) -> None:
        self._link.send(hello())
        self._link.send(m.Follow(self._follow, self._unjoined))
        if self._order is not None:
            self._link.send(self._order)

    def show_unjoined(self, sentences: Mapping[str, str]) -> None:
        """Have every status say which processes have workers that have not joined; ``sentences``: by process."""
        unjoined = tuple(sentences.items())
        if unjoined != self._unjoined:
            self._unjoined = unjoined
            self._link.send(m.Follow(self._follow, unjoined))

    def end_run(self, reason: str, code: int) -> None:
        """Make the controller end the run with this exit code; one that is away, when it is back."""
        self._order = self._order or m.Stop(reason, code)
        self._link.send(self._order)

    def log_event(self, text: str) -> None:
        """Make the controller write a sentence about an exporter to events.jsonl."""
        self._link.send(m.Notice("exporter", text))

    def close(self) -> None:
        """Leave the run and close the connection."""
        self._link.send(m.Leave(""))
        self._link.close(0 if self.end_reason else None)

    def _receive(self, message: m.Message) -> None:
        if isinstance(message, m.Status):
            self._link.send(m.Heartbeat())
            self.liveness.renew()
            status = json.loads(message.text)
            if status["ended"] is not None:
                self.end_reason = status["ended"][0]
            self._on_status(status)

    def _on_error(self, error: FlowError) -> None:
        # A ConfigError means that another process listens at the address now: a restarted controller fails to bind it.
        if not isinstance(error, ConfigError):
            raise error


@contextlib.asynccontextmanager
async def connected(address: str, keys: WorkerKeys | None, deadline_s: float, where: str) -> AsyncIterator[Connection]:
    """A connection of a command, closed at the end of the block.

    Args:
        address: of the controller.
        keys: CURVE keys; None for a controller without.
        deadline_s: time limit for the controller's answer, in seconds.
        where: the run, in messages.

    Raises WaitExpired without an answer, FlowError if the controller refuses.
    """
    connection = Connection(address, hello(), keys)
    try:
        await connection.open(deadline_s)
    except WaitExpired:
        raise WaitExpired(
            f"no controller answers at {where} within {deadline_s:.0f} s: it was killed, hangs, or is elsewhere; "
            "see its log"
        ) from None
    try:
        yield connection
    finally:
        connection.send(m.Leave(""))
        connection.close()


async def statuses(connection: Connection) -> AsyncIterator[dict[str, Any]]:
    """Yield each status. Raises FlowError at the end of the run or the connection, ConfigError when rejected."""
    async for event in connection:
        match event:
            case m.Status(text):
                connection.send(m.Heartbeat())
                yield json.loads(text)
            case m.Rejected(_, reason):
                raise ConfigError(reason)
            case m.Stop(reason):
                raise FlowError(f"the run has ended: {reason}")
            case ConnectionLost():
                raise FlowError("the connection to the controller is lost")
            case _:
                pass


async def fetch_status(address: str, keys: WorkerKeys | None, deadline_s: float, where: str) -> dict[str, Any]:
    """The present status of a run; arguments and exceptions as of `connected`."""
    async with connected(address, keys, deadline_s, where) as connection:
        return await wait_until(anext(statuses(connection)), deadline_s, f"the status of {where}", CONTROLLER)


# ---- where a run's controller is


def locate(run: str) -> tuple[str, Path | None]:
    """The address of a run's controller, and the run directory unless ``run`` is the address itself.

    Raises FlowError if no controller listens for that directory.
    """
    return (run, None) if "://" in run else (address_of(Path(run)), Path(run))


def address_of(run_dir: Path) -> str:
    """The address of the run's controller.

    Raises FlowError, with the reason of the run's end if it has ended, if no controller listens; ConfigError for a
    directory that is no run directory.
    """
    try:
        return read_address(run_dir)
    except FileNotFoundError:
        pass
    summary = read_summary(run_dir)
    if summary is not None:
        raise FlowError(f"the run in {run_dir} has ended with exit code {summary['exit_code']}: {summary['reason']}")
    if not (run_dir / CONFIG).is_file():
        raise ConfigError(f"{run_dir} is not a run directory; name one, or its controller's address, tcp://HOST:PORT")
    raise FlowError(
        f"the controller of {run_dir} does not listen: it has not started yet, or was killed; see {run_dir / 'logs'}"
    )


def find_keys(named: str, run_dir: Path | None) -> WorkerKeys | None:
    """The observer's keys, from directory ``named``, else the one of the run, else of the environment; None without.

    Of the run's configuration nothing else is read: another version of flowrt may have written it.
    """
    directory = named
    if not directory and run_dir is not None and (run_dir / CONFIG).is_file():
        controller = read_toml(run_dir / CONFIG).get("controller", {})
        directory = str(controller.get("keys", "")) if isinstance(controller, dict) else ""
    directory = directory or os.environ.get(KEYS_VARIABLE, "")
    return worker_keys(Path(directory), OBSERVER) if directory else None
