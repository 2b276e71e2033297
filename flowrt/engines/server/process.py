"""A generation server that a rollout worker starts, in a process with a Python of its own.

- Its processes end with the worker, even if the worker is killed, and also while they start.
- Named shared memory of the server's processes is removed when they end, even if they were killed.
"""

import os
import random
import re
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

from flowrt.engines.model_config import position_limit, read_config
from flowrt.errors import ConfigError, EngineError
from flowrt.runtime.parent_death import die_with_parent
from flowrt.runtime.process_sessions import KILL_TIMEOUT_S, SessionReaper, kill_session, mapped_names, remove_unused
from flowrt.runtime.waits import blocking, join_thread

PORTS = range(20_000, 32_000)
"""Ports below those of outgoing connections, so that a free port stays free until the server listens."""
PORT_TRIES = 50
LOG_TIMEOUT_S = 2.0
FIND_PACKAGE = "import importlib.util, sys; print(importlib.util.find_spec(sys.argv[1]) is not None)"
FIND_TIMEOUT_S = 60.0
WORKER_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_.*|TORCHELASTIC_.*|FLOWRT_.*|PYTHONPATH|.*_API_KEY"
)
"""Environment variables of the worker that a server must not inherit: its rank, its keys and its modules."""
LOG_LINES = 3
"""Last lines of the log that errors contain."""


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """One start of a server."""

    command: Sequence[str]
    environment: Mapping[str, str]
    url: str
    """Its address once it is ready."""
    key: str = ""
    """Its API key, which is left out of its log; empty: it has none."""


class Launch(Protocol):
    """How a kind of server is started."""

    def prepare(self) -> LaunchCommand:
        """The next start: a free address, and a new key. Raises EngineError if there is none."""
        ...

    def on_ready(self) -> None:
        """Remove what only the start of the server needs."""
        ...

    def clean(self) -> None:
        """Remove what belongs to a server that has ended."""
        ...


class ServerProcess:
    """At most one server process at a time; `start` replaces the previous one.

    Args:
        name: kind of server, for errors: SGLang.
        launch: how it is started.
        log: the log file of the server.
    """

    def __init__(self, name: str, launch: Launch, log: Path) -> None:
        self._name = name
        self._launch = launch
        self._log = ServerLog(log)
        self.key = ""
        """API key of the running server."""
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper: SessionReaper | None = None
        self._shared: frozenset[tuple[Path, int]] = frozenset()

    def start(self) -> str:
        """Start a server. Returns its address, before it is ready.

        The process ends with the thread that calls this, which should live as long as the worker.

        Raises EngineError if no address is free, the key or the log cannot be written, or no process can be started.
        """
        self.kill()
        output = self._log.open()
        try:
            start = self._launch.prepare()
            self.key = start.key
            self._reaper = SessionReaper()
            self._process = subprocess.Popen(
                start.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=start.environment,
                start_new_session=True,
                preexec_fn=partial(_bind_to_worker, self._reaper),
            )
        except OSError as error:
            raise EngineError(f"the {self._name} server cannot be started: {error}") from error
        finally:
            os.close(output)
            self._log.copy(self.key)
        return start.url

    @property
    def pid(self) -> int:
        """First process (and session) of the server; 0 if none runs."""
        return 0 if self._process is None else self._process.pid

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def on_ready(self) -> None:
        """Record the shared memory of the server's processes, which all run when it is ready."""
        if self._process is not None:
            self._shared = mapped_names(self._process.pid)
        self._launch.on_ready()

    def kill(self) -> None:
        """Kill the server with all its processes, and remove their shared memory; does nothing without a server.

        Raises subprocess.TimeoutExpired if the process does not end within KILL_TIMEOUT_S seconds.
        """
        if self._process is not None:
            kill_session(self._process.pid)
            wait = partial(self._process.wait, KILL_TIMEOUT_S)
            blocking(wait, KILL_TIMEOUT_S, "the end of a killed server", "the system")
            self._process = None
        if self._reaper is not None:
            self._reaper.close()
            self._reaper = None
        self._log.close()
        self._launch.clean()
        remove_unused(self._shared)
        self._shared = frozenset()

    def exit_summary(self) -> str:
        """A sentence with the state or exit code of the server and the last lines of its log."""
        code = None if self._process is None else self._process.poll()
        state = "runs" if code is None else f"ended with exit code {code}"
        if code is not None:
            self._log.close()
        return f"it {state}; its log {self._log.path} ends: {' | '.join(self._log.last_lines()) or 'empty'}"


