"""An SGLang server that a rollout worker starts, in a process with a Python of its own.

- Its processes end with the worker, even if the worker is killed, and also while they start.
- Each start has a new API key, because a client of the server can change its weights, and the server may unpickle parts
  of requests. The key is in no file: the server reads it from anonymous memory, and it is removed from what the server
  logs.
- Named shared memory of the server's processes is removed when they end, even if they were killed.
"""

import os
import random
import re
import secrets
import shlex
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from flowrt.engines.model_config import position_limit, read_config
from flowrt.engines.options import SglangOptions
from flowrt.engines.sglang.protocol import KEY_VARIABLE
from flowrt.errors import ConfigError, EngineError
from flowrt.runtime.parent_death import die_with_parent
from flowrt.runtime.process_sessions import KILL_TIMEOUT_S, SessionReaper, kill_session, mapped_names, remove_unused
from flowrt.runtime.waits import blocking, join_thread

KEY_BYTES = 32
KEY_ARGUMENTS = ("--config", "--tokenizer-worker-num", "--grpc-port")
"""Server arguments with which no key is passed: the server has a configuration of its own, or supports no key."""
PORTS = range(20_000, 32_000)
"""Ports below those of outgoing connections, so that a free port stays free until the server listens."""
PORT_TRIES = 50
LOG_TIMEOUT_S = 2.0
CONTEXT_MARGIN = 8
"""Positions that the server keeps free: it ends a sequence 2 tokens before its context length, and accepts no request
of which fewer than 6 are left."""
LOG_LINES = 3
"""Last lines of the log that errors contain."""
CPU_ARGUMENTS = (
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--disable-overlap-schedule", "--sleep-on-idle"),
)
"""Arguments with which a server needs neither compiled kernels nor a second core, and no core while it is idle."""
WORKER_VARIABLES = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_.*|TORCHELASTIC_.*|FLOWRT_.*|PYTHONPATH|.*_API_KEY"
    r"|SGLANG_RETURN_ORIGINAL_LOGPROB|SGLANG_MAX_NEW_TOKENS_LIMIT)"
)
"""Environment variables of the worker that a server must not inherit: its rank, its keys, its modules, and what would
change log-probabilities and lengths."""


FIND_SGLANG = 'import importlib.util; print(importlib.util.find_spec("sglang") is not None)'
FIND_TIMEOUT_S = 60.0


def check_installed(python: str) -> None:
    """Raise ConfigError unless this is a Python that has SGLang; it is looked for, not imported."""
    call = partial(
        subprocess.run,
        [python, "-c", FIND_SGLANG],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env=_without_worker_variables(),
        timeout=FIND_TIMEOUT_S,
        check=False,
    )
    try:
        answer = blocking(call, FIND_TIMEOUT_S, "a Python to find SGLang", "that Python").stdout.strip()
        if answer == "True":
            return
        state = "has no SGLang" if answer == "False" else "is no Python"
    except OSError as error:
        state = f"cannot be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        state = f"has not answered within {FIND_TIMEOUT_S:.0f} s"
    raise ConfigError(
        f"rollout.sglang.python is {python!r}, which {state}; name the Python of an environment with SGLang "
        "(scripts/install_sglang makes one)"
    )


def _without_worker_variables() -> dict[str, str]:
    """The environment of a server, which takes modules from its own installation alone."""
    kept = {name: value for name, value in os.environ.items() if not WORKER_VARIABLES.fullmatch(name)}
    return {**kept, "PYTHONSAFEPATH": "1"}


