"""How an SGLang server is started: its command, its environment and its API key.

Each start has a new API key, because a client of the server can change its weights, and the server may unpickle parts
of requests. The key is in no file: the server reads it from anonymous memory, and it is removed from what the server
logs.
"""

import os
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from flowrt.engines.options import SglangOptions
from flowrt.engines.server.process import LaunchCommand, context_length, free_port, server_environment
from flowrt.engines.sglang.descriptor import KEY_VARIABLE
from flowrt.errors import EngineError

KEY_BYTES = 32
KEY_ARGUMENTS = ("--config", "--tokenizer-worker-num", "--grpc-port")
"""Server arguments with which no key is passed: the server has a configuration of its own, or supports no key."""
CONTEXT_MARGIN = 8
"""Positions that the server keeps free: it ends a sequence 2 tokens before its context length, and accepts no request
of which fewer than 6 are left."""
CPU_ARGUMENTS = (
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--disable-overlap-schedule", "--sleep-on-idle"),
)
"""Arguments with which a server needs neither compiled kernels nor a second core, and no core while it is idle."""
RESULT_VARIABLES = re.compile("SGLANG_RETURN_ORIGINAL_LOGPROB|SGLANG_MAX_NEW_TOKENS_LIMIT")
"""Environment variables that would change log-probabilities and lengths."""


class SglangLaunch:
    """Starts of an SGLang server (see `flowrt.engines.server.process.Launch`).

    Args:
        options: options of the server; ``python`` must be a file.
        model: directory of the checkpoint.
        rows: maximum number of running sequences.
        threads: number of CPU threads of a process.
        log: log file of the server.
        has_tokenizer: whether the server has to search for stop strings.

    Raises EngineError if ``options.python`` is not a file.
    """

    def __init__(
        self, options: SglangOptions, model: Path, *, rows: int, threads: int, log: Path, has_tokenizer: bool = False
    ) -> None:
        if not Path(options.python).is_file():
            raise EngineError(
                f"rollout.sglang.python is {options.python!r}, which is not a file; scripts/install_sglang makes one"
            )
        self._options = options
        self._model = model
        self._rows = rows
        self._threads = threads
        self._has_tokenizer = has_tokenizer
        self._key_file = KeyFile(log)

    def prepare(self) -> LaunchCommand:
        port = free_port()
        command = self._command(port)
        key, key_arguments = self._key_file.arguments(command)
        return LaunchCommand([*command, *key_arguments], self._environment(), f"http://127.0.0.1:{port}", key)

    def on_ready(self) -> None:
        self._key_file.remove()  # the server has read it

    def clean(self) -> None:
        self._key_file.remove()

    def _command(self, port: int) -> list[str]:
        options = self._options
        command = [options.python, "-m", "sglang.launch_server", "--model-path", str(self._model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--weight-version", "0"]
        # With a tokenizer the server would first generate from English text, of which a tokenizer of other characters
        # makes no token, and die of it.
        command += ["--skip-server-warmup" if self._has_tokenizer else "--skip-tokenizer-init"]
        if positions := context_length(self._model):
            command += ["--context-length", str(positions + CONTEXT_MARGIN)]
        command += ["--dtype", options.dtype, "--max-running-requests", str(self._rows)]
        command += ["--log-level-http", "warning"]  # otherwise it logs every sequence
        if options.device:
            command += ["--device", options.device]
        if options.device == "cpu":
            command += CPU_ARGUMENTS
        return command + shlex.split(options.arguments)

    def _environment(self) -> dict[str, str]:
        environment = server_environment(RESULT_VARIABLES)
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": str(self._threads)}
        environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # for the margin
        if self._options.device == "cpu":
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
        return environment


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