def server_environment(dropped: re.Pattern[str]) -> dict[str, str]:
    """The environment of a server, which takes modules from its own installation alone.

    ``dropped``: names of further variables of this process that the server must not inherit.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not WORKER_VARIABLES.fullmatch(name) and not dropped.fullmatch(name)
    }
    return {**kept, "PYTHONSAFEPATH": "1"}


def check_installed(engine: str, title: str, python: str) -> None:
    """Check that a Python has the package of a kind of server, which is looked for and not imported.

    Args:
        engine: name of the engine and of the package: sglang.
        title: as in messages: SGLang.
        python: the executable.

    Raises ConfigError unless it has the package.
    """
    call = partial(
        subprocess.run,
        [python, "-c", FIND_PACKAGE, engine],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env=server_environment(re.compile("")),
        timeout=FIND_TIMEOUT_S,
        check=False,
    )
    try:
        answer = blocking(call, FIND_TIMEOUT_S, f"a Python to find {title}", "that Python").stdout.strip()
        if answer == "True":
            return
        state = f"has no {title}" if answer == "False" else "is no Python"
    except OSError as error:
        state = f"cannot be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        state = f"has not answered within {FIND_TIMEOUT_S:.0f} s"
    raise ConfigError(
        f"rollout.{engine}.python is {python!r}, which {state}; name the Python of an environment with {title} "
        f"(scripts/install_{engine} makes one)"
    )


def _bind_to_worker(reaper: SessionReaper) -> None:
    """Runs in the first process of a server, before its program."""
    die_with_parent()
    reaper.enter()


class ServerLog:
    """The log file of a server, without its API key, which the server prints with its arguments.

    The server writes to a pipe; a thread copies lines to the file, which only this account can read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._source: BinaryIO | None = None
        self._target: BinaryIO | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> int:
        """Open the file and a pipe. Returns the descriptor to write to, which the caller closes.

        Raises EngineError if the file cannot be written.
        """
        self.close()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.fchmod(descriptor, 0o600)  # the file of an earlier start
        except OSError as error:
            raise EngineError(f"the log of a server cannot be written: {error}; make room there") from error
        self._target = os.fdopen(descriptor, "ab", buffering=0)
        read, write = os.pipe()
        self._source = os.fdopen(read, "rb")
        return write

    def copy(self, key: str) -> None:
        """Begin to copy lines, until no process can write any more. ``key``: what is left out; empty: nothing."""
        self._thread = threading.Thread(target=self._copy, args=(key.encode(),), name="server-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until the output of a server that has ended is copied, at most LOG_TIMEOUT_S seconds."""
        if self._thread is not None and join_thread(self._thread, LOG_TIMEOUT_S):
            self._thread = None

    def last_lines(self) -> list[str]:
        """The last lines of the file; empty if it cannot be read."""
        try:
            return self.path.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]
        except OSError:
            return []

    def _copy(self, key: bytes) -> None:
        assert self._source is not None
        assert self._target is not None
        with self._source as source, self._target as target:
            for line in source:
                with suppress(OSError):  # a full disk must not block the server
                    target.write(line.replace(key, b"REDACTED") if key else line)


def context_length(model: Path) -> int | None:
    """The maximum length of a sequence of a checkpoint, scaled positions included; None if it does not state it.

    Servers do not scale it where the original length is given.
    """
    try:
        return position_limit(read_config(model))
    except (OSError, ConfigError):  # the server reports what is wrong
        return None


def free_port() -> int:
    """A port of this host on which no process listens. Raises EngineError if none is found."""
    for port in random.SystemRandom().sample(PORTS, PORT_TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise EngineError(f"none of {PORT_TRIES} ports from {PORTS.start} to {PORTS.stop} is free for a server")
