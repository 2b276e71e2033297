"""SGLang as a kind of generation server."""

import logging
import os
from pathlib import Path
from typing import Any

from flowrt.engines.options import PauseMode, SglangOptions, Truncation
from flowrt.engines.server.client import Call, ServerClient
from flowrt.engines.server.dialect import Continuation, Dialect, PartialResponse, Sampling, ServerFacts, WeightTransfer
from flowrt.engines.server.engine import ServerRollout
from flowrt.engines.server.layout import Layout
from flowrt.engines.server.process import ServerProcess
from flowrt.engines.sglang import protocol
from flowrt.engines.sglang.server_process import SglangLaunch, given_key
from flowrt.engines.sglang.weights import weight_transfer
from flowrt.engines.stopping import StopConditions
from flowrt.errors import ConfigError, EngineError, EngineGone

log = logging.getLogger("flowrt")
GENERATION_CHECK = "/health_generate"
"""Answers when the scheduler has produced output since the request, for this request or for others."""


class SglangDialect(Dialect):
    """Servers of SGLang.

    Args:
        options: options of the server.
        needs_tokenizer: whether the server has to search for stop strings.
    """

    name = "SGLang"
    table = "rollout.sglang"
    health_resume = protocol.resume()

    def __init__(self, options: SglangOptions, *, needs_tokenizer: bool) -> None:
        self.weights = options.weights
        self._options = options
        self._needs_tokenizer = needs_tokenizer
        self._can = protocol.Capabilities(update_session=True, token_versions=True, supports=True)
        self._has_checksums = False

    def given_key(self) -> str:
        return given_key(os.environ)

    async def facts(self, client: ServerClient) -> ServerFacts:
        about = await client.get("/server_info")
        can = self._can = protocol.capabilities(str(about.get("version")))
        ranks = int(about.get("tp_size") or 1)
        for name in ("dp_size", "pp_size"):
            if int(about.get(name) or 1) > 1:
                raise EngineError(
                    f"the SGLang server at {client.url} has {name} {about[name]}: weights can be changed in one part "
                    "only; use 1, and more rollout workers"
                )
        if about.get("device") == "npu" and self._options.weights == "broadcast":
            raise ConfigError(
                f"the SGLang server at {client.url} works on an NPU, and rollout.sglang.weights broadcast uses gloo, "
                "which does not support NPUs; use disk or tensor"
            )
        if self._needs_tokenizer and about.get("skip_tokenizer_init"):
            raise EngineError(
                f"the SGLang server at {client.url} has no tokenizer, which rollout.stop needs; start it without "
                "--skip-tokenizer-init"
            )
        if unknown := protocol.unknown_preferences(about):
            raise EngineError(
                f"the SGLang server at {client.url} prefers values of {', '.join(unknown)}, which requests do not "
                "overrule; start it without them in --preferred-sampling-params"
            )
        self._has_checksums = about.get("device") == "cpu" and ranks == 1 and about.get("dtype") == "float32"
        return ServerFacts(
            release=str(about.get("version")),
            ranks=ranks,
            device=str(about.get("device")),
            token_versions=can.token_versions,
            no_supports="" if can.supports else f"use {protocol.release(protocol.SUPPORTS_SINCE)} or newer",
            longest_input=about.get("max_req_input_len"),
        )

    async def take_over(self, client: ServerClient, deadline_s: float) -> None:
        await client.post(protocol.pause("abort"), deadline_s)
        if not self._can.update_session:
            return
        try:
            await client.post(protocol.end_session(), deadline_s)
        except EngineGone:
            raise
        except EngineError as refused:
            log.debug("no session was open: %s", refused)

    async def is_generating(self, client: ServerClient, deadline_s: float) -> bool:
        try:
            await client.get(GENERATION_CHECK, deadline_s)
        except EngineError:
            return False
        return True

    def generate(self, part: Continuation) -> Call:
        return protocol.generate(part)

    def parse_generated(self, answer: Any, part: Continuation) -> PartialResponse:
        return protocol.parse_generated(answer, self._can, part.version, with_supports=part.with_supports)

    def pause(self, mode: PauseMode) -> Call:
        return protocol.pause(mode)

    def resume(self) -> Call:
        return protocol.resume()

    def transfer(self, layout: Layout, facts: ServerFacts) -> WeightTransfer:
        return weight_transfer(self._options, self._can, layout, ranks=facts.ranks, has_checksums=self._has_checksums)


def sglang_server(
    options: SglangOptions, model: Path, *, rows: int, threads: int, log: Path, has_tokenizer: bool = False
) -> ServerProcess:
    """A server of SGLang that is not started yet (see `SglangLaunch`)."""
    launch = SglangLaunch(options, model, rows=rows, threads=threads, log=log, has_tokenizer=has_tokenizer)
    return ServerProcess(SglangDialect.name, launch, log)


def sglang_rollout(
    options: SglangOptions,
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
    """A rollout engine on an SGLang server.

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
    has_strings = bool(stop.strings)
    server, url = None, options.url[0] if options.url else ""
    if not url:
        server = sglang_server(options, model, rows=rows, threads=threads, log=log_path, has_tokenizer=has_strings)
    return ServerRollout(
        SglangDialect(options, needs_tokenizer=has_strings),
        options,
        server=server,
        url=url,
        model=model,
        stop=stop,
        rows=rows,
        sampling=Sampling(temperature, max_new_tokens, stop.token_ids, stop.strings, truncation or Truncation()),
    )
