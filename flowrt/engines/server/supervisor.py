"""Supervision of the server behind an engine: its availability, its weights, and its replacement after a failure.

- A server that died, hung or failed during a weight update gets no requests until it is replaced, or has loaded all
  of the current weights.
- All methods run in one event loop.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from flowrt.engines.hf import load_model, named_parameters, parameter_shapes, weight_bytes
from flowrt.engines.options import ServerOptions
from flowrt.engines.server.client import ServerClient
from flowrt.engines.server.dialect import Continuation, Dialect, ServerFacts, Staged, WeightTransfer
from flowrt.engines.server.layout import Layout
from flowrt.engines.server.process import ServerProcess
from flowrt.errors import EngineError, EngineGone, WaitExpired
from flowrt.runtime.time_limits import MIN_BYTES_PER_S, generation_limit_s
from flowrt.runtime.waits import BoundedElsewhere, LivenessTimeout, cancel_and_wait, locked, pause, wait_until
from flowrt.transport.weights.snapshot import Snapshot

log = logging.getLogger("flowrt")
LOCK = BoundedElsewhere("start_s, request_s or update_s of the server's options, for each server that is tried")
SIGNS_PER_TIMEOUT = 16
"""Requests for a sign of life within ``request_s``."""
CLOSE_TIMEOUT_S = 5.0
EARLIER_WORK = "earlier work on the server"


class ServerSupervisor:
    """The current server, and its replacements.

    ``incarnation`` is the number of servers so far, ``aborts`` how often running sequences were aborted. A caller whose
    request was not completed compares them with their values at the time of the request.

    Args:
        dialect: the kind of server.
        options: options of the server.
        server: the server process; None for a running server that this worker did not start.
        url: address of a running server.
        model: directory of the checkpoint.
    """

    def __init__(
        self, dialect: Dialect, options: ServerOptions, server: ServerProcess | None, *, url: str, model: Path
    ) -> None:
        self._dialect = dialect
        self._options = options
        self._server = server
        self._given_url = url
        self._model = model
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
        self.facts = ServerFacts("")
        """What is known of the current server."""
        self._requests = 0
        self._restarts_left = options.max_server_restarts
        self._snapshot: Snapshot | None = None  # the weights that the server should have; None: the checkpoint's
        self._client: ServerClient | None = None
        self._transfer: WeightTransfer | None = None
        self._staged: tuple[Snapshot, Staged] | None = None
        self._tried: Snapshot | None = None
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

    async def generate(self, part: Continuation) -> Any:
        """Send a request for the rest of a sequence. Returns the decoded answer.

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
            limit_s = generation_limit_s(self._options.request_s, part.sampling.max_new_tokens - part.generated)
            answer = self._client.post(self._dialect.generate(part), limit_s)
            return await wait_until(answer, self._signs, what, self._described())
        except WaitExpired as late:
            raise EngineGone(f"{late}, which gives no sign of life") from None
        finally:
            self._requests -= 1

    async def _watch_server(self) -> None:
        """Extend the time limit of all requests with each sign of life of the server, while there are requests."""
        interval_s = self._options.request_s / SIGNS_PER_TIMEOUT
        while self._requests:
            if self._client is not None and await self._dialect.is_generating(self._client, interval_s):
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
                    await self._client.post(self._dialect.pause("abort"), self._update_s)
                yield
                with suppress(EngineError):
                    await self._client.post(self._dialect.resume(), self._update_s)
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
            log.warning("the %s server failed: %s%s", self._dialect.name, reason, exit_summary)
            try:
                await self._reset()
            except EngineError as error:
                reason = error
            else:
                version = 0 if self._snapshot is None else self._snapshot.version
                log.warning("the %s server is back, with version %d", self._dialect.name, version)
                return
        raise EngineError(
            f"the {self._dialect.name} server failed more often than {self._dialect.table}.max_server_restarts "
            f"({self._options.max_server_restarts}) allows; last error: {reason}"
        )

    async def _reset(self) -> None:
        """Start the server, or abort the requests of a running one, and load the current weights."""
        self.incarnation += 1
        self._unstage()  # a staged update is for the previous server
        if self._client is not None:
            await self._client.close()
        server, dialect = self._server, self._dialect
        url, key = (self._given_url, dialect.given_key()) if server is None else (server.start(), server.key)
        self._client = client = ServerClient(url, dialect.name, key)
        try:
            if server is None:
                await client.wait_healthy(self._start_s, lambda: True, revive=dialect.health_resume)
            else:
                await client.wait_healthy(self._start_s, server.alive)
        except EngineGone as gone:
            raise EngineGone(f"{gone}; {server.exit_summary()}" if server is not None else str(gone)) from None
        self.facts = await dialect.facts(client)
        log.info("%s %s on %s at %s", dialect.name, self.facts.release, self.facts.device, url)
        self._transfer = dialect.transfer(self._layout, self.facts)
        if server is not None:
            server.on_ready()
        else:
            await dialect.take_over(client, self._update_s)
        if self._snapshot is not None:
            await self._load(self._snapshot, flush=True)
        if server is None:
            await client.post(dialect.resume(), self._update_s)

    async def _update(self, snapshot: Snapshot) -> None:
        """Update the weights, with one deadline for the whole update."""
        what = f"version {snapshot.version} to be loaded"
        try:
            await wait_until(self._update_weights(snapshot), self._update_s, what, self._described())
        except WaitExpired as late:
            raise EngineGone(str(late)) from None

    async def _update_weights(self, snapshot: Snapshot) -> None:
        """Stage, pause running sequences, load, verify, resume."""
        assert self._client is not None
        await self._ensure_staged(snapshot)
        deadline_s = self._update_s
        # Without versions of tokens, running sequences are aborted, so that a response has only one version.
        mode = self._options.pause if self.facts.token_versions else "abort"
        running = self._requests > 0
        if running:
            self.aborts += mode == "abort"
            await self._client.post(self._dialect.pause(mode), deadline_s)
        # Sequences that are paused in place still need their keys and values in the cache.
        await self._load(snapshot, flush=not (running and mode == "in_place"))
        if running:
            await self._client.post(self._dialect.resume(), deadline_s)

    async def _load(self, snapshot: Snapshot, *, flush: bool) -> None:
        """Load and verify all weights."""
        assert self._client is not None
        staged = await self._ensure_staged(snapshot)
        with self._naming(snapshot):
            try:
                loading = staged.load(self._client, flush=flush)
                await wait_until(loading, self._update_s, f"version {snapshot.version} to be loaded", self.url)
            finally:
                self._unstage()

    async def _ensure_staged(self, snapshot: Snapshot) -> Staged:
        """The staged update of this snapshot, which is staged if necessary."""
        assert self._client is not None
        assert self._transfer is not None
        if self._staged is None or self._staged[0] is not snapshot:
            self._unstage()
            what = f"version {snapshot.version} to be staged"
            with self._naming(snapshot):
                staging = self._transfer.stage(self._client, snapshot)
                self._staged = snapshot, await wait_until(staging, self._update_s, what, self.url)
        return self._staged[1]

    def _unstage(self) -> None:
        if self._staged is not None:
            self._staged[1].close()
            self._staged = None

    def _described(self) -> str:
        """The server, as in errors."""
        return f"the {self._dialect.name} server at {self.url}"

    @contextmanager
    def _naming(self, snapshot: Snapshot) -> Iterator[None]:
        """Add the version and the way of the weights to errors."""
        try:
            yield
        except WaitExpired as late:
            raise EngineGone(str(late)) from None
        except EngineError as error:
            raise type(error)(f"version {snapshot.version} by {self._dialect.weights}: {error}") from error