class SglangServer:
    """At most one server process at a time; `start` replaces the previous one.

    Raises:
        EngineError: if ``options.python`` is not a file.
    """

    def __init__(
        self,
        options: SglangOptions,
        model: Path,
        *,
        rows: int,
        threads: int,
        log: Path,
        has_tokenizer: bool = False,
    ) -> None:
        if not Path(options.python).is_file():
            raise EngineError(
                f"rollout.sglang.python is {options.python!r}, which is not a file; scripts/install_sglang makes one"
            )
        self._options = options
        self._model = model
        self._rows = rows
        self._threads = threads
        self._log = ServerLog(log)
        self._has_tokenizer = has_tokenizer
        self._key_file = KeyFile(log)
        self.key = ""
        """API key of the running server."""
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper: SessionReaper | None = None
        self._shared: frozenset[tuple[Path, int]] = frozenset()

    def start(self) -> str:
        """Start a server on a free port. Returns its address, before it is ready.

        The process ends with the thread that calls this, which should live as long as the worker.

        Raises EngineError if no port is free, the key or the log cannot be written, or no process can be started.
        """
        self.kill()
        port = free_port()
        command = self._command(port)
        output = self._log.open()
        try:
            self.key, key_arguments = self._key_file.arguments(command)
            self._reaper = SessionReaper()
            self._process = subprocess.Popen(
                [*command, *key_arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment(),
                start_new_session=True,
                preexec_fn=partial(_bind_to_worker, self._reaper),
            )
        except OSError as error:
            raise EngineError(f"the SGLang server cannot be started: {error}") from error
        finally:
            os.close(output)
            self._log.copy(self.key)
        return f"http://127.0.0.1:{port}"

    @property
    def pid(self) -> int:
        """First process (and session) of the server; 0 if none runs."""
        return 0 if self._process is None else self._process.pid

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def on_ready(self) -> None:
        """Record the shared memory of the server's processes, and remove the key file, which the server has read.

        Called when the server is ready, so that all its processes run.
        """
        if self._process is not None:
            self._shared = mapped_names(self._process.pid)
        self._key_file.remove()

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
        self._key_file.remove()
        remove_unused(self._shared)
        self._shared = frozenset()

    def exit_summary(self) -> str:
        """A sentence with the state or exit code of the server and the last lines of its log."""
        code = None if self._process is None else self._process.poll()
        state = "runs" if code is None else f"ended with exit code {code}"
        if code is not None:
            self._log.close()
        return f"it {state}; its log {self._log.path} ends: {' | '.join(self._log.last_lines()) or 'empty'}"

    def _command(self, port: int) -> list[str]:
        options = self._options
        command = [options.python, "-m", "sglang.launch_server", "--model-path", str(self._model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--weight-version", "0"]
        # With a tokenizer the server would first generate from English text, of which a tokenizer of other characters
        # makes no token, and die of it.
        command += ["--skip-server-warmup" if self._has_tokenizer else "--skip-tokenizer-init"]
        if positions := _positions(self._model):
            command += ["--context-length", str(positions + CONTEXT_MARGIN)]
        command += ["--dtype", options.dtype, "--max-running-requests", str(self._rows)]
        command += ["--log-level-http", "warning"]  # otherwise it logs every sequence
        if options.device:
            command += ["--device", options.device]
        if options.device == "cpu":
            command += CPU_ARGUMENTS
        return command + shlex.split(options.arguments)

    def _environment(self) -> dict[str, str]:
        environment = _without_worker_variables()
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": str(self._threads)}
        environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # for the margin
        if self._options.device == "cpu":
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
        return environment


def _positions(model: Path) -> int | None:
    """The maximum length of a sequence of a checkpoint, scaled positions included; None if it does not state it.

    SGLang does not scale it where the original length is given.
    """
    try:
        return position_limit(read_config(model))
    except (OSError, ConfigError):  # the server reports what is wrong
        return None


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
            raise EngineError(f"the log of an SGLang server cannot be written: {error}; make room there") from error
        self._target = os.fdopen(descriptor, "ab", buffering=0)
        read, write = os.pipe()
        self._source = os.fdopen(read, "rb")
        return write

    def copy(self, key: str) -> None:
        """Begin to copy lines, until no process can write any more. ``key``: what is left out; empty: nothing."""
        self._thread = threading.Thread(target=self._copy, args=(key.encode(),), name="sglang-log", daemon=True)
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


class KeyFile:
    """A new API key for each start, passed to the server in anonymous memory that only this account can read.

    As an argument it would be visible in the list of processes. ``path`` is a link to the memory, without the key.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_suffix(".yaml")  # the only suffix that SGLang reads
        self._memory = -1

    def arguments(self, others: Sequence[str]) -> tuple[str, list[str]]:
        """Make a new key. Returns the key, and the arguments that pass it to the server.

        If ``others``, the server's other arguments, have one of KEY_ARGUMENTS: returns the key from the environment and
        no arguments.

        Raises EngineError if the link cannot be made.
        """
        if any(other.partition("=")[0] in KEY_ARGUMENTS for other in others):
            return given_key(os.environ), []
        key = secrets.token_hex(KEY_BYTES)
        self.remove()
        self._memory = os.memfd_create("flowrt-key", os.MFD_CLOEXEC)
        os.fchmod(self._memory, 0o600)
        os.write(self._memory, f"api-key: '{key}'\n".encode())
        try:
            self._path.symlink_to(f"/proc/{os.getpid()}/fd/{self._memory}")
        except OSError as error:
            self.remove()
            raise EngineError(f"the key of an SGLang server cannot be passed: {error}; make room there") from error
        return key, ["--config", str(self._path)]

    def remove(self) -> None:
        """Remove link and memory, if they exist."""
        with suppress(FileNotFoundError):
            self._path.unlink()
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


def given_key(environment: Mapping[str, str]) -> str:
    """The API key of a server that this worker did not start; empty if it has none."""
    return environment.get(KEY_VARIABLE, "")


def free_port() -> int:
    """A port of this host on which no process listens. Raises EngineError if none is found."""
    for port in random.SystemRandom().sample(PORTS, PORT_TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise EngineError(f"none of {PORT_TRIES} ports from {PORTS.start} to {PORTS.stop} is free for an SGLang server")
