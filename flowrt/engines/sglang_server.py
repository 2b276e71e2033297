"""An SGLang server that a rollout worker starts: a process of its own Python, gone when its worker is."""

import os
import random
import re
import shlex
import signal
import socket
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path

from flowrt.engines import leftovers
from flowrt.engines.options import SglangOptions
from flowrt.engines.sglang_key import KeyFile
from flowrt.errors import EngineError
from flowrt.lifeline import die_with_parent
from flowrt.waiting import blocking

PORTS = range(20_000, 32_000)
"""Below those that systems give to outgoing connections: a port found free stays free until the server listens."""
TRIES = 50
END_S = 10.0
LAST_WORDS_LINES = 3
CPU_ARGUMENTS = (
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    "--disable-overlap-schedule",
)
"""What needs neither kernels nor a second core."""
OURS_ALONE = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_.*|TORCHELASTIC_.*|FLOWRT_.*|PYTHONPATH)"
)
"""Environment variables that say where this worker stands, and with what keys: the server has ranks of its own."""


class SglangServer:
    """At most one process at a time; `start` replaces one that has died or is not wanted any more."""

    def __init__(self, options: SglangOptions, model: Path, *, rows: int, threads: int, log: Path) -> None:
        if not Path(options.python).is_file():
            raise EngineError(
                f"rollout.sglang.python is {options.python!r}, which is no Python; scripts/install_sglang makes one"
            )
        self._options = options
        self._model = model
        self._rows = rows
        self._threads = threads
        self._log = log
        self._key_file = KeyFile(log)
        self.key = ""
        """What its requests have to bear, once it is started."""
        self._process: subprocess.Popen[bytes] | None = None
        self._shared: frozenset[tuple[Path, int]] = frozenset()

    def start(self) -> str:
        """Start a server on a free port; returns its address at once.

        The process dies with the thread that calls this: let it be one that lives as long as the worker.
        """
        self.kill()
        port = free_port()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = self._command(port)
        self.key, secret = self._key_file.arguments(command)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *secret],
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
        """Process (and process group) of the server; 0 when none was started."""
        return 0 if self._process is None else self._process.pid

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def is_up(self) -> None:
        """All its processes run: what they share has its names now."""
        if self._process is not None:
            self._shared = leftovers.named_by(self._process.pid)
        self._key_file.remove()

    def kill(self) -> None:
        """Kill the server with all its processes, and remove what they shared; nothing happens when there is none."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        blocking(partial(self._process.wait, END_S), END_S, "the end of what was killed", "the system")
        self._process = None
        self._key_file.remove()
        leftovers.remove(self._shared)
        self._shared = frozenset()

    def last_words(self) -> str:
        """How the server stands, and the end of its log."""
        code = None if self._process is None else self._process.poll()
        how = "runs" if code is None else f"left with exit code {code}"
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()[-LAST_WORDS_LINES:]
        except OSError:
            lines = []
        return f"it {how}; its log {self._log} ends: {' | '.join(lines) or 'empty'}"

    def _command(self, port: int) -> list[str]:
        options = self._options
        command = [options.python, "-m", "sglang.launch_server", "--model-path", str(self._model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--weight-version", "0", "--skip-tokenizer-init"]
        command += ["--dtype", options.dtype, "--max-running-requests", str(self._rows)]
        command += ["--log-level-http", "warning"]  # else a line for every sequence
        if options.device:
            command += ["--device", options.device]
        if options.device == "cpu":
            command += CPU_ARGUMENTS
        return command + shlex.split(options.arguments)

    def _environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not OURS_ALONE.fullmatch(name)}
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": str(self._threads)}
        if self._options.device == "cpu":
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
        return environment


def free_port() -> int:
    """A port of this host that nobody listens on."""
    for port in random.SystemRandom().sample(PORTS, TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise EngineError(f"none of {TRIES} ports from {PORTS.start} to {PORTS.stop} is free for an SGLang server")
