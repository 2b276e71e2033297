"""vLLM as a kind of generation server."""

import os
from pathlib import Path
from typing import Any

from flowrt.engines.model_config import read_config, text_table
from flowrt.engines.options import PauseMode, Truncation, VllmOptions
from flowrt.engines.server.client import Call, ServerClient
from flowrt.engines.server.dialect import (
    Continuation,
    Dialect,
    PartialResponse,
    Sampling,
    ServerFacts,
    WeightTransfer,
)
from flowrt.engines.server.engine import ServerRollout
from flowrt.engines.server.layout import Layout
from flowrt.engines.server.process import ServerProcess
from flowrt.engines.server.weights import DiskWeights
from flowrt.engines.stopping import StopConditions
from flowrt.engines.vllm import protocol
from flowrt.engines.vllm.descriptor import KEY_VARIABLE
from flowrt.engines.vllm.server_process import VllmLaunch
from flowrt.errors import EngineError

MAX_NAMES = 3
"""Names of missing tensors in an error."""
INFO_TIMEOUT_S = 60.0
"""The first answer of /server_info takes seconds."""


class VllmDialect(Dialect):
    """Servers of vLLM.

    Args:
        options: options of the server.
        vocabulary: number of tokens of the model.
    """

    name = "vLLM"
    table = "rollout.vllm"
    weights = "disk"

    def __init__(self, options: VllmOptions, vocabulary: int) -> None:
        self._options = options
        self._vocabulary = vocabulary
        self._can = protocol.VllmCapabilities(labels=True, scale_out=True, token_versions=True)
        self._takes_seeds = True
        self._iterations = ""
        self._broken = ""  # address of a server that has failed to load weights

    def given_key(self) -> str:
        return os.environ.get(KEY_VARIABLE, "")

    async def facts(self, client: ServerClient) -> ServerFacts:
        release = str((await client.get("/version")).get("version"))
        self._can = protocol.capabilities(release)
        config = await self._config(client)
        parallel, scheduler = config.get("parallel_config", {}), config.get("scheduler_config", {})
        for name in ("data_parallel_size", "pipeline_parallel_size"):
            if int(parallel.get(name) or 1) > 1:
                raise EngineError(
                    f"the vLLM server at {client.url} has {name} {parallel[name]}: weights can be changed in one part "
                    "only; use 1, and more rollout workers"
                )
        model = config.get("model_config", {})
        if (mode := str(model.get("logprobs_mode"))).rpartition(".")[2].lower() != "processed_logprobs":
            raise EngineError(
                f"the vLLM server at {client.url} returns {mode}: start it with --logprobs-mode processed_logprobs"
            )
        device = str(config.get("device_config", {}).get("device") or "")
        self._takes_seeds = device != "cpu" or not scheduler.get("enable_chunked_prefill")
        if self._can.labels:
            await client.post(protocol.label(0), INFO_TIMEOUT_S)
        return ServerFacts(
            release=release,
            ranks=int(parallel.get("tensor_parallel_size") or 1),
            device=device,
            token_versions=self._can.token_versions,
            longest_input=int(model["max_model_len"]) if model.get("max_model_len") else None,
        )

    async def _config(self, client: ServerClient) -> dict[str, Any]:
        """What the server says about its configuration. Raises EngineError if it was not started for development."""
        try:
            info = await client.get("/server_info?config_format=json", INFO_TIMEOUT_S)
        except EngineError as error:
            raise EngineError(
                f"the vLLM server at {client.url} does not let its weights be changed ({error}); start it with "
                "VLLM_SERVER_DEV_MODE=1 in its environment"
            ) from error
        config: dict[str, Any] = info.get("vllm_config", {})
        return config

    async def take_over(self, client: ServerClient, deadline_s: float) -> None:
        if client.url == self._broken:
            raise EngineError(
                f"the vLLM server at {client.url} has failed to load weights, and would generate with a mixture of "
                "them; start it again, and resume the run"
            )
        await client.post(protocol.pause("abort"), deadline_s)

    async def is_generating(self, client: ServerClient, deadline_s: float) -> bool:
        try:
            iterations = protocol.iterations(await client.text("/metrics", deadline_s))
        except EngineError:
            return False
        is_new, self._iterations = iterations != self._iterations, iterations
        return is_new

    def generate(self, part: Continuation) -> Call:
        return protocol.generate(part, has_seed=self._takes_seeds, vocabulary=self._vocabulary)

    def parse_generated(self, answer: Any, part: Continuation) -> PartialResponse:
        return protocol.parse_generated(
            answer, part, token_versions=self._can.token_versions, vocabulary=self._vocabulary
        )

    def pause(self, mode: PauseMode) -> Call:
        return protocol.pause(mode)

    def resume(self) -> Call:
        return protocol.resume()

    def transfer(self, layout: Layout, facts: ServerFacts) -> WeightTransfer:  # noqa: ARG002
        return DiskWeights(layout, self._options.stage, self.table, self._load)

    async def _load(self, client: ServerClient, directory: str, version: int, flush: bool) -> None:
        deadline_s = self._options.update_s
        if flush:
            await client.post(protocol.reset(), deadline_s)
        self._broken = client.url
        loaded = await client.post(protocol.load(directory), deadline_s)
        try:
            missing = sorted({str(name) for names in loaded["results"] for name in names})
        except (KeyError, TypeError) as error:
            raise EngineError(f"the answer of the vLLM server to a load has another form: {error!r}") from error
        if missing:
            shown = ", ".join(missing[:MAX_NAMES])
            raise EngineError(
                f"{len(missing)} tensors of the vLLM server's model are not in the weights of version {version} "
                f"({shown}); start it with the checkpoint of the run"
            )
        self._broken = ""
        if self._can.labels:
            await client.post(protocol.label(version), deadline_s)


def vllm_rollout(
    options: VllmOptions,
    model: Path,
    *,
    stop: StopConditions,
    rows: int,
    max_new_tokens: int,
    temperature: float,
    truncation: Truncation | None = None,
    threads: int,
    log_path: Path,
) -> ServerRollout:
    """A rollout engine on a vLLM server.

    Args:
        options: options of the server; the first address is that of a running server, without one a server is started.
        model: directory of the checkpoint.
        stop: stop tokens and stop strings.
        rows: maximum number of running sequences.
        max_new_tokens: maximum length of a response, in tokens.
        temperature: sampling temperature, above 0.
        truncation: which tokens can be drawn; None: all. Responses have a support if it is active.
        threads: number of CPU threads of a server that is started.
        log_path: log file of a server that is started.

    Raises EngineError if the temperature is not above 0, or the server's Python does not exist.
    """
    truncation = truncation or Truncation()
    vocabulary = int(text_table(read_config(model))["vocab_size"])
    server, url = None, options.url[0] if options.url else ""
    if not url:
        max_logprobs = protocol.support_limit(truncation.top_k, vocabulary) if truncation.is_active else 1
        launch = VllmLaunch(options, model, rows=rows, max_logprobs=max_logprobs, threads=threads)
        server = ServerProcess(VllmDialect.name, launch, log_path)
    return ServerRollout(
        VllmDialect(options, vocabulary),
        options,
        server=server,
        url=url,
        model=model,
        stop=stop,
        rows=rows,
        sampling=Sampling(temperature, max_new_tokens, stop.token_ids, stop.strings, truncation),
    )
