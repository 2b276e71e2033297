"""An SGLang server that a rollout worker starts, in a process with a Python of its own.

- The process ends with the worker, even if the worker is killed.
- Each start has a new API key, because a client of the server can change its weights, and the server may unpickle parts
  of requests.
- Named shared memory of the server's processes is removed when they end, even if they were killed.
"""

import os
import random
import re
import secrets
import shlex
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from flowrt.engines.options import SglangOptions
from flowrt.errors import EngineError
from flowrt.runtime.parent_death import die_with_parent
from flowrt.runtime.waits import blocking

SHARED = Path("/dev/shm")  # noqa: S108 - the system's directory of named shared memory
PROCESSES = Path("/proc")
KEY_BYTES = 32
KEY_VARIABLE = "SGLANG_API_KEY"
"""Environment variable of the worker: the API key of a server that it did not start."""
KEY_ARGUMENTS = ("--config", "--api-key", "--admin-api-key", "--tokenizer-worker-num", "--grpc-port")
"""Server arguments with which no key is passed: the server already has one, or supports none."""
PORTS = range(20_000, 32_000)
"""Ports below those of outgoing connections, so that a free port stays free until the server listens."""
PORT_TRIES = 50
KILL_TIMEOUT_S = 10.0
LOG_LINES = 3
"""Last lines of the log that errors contain."""
CPU_ARGUMENTS = (
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    "--disable-overlap-schedule",
)
"""Arguments with which a server needs neither compiled kernels nor a second core."""
WORKER_VARIABLES = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_.*|TORCHELASTIC_.*|FLOWRT_.*|PYTHONPATH)"
)
"""Environment variables of the worker that a server must not inherit: its rank, its keys, its modules."""


class SglangServer:
    """At most one server process at a time; `start` replaces the previous one.

    Raises:
        EngineError: if ``options.python`` is not a file.
    """

    def __init__(self, options: SglangOptions, model: Path, *, rows: int, threads: int, log: Path) -> None:
        if not Path(options.python).is_file():
            raise EngineError(
                f"rollout.sglang.python is {options.python!r}, which is not a file; scripts/install_sglang makes one"
            )
        self._options = options
        self._model = model
        self._rows = rows
        self._threads = threads
        self._log = log
        self._key_file = KeyFile(log)
        self.key = ""
        """API key of the running server."""
        self._process: subprocess.Popen[bytes] | None = None
        self._shared: frozenset[tuple[Path, int]] = frozenset()

    def start(self) -> str:
        """Start a server on a free port. Returns its address, before it is ready.

        The process ends with the thread that calls this, which should live as long as the worker.

        Raises EngineError if no port is free, or the key cannot be written.
        """
        self.kill()
        port = free_port()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = self._command(port)
        self.key, key_arguments = self._key_file.arguments(command)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *key_arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        return f"http://127.0.0.1:{port}"

    @property
    def pid(self) -> int:
        """Process (and process group) of the server; 0 if none runs."""
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
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        blocking(
            partial(self._process.wait, KILL_TIMEOUT_S), KILL_TIMEOUT_S, "the end of a killed server", "the system"
        )
        self._process = None
        self._key_file.remove()
        remove_unused(self._shared)
        self._shared = frozenset()

    def exit_summary(self) -> str:
        """A sentence with the state or exit code of the server and the last lines of its log."""
        code = None if self._process is None else self._process.poll()
        state = "runs" if code is None else f"ended with exit code {code}"
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]
        except OSError:
            lines = []
        return f"it {state}; its log {self._log} ends: {' | '.join(lines) or 'empty'}"

    def _command(self, port: int) -> list[str]:
        options = self._options
        command = [options.python, "-m", "sglang.launch_server", "--model-path", str(self._model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--weight-version", "0", "--skip-tokenizer-init"]
        command += ["--dtype", options.dtype, "--max-running-requests", str(self._rows)]
        command += ["--log-level-http", "warning"]  # otherwise it logs every sequence
        if options.device:
            command += ["--device", options.device]
        if options.device == "cpu":
            command += CPU_ARGUMENTS
        return command + shlex.split(options.arguments)

    def _environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not WORKER_VARIABLES.fullmatch(name)}
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": str(self._threads)}
        if self._options.device == "cpu":
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
        return environment


class KeyFile:
    """A new API key for each start, passed to the server in a file that only this account can read.

    As an argument it would be visible in the list of processes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_suffix(".yaml")  # the only suffix that SGLang reads

    def arguments(self, others: Sequence[str]) -> tuple[str, list[str]]:
        """Write a new key. Returns the key, and the arguments that pass it to the server.

        If ``others``, the server's other arguments, have one of KEY_ARGUMENTS: returns the key from the environment and
        no arguments.

        Raises EngineError if the file cannot be written.
        """
        if any(one.partition("=")[0] in KEY_ARGUMENTS for one in others):
            return given_key(os.environ), []
        key = secrets.token_hex(KEY_BYTES)
        self.remove()
        try:
            with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"api-key: '{key}'\n")
        except OSError as error:
            raise EngineError(f"the key of an SGLang server cannot be written: {error}; make room there") from error
        return key, ["--config", str(self._path)]

    def remove(self) -> None:
        """Remove the file, if it exists."""
        with suppress(FileNotFoundError):
            self._path.unlink()


def given_key(environment: Mapping[str, str]) -> str:
    """The API key of a server that this worker did not start; empty if it has none."""
    return environment.get(KEY_VARIABLE, "")


def mapped_names(session: int) -> frozenset[tuple[Path, int]]:
    """The named shared memory that processes of a session have mapped: paths and inodes.

    Found by inode, because a semaphore is mapped under a temporary name.
    """
    found: set[int] = set()
    for process in _processes():
        with suppress(OSError):
            if os.getsid(process) == session:
                found |= _mapped_inodes(process)
    return frozenset((path, inode) for path, inode in _shared_names() if inode in found)


def remove_unused(names: frozenset[tuple[Path, int]]) -> None:
    """Remove the shared memory of these paths and inodes, unless a process of this user has it mapped."""
    left = names & frozenset(_shared_names())
    if not left:
        return
    used: set[int] = set()
    for process in _processes():
        with suppress(OSError):
            used |= _mapped_inodes(process)
    for path, inode in left:
        if inode not in used:
            with suppress(OSError):
                path.unlink()


def _shared_names() -> list[tuple[Path, int]]:
    try:
        with os.scandir(SHARED) as entries:
            return [(Path(entry.path), entry.inode()) for entry in entries]
    except OSError:
        return []  # a system without named shared memory


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir(PROCESSES) if name.isdigit()]
    except OSError:
        return []


def _mapped_inodes(process: int) -> set[int]:
    """Inodes of shared memory. A line of the maps file is: addresses, rights, offset, device, inode, path."""
    lines = (PROCESSES / str(process) / "maps").read_text(errors="replace").splitlines()
    fields = (line.split(maxsplit=5) for line in lines if f"{SHARED}/" in line)
    return {int(field[4]) for field in fields}


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
