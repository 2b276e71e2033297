"""Supervision of the server behind an engine: its availability, its weights, and its replacement after a failure.

- A server that died, hung or failed during a weight update gets no requests until it is replaced, or has loaded all
  of the current weights.
- All methods run in one event loop.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrt.engines.hf import load_model, named_parameters, parameter_shapes, weight_bytes
from flowrt.engines.options import SglangOptions
from flowrt.engines.sglang import protocol
from flowrt.engines.sglang.client import SglangClient
from flowrt.engines.sglang.layout import ExpectedChecksums, Layout
from flowrt.engines.sglang.server_process import SglangServer, given_key
from flowrt.engines.sglang.weights import Staged, WeightTransfer, weight_transfer
from flowrt.errors import ConfigError, EngineError, EngineGone, WaitExpired
from flowrt.runtime.time_limits import MIN_BYTES_PER_S, generation_limit_s
from flowrt.runtime.waits import BoundedElsewhere, LivenessTimeout, cancel_and_wait, locked, pause, wait_until
from flowrt.transport.weights.snapshot import Snapshot

log = logging.getLogger("flowrt")
LOCK = BoundedElsewhere("start_s, request_s or update_s of rollout.sglang, for each server that is tried")
SIGNS_PER_TIMEOUT = 16
"""Requests for a sign of life within ``request_s``."""
CLOSE_TIMEOUT_S = 5.0
EARLIER_WORK = "earlier work on the SGLang server"


@dataclass(frozen=True, slots=True)
class _StagedUpdate:
    """A snapshot that is ready to be loaded, and the checksums of a server that has loaded it."""

    snapshot: Snapshot
    staged: Staged
    checksums: ExpectedChecksums | None
    """None if the server computes other checksums."""


class SglangSupervisor:
    """The current server, and its replacements.

    ``incarnation`` is the number of servers so far, ``aborts`` how often running sequences were aborted. A caller whose
    request was not completed compares them with their values at the time of the request.

    Args:
        options: options of the server.
        model: directory of the checkpoint.
        server: the server process; None for a running server that this worker did not start.
        needs_tokenizer: whether the server has to search for stop strings.
    """

    def __init__(
        self, options: SglangOptions, model: Path, server: SglangServer | None, *, needs_tokenizer: bool = False
    ) -> None:
        self._options = options
        self._model = model
        self._server = server
        self._needs_tokenizer = needs_tokenizer
        self._layout = Layout(parameter_shapes(model))
        extra_s = weight_bytes(model) / MIN_BYTES_PER_S
        self._start_s, self._update_s = options.start_s + extra_s, options.update_s + extra_s
        self._signs = LivenessTimeout(options.request_s)
        self._watch: asyncio.Task[None] | None = None
        self.version = 0
        self.incarnation = 0
        self.aborts = 0
        self.serving = asyncio.Event()
        """Clear while the server is down, or its weights are uncertain or being updated."""
        self.can = protocol.Capabilities(update_session=True, token_versions=True, supports=True)
        self.devices = 0
        """Number of accelerators of the server."""
        self.longest_input: int | None = None
        """From this number of tokens on the server refuses a request; None if it does not say so."""
        self._requests = 0
        self._restarts_left = options.max_server_restarts
        self._snapshot: Snapshot | None = None  # the weights that the server should have; None: the checkpoint's
        self._client: SglangClient | None = None
        self._transfer: WeightTransfer | None = None
        self._staged: _StagedUpdate | None = None
        self._tried: Snapshot | None = None
        self._has_checksums = False
        self._lock = asyncio.Lock()

    @property
    def url(self) -> str:
        """Address of the server, which may change when it is replaced."""
        return "" if self._client is None else self._client.url

    async def start(self) -> None:
        """Start a server, or reset the running one, with the checkpoint's weights.

        Raises EngineError if it does not become ready, and ConfigError for options that its device does not support.
        """
        async with locked(self._lock, LOCK, EARLIER_WORK, "this worker"):
            if self._server is None:
                model = await asyncio.to_thread(load_model, self._model)
                self._snapshot = await asyncio.to_thread(Snapshot.take, 0, named_parameters(model))
            await self._reset()
            self.serving.set()

    async def generate(self, call: protocol.Call, max_new_tokens: int) -> Any:
        """Send a request for a sequence. Returns the decoded response.

        Args:
            call: the request.
            max_new_tokens: maximum number of tokens that it may generate.

        Raises:
            EngineGone: if the server fails, gives no sign of life for ``request_s`` seconds, or generates the sequence
                at less than a token per second.
            EngineError: if the server refuses the request.
        """
        assert self._client is not None
        self._requests += 1
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watch_server())
        what = "a generated sequence"
        try:
            answer = self._client.post(call, generation_limit_s(self._options.request_s, max_new_tokens))
            return await wait_until(answer, self._signs, what, f"the SGLang server at {self.url}")
        except WaitExpired as late:
            raise EngineGone(f"{late}, which gives no sign of life") from None
        finally:
            self._requests -= 1

    async def _watch_server(self) -> None:
        """Extend the time limit of all requests with each sign of life of the server, while there are requests."""
        interval_s = self._options.request_s / SIGNS_PER_TIMEOUT
        while self._requests:
            if self._client is not None and await self._client.is_generating(interval_s):
                self._signs.renew()
            await pause(interval_s)

    def has_tried_staging(self, snapshot: Snapshot) -> bool:
        """Whether `stage` was called with this snapshot."""
        return self._tried is snapshot

    async def stage(self, snapshot: Snapshot) -> None:
        """Prepare `swap` while the server generates. An EngineError is only logged: `swap` stages again."""
        async with locked(self._lock, LOCK, EARLIER_WORK, "this worker"):
            self._tried = snapshot
            try:
                await self._ensure_staged(snapshot)
            except EngineError as error:
                log.debug("%s", error)

    async def swap(self, snapshot: Snapshot) -> None:
        """Load these weights, with which running sequences continue. A server that fails is replaced.

        Raises EngineError if no restart is left.
        """
        async with locked(self._lock, LOCK, EARLIER_WORK, "this worker"):
            self.serving.clear()
            self._snapshot = snapshot
            try:
                await self._update(snapshot)
            except EngineError as failed:
                await self._restore(failed)
            self.version = snapshot.version
            self.serving.set()

    @asynccontextmanager
    async def interrupted(self) -> AsyncIterator[None]:
        """End the running requests within a block, with what is generated; their callers send them again after it.

        A failure of the server is left to these callers.
        """
        async with locked(self._lock, LOCK, EARLIER_WORK, "this worker"):
            if self._client is None or not self.serving.is_set():
                yield
                return
            self.serving.clear()
            self.aborts += 1
            try:
                with suppress(EngineError):
                    await self._client.post(protocol.pause("abort"), self._update_s)
                yield
                with suppress(EngineError):
                    await self._client.post(protocol.resume(), self._update_s)
            finally:
                self.serving.set()

    async def replace(self, incarnation: int, reason: EngineGone) -> None:
        """Replace a lost server, unless an earlier call has done so.

        Args:
            incarnation: `incarnation` of the lost server.
            reason: the error by which the loss was detected.

        Raises EngineError if no restart is left.
        """
        async with locked(self._lock, LOCK, EARLIER_WORK, "this worker"):
            if self.incarnation == incarnation:
                self.serving.clear()
                await self._restore(reason)
                self.serving.set()

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        self._restarts_left = 0
        if self._watch is not None:
            await cancel_and_wait([self._watch], CLOSE_TIMEOUT_S)
        self._unstage()
        if self._client is not None:
            if self._server is None and self._transfer is not None:
                await self._transfer.close(self._client)
            await self._client.close()

    async def _restore(self, reason: EngineError) -> None:
        """Start or reset servers until one has the current weights. Raises EngineError if no restart is left."""
        while self._restarts_left > 0:
            self._restarts_left -= 1
            exit_summary = "" if self._server is None else f"; {self._server.exit_summary()}"
            log.warning("the SGLang server failed: %s%s", reason, exit_summary)
            try:
                await self._reset()
            except EngineError as error:
                reason = error
            else:
                version = 0 if self._snapshot is None else self._snapshot.version
                log.warning("the SGLang server is back, with version %d", version)
                return
        raise EngineError(
            f"the SGLang server failed more often than rollout.sglang.max_server_restarts "
            f"({self._options.max_server_restarts}) allows; last error: {reason}"
        )

    async def _reset(self) -> None:
        """Start the server, or abort the requests of a running one, and load the current weights."""
        self.incarnation += 1
        self._unstage()  # a staged update is for the previous server
        if self._client is not None:
            await self._client.close()
        options, server = self._options, self._server
        url, key = (options.url[0], given_key(os.environ)) if server is None else (server.start(), server.key)
        self._client = SglangClient(url, key)
        try:
            if server is None:  # an earlier worker may have left it paused, in which state it is not healthy
                await self._client.wait_healthy(self._start_s, lambda: True, revive=protocol.resume())
            else:
                await self._client.wait_healthy(self._start_s, server.alive)
        except EngineGone as gone:
            raise EngineGone(f"{gone}; {server.exit_summary()}" if server is not None else str(gone)) from None
        await self._probe()
        if server is not None:
            server.on_ready()
        else:
            await self._client.post(protocol.pause("abort"), self._update_s)  # ends requests of an earlier worker
            if self.can.update_session:
                await self._end_session()
        if self._snapshot is not None:
            await self._load(self._snapshot, flush=True)
        if server is None:
            await self._client.post(protocol.resume(), self._update_s)

    async def _end_session(self) -> None:
        """End the session that an interrupted update, of this or an earlier worker, may have left open."""
        assert self._client is not None
        try:
            await self._client.post(protocol.end_session(), self._update_s)
        except EngineGone:
            raise
        except EngineError as refused:
            log.debug("no session was open: %s", refused)

    async def _probe(self) -> None:
        """Find out the server's capabilities, its number of ranks, and whether its checksums can be computed here."""
        assert self._client is not None
        about = await self._client.get("/server_info")
        self.can = protocol.capabilities(str(about.get("version")))
        ranks = int(about.get("tp_size") or 1)
        for name in ("dp_size", "pp_size"):
            if int(about.get(name) or 1) > 1:
                raise EngineError(
                    f"the SGLang server at {self._client.url} has {name} {about[name]}: weights can be changed "
                    "in one part only; use 1, and more rollout workers"
                )
        if about.get("device") == "npu" and self._options.weights == "broadcast":
            raise ConfigError(
                f"the SGLang server at {self._client.url} works on an NPU, and rollout.sglang.weights broadcast uses "
                "gloo, which does not support NPUs; use disk or tensor"
            )
        if self._needs_tokenizer and about.get("skip_tokenizer_init"):
            raise EngineError(
                f"the SGLang server at {self._client.url} has no tokenizer, which rollout.stop needs; start it without "
                "--skip-tokenizer-init"
            )
        if unknown := protocol.unknown_preferences(about):
            raise EngineError(
                f"the SGLang server at {self._client.url} prefers values of {', '.join(unknown)}, which requests do "
                "not overrule; start it without them in --preferred-sampling-params"
            )
        self.longest_input = about.get("max_req_input_len")
        self.devices = 0 if about.get("device") == "cpu" else ranks
        self._transfer = weight_transfer(self._options, self._layout, ranks)
        self._has_checksums = about.get("device") == "cpu" and ranks == 1 and about.get("dtype") == "float32"
        log.info("SGLang %s on %s at %s", about.get("version"), about.get("device"), self._client.url)

    async def _update(self, snapshot: Snapshot) -> None:
        """Update the weights, with one deadline for the whole update."""
        what = f"version {snapshot.version} to be loaded"
        try:
            await wait_until(self._update_weights(snapshot), self._update_s, what, f"the SGLang server at {self.url}")
        except WaitExpired as late:
            raise EngineGone(str(late)) from None

    async def _update_weights(self, snapshot: Snapshot) -> None:
        """Stage, pause running sequences, load, verify, resume."""
        assert self._client is not None
        await self._ensure_staged(snapshot)
        deadline_s = self._update_s
        # Without versions of tokens, running sequences are aborted, so that a response has only one version.
        mode = self._options.pause if self.can.token_versions else "abort"
        running = self._requests > 0
        if running:
            self.aborts += mode == "abort"
            await self._client.post(protocol.pause(mode), deadline_s)
        # Sequences that are paused in place still need their keys and values in the cache.
        await self._load(snapshot, flush=not (running and mode == "in_place"))
        if running:
            await self._client.post(protocol.resume(), deadline_s)

    async def _load(self, snapshot: Snapshot, *, flush: bool) -> None:
        """Load all weights and compare their checksums."""
        assert self._client is not None
        client, deadline_s = self._client, self._update_s
        update = await self._ensure_staged(snapshot)
        with self._naming(snapshot):
            try:
                loading = update.staged.load(client, self.can, flush=flush)
                await wait_until(loading, deadline_s, f"version {snapshot.version} to be loaded", client.url)
                if update.checksums is not None:
                    reported = await client.post(protocol.checksum(), deadline_s)
                    await asyncio.to_thread(update.checksums.check, reported)
            finally:
                self._unstage()

    async def _ensure_staged(self, snapshot: Snapshot) -> _StagedUpdate:
        """The staged update of this snapshot, which is staged if necessary."""
        if self._staged is None or self._staged.snapshot is not snapshot:
            self._unstage()
            what = f"version {snapshot.version} to be staged"
            with self._naming(snapshot):
                self._staged = await wait_until(self._stage(snapshot), self._update_s, what, self.url)
        return self._staged

    async def _stage(self, snapshot: Snapshot) -> _StagedUpdate:
        assert self._client is not None
        assert self._transfer is not None
        checksums = ExpectedChecksums(self._layout, snapshot) if self._has_checksums else None
        if checksums is not None:
            await asyncio.to_thread(checksums.prepare)
        return _StagedUpdate(snapshot, await self._transfer.stage(self._client, snapshot), checksums)

    def _unstage(self) -> None:
        if self._staged is not None:
            self._staged.staged.close()
            self._staged = None

    @contextmanager
    def _naming(self, snapshot: Snapshot) -> Iterator[None]:
        """Add the version and the kind of transfer to errors."""
        try:
            yield
        except WaitExpired as late:
            raise EngineGone(str(late)) from None
        except EngineError as error:
            raise type(error)(f"version {snapshot.version} by {self._options.weights}: {error}") from error
