"""The server behind an engine: whether it may be given work, which weights it has, and how it comes back when it fails.

A server that died, hung or failed in the middle of a change of weights is given no work until it is a new one, or has
taken all of the present weights. Everything here happens in one event loop.
"""

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrt.engines import sglang_protocol as said
from flowrt.engines.checkpoint import load_model, named_parameters, parameter_shapes
from flowrt.engines.options import SglangOptions
from flowrt.engines.sglang_checksums import Sums
from flowrt.engines.sglang_key import given_key
from flowrt.engines.sglang_layout import Layout
from flowrt.engines.sglang_link import SglangLink
from flowrt.engines.sglang_server import SglangServer
from flowrt.engines.sglang_weights import Staged, WeightWay, weight_way
from flowrt.errors import ConfigError, EngineError, EngineGone, WaitExpired
from flowrt.transport.weights import Snapshot
from flowrt.waiting import Guard, held, until

log = logging.getLogger("flowrt")
BEFORE = Guard("start_s, request_s or update_s of rollout.sglang, each time there is a server left to try")


@dataclass(frozen=True, slots=True)
class _Ready:
    """A snapshot for which all is done that a server need not stand still for."""

    snapshot: Snapshot
    staged: Staged
    sums: Sums | None  # none: the server sums up in a way of its own


class SglangHost:
    """One server after another, at one address after another if need be; ``server`` is None for one of somebody else.

    ``lives`` counts servers, ``cuts`` how often running sequences were cut: whoever asked before can tell that its
    request ended for one of these reasons.
    """

    def __init__(self, options: SglangOptions, model: Path, server: SglangServer | None) -> None:
        self._options = options
        self._model = model
        self._server = server
        self._layout = Layout(parameter_shapes(model))
        self.version = 0
        self.lives = 0
        self.cuts = 0
        self.serving = asyncio.Event()
        """Clear while the server is down, its weights are in doubt or being changed."""
        self.can = said.Capabilities(update_session=True, token_versions=True)
        self._requests = 0
        self._restarts_left = options.restarts
        self._snapshot: Snapshot | None = None  # what the server should have; none: what it was started with
        self._link: SglangLink | None = None
        self._way: WeightWay | None = None
        self._staged: _Ready | None = None
        self._tried: Snapshot | None = None
        self._sums_up = False
        self._lock = asyncio.Lock()

    @property
    def url(self) -> str:
        """Where the server is; it may be another one after a restart."""
        return "" if self._link is None else self._link.url

    async def start(self) -> None:
        """A server that has the checkpoint's weights, whatever it had before."""
        async with held(self._lock, BEFORE, "what is done to the SGLang server before this", "this worker"):
            if self._server is None:
                model = await asyncio.to_thread(load_model, self._model)
                self._snapshot = await asyncio.to_thread(Snapshot.take, 0, named_parameters(model))
            await self._renew()
            self.serving.set()

    async def generate(self, call: said.Call) -> Any:
        """The server's answer. Raises EngineGone when there will be none."""
        assert self._link is not None
        self._requests += 1
        try:
            return await self._link.post(call, self._options.request_s)
        finally:
            self._requests -= 1

    def has_tried(self, snapshot: Snapshot) -> bool:
        """Whether `stage` was called with it."""
        return self._tried is snapshot

    async def stage(self, snapshot: Snapshot) -> None:
        """Do what the server need not stand still for. What goes wrong here is done again by `swap`, and told there."""
        async with held(self._lock, BEFORE, "what is done to the SGLang server before this", "this worker"):
            self._tried = snapshot
            try:
                await self._ready(snapshot)
            except EngineError as error:
                log.debug("%s", error)

    async def swap(self, snapshot: Snapshot) -> None:
        """Have the server use these weights, for what it runs, too. Raises EngineError when it cannot be made to."""
        async with held(self._lock, BEFORE, "what is done to the SGLang server before this", "this worker"):
            self.serving.clear()
            self._snapshot = snapshot
            try:
                await self._update(snapshot)
            except EngineError as failed:
                await self._restore(failed)
            self.version = snapshot.version
            self.serving.set()

    async def revive(self, life: int, reason: EngineGone) -> None:
        """The server of this life is gone: the first to see it brings the next one, the others wait for that."""
        async with held(self._lock, BEFORE, "what is done to the SGLang server before this", "this worker"):
            if self.lives == life:
                self.serving.clear()
                await self._restore(reason)
                self.serving.set()

    async def close(self) -> None:
        """Drop the connections; the server is left as it is."""
        self._restarts_left = 0
        self._unstage()
        if self._link is not None:
            if self._server is None and self._way is not None:
                await self._way.close(self._link)
            await self._link.close()

    async def _restore(self, reason: EngineError) -> None:
        while self._restarts_left > 0:
            self._restarts_left -= 1
            words = "" if self._server is None else f"; {self._server.last_words()}"
            log.warning("the SGLang server failed: %s%s", reason, words)
            try:
                await self._renew()
            except EngineError as again:
                reason = again
            else:
                version = 0 if self._snapshot is None else self._snapshot.version
                log.warning("the SGLang server is back, with version %d", version)
                return
        raise EngineError(
            f"the SGLang server failed more often than rollout.sglang.restarts ({self._options.restarts}) allows; "
            f"at last: {reason}"
        )

    async def _renew(self) -> None:
        """A server that is up, has forgotten earlier requests, and has all of the weights that it should have."""
        self.lives += 1
        self._unstage()  # for a server that is gone
        if self._link is not None:
            await self._link.close()
        options, server = self._options, self._server
        url, key = (options.url, given_key(os.environ)) if server is None else (server.start(), server.key)
        self._link = SglangLink(url, key)
        try:
            await self._link.wait_healthy(options.start_s, (lambda: True) if server is None else server.alive)
        except EngineGone as gone:
            raise EngineGone(f"{gone}; {server.last_words()}" if server is not None else str(gone)) from None
        await self._probe()
        if server is not None:
            server.is_up()
        else:
            await self._link.post(said.pause("abort"), options.update_s)  # requests of an earlier life end here
            if self.can.update_session:
                await self._end_session()
        if self._snapshot is not None:
            await self._load(self._snapshot, flush=True)
        if server is None:
            await self._link.post(said.resume(), options.update_s)

    async def _end_session(self) -> None:
        """A change of weights that was given up, by us or by a worker before us, may have left its session open."""
        assert self._link is not None
        try:
            await self._link.post(said.end_session(), self._options.update_s)
        except EngineGone:
            raise
        except EngineError as refused:
            log.debug("no session was open: %s", refused)

    async def _probe(self) -> None:
        """What the server can, how many of its processes hold weights, and whether we know how it sums them up."""
        assert self._link is not None
        about = await self._link.get("/server_info")
        self.can = said.capabilities(str(about.get("version")))
        ranks = int(about.get("tp_size") or 1)
        for name in ("dp_size", "pp_size"):
            if int(about.get(name) or 1) > 1:
                raise EngineError(
                    f"the SGLang server at {self._link.url} has {name} {about[name]}: weights can be changed "
                    "in one part only; use 1, and more rollout workers"
                )
        if about.get("device") == "npu" and self._options.weights == "broadcast":
            raise ConfigError(
                f"the SGLang server at {self._link.url} works on an NPU, and rollout.sglang.weights broadcast goes by "
                "gloo, which takes nothing from NPUs; use disk or tensor"
            )
        self._way = weight_way(self._options, self._layout, ranks)
        self._sums_up = about.get("device") == "cpu" and ranks == 1 and about.get("dtype") == "float32"
        log.info("SGLang %s on %s at %s", about.get("version"), about.get("device"), self._link.url)

    async def _update(self, snapshot: Snapshot) -> None:
        """One transaction with one deadline."""
        what = f"version {snapshot.version} to be taken"
        try:
            await until(self._change(snapshot), self._options.update_s, what, f"the SGLang server at {self.url}")
        except WaitExpired as late:
            raise EngineGone(str(late)) from None

    async def _change(self, snapshot: Snapshot) -> None:
        """Stage, pause what runs, load, check, continue."""
        assert self._link is not None
        await self._ready(snapshot)
        deadline_s = self._options.update_s
        # Where the server cannot tell versions token by token, what runs is cut: then all of a piece is of one version.
        mode = self._options.pause if self.can.token_versions else "abort"
        running = self._requests > 0
        if running:
            self.cuts += mode == "abort"
            await self._link.post(said.pause(mode), deadline_s)
        # What was paused in place needs the keys and values that are in the cache.
        await self._load(snapshot, flush=not (running and mode == "in_place"))
        if running:
            await self._link.post(said.resume(), deadline_s)

    async def _load(self, snapshot: Snapshot, *, flush: bool) -> None:
        """Put all of the weights in, and see that they are what was sent."""
        assert self._link is not None
        link, deadline_s = self._link, self._options.update_s
        ready = await self._ready(snapshot)
        with self._told(snapshot):
            try:
                loading = ready.staged.load(link, self.can, flush=flush)
                await until(loading, deadline_s, f"version {snapshot.version} to be loaded", link.url)
                if ready.sums is not None:
                    told = await link.post(said.checksum(), deadline_s)
                    await asyncio.to_thread(ready.sums.check, told)
            finally:
                self._unstage()

    async def _ready(self, snapshot: Snapshot) -> _Ready:
        """The snapshot, staged now if it was not before."""
        if self._staged is None or self._staged.snapshot is not snapshot:
            self._unstage()
            what = f"version {snapshot.version} to be staged"
            with self._told(snapshot):
                self._staged = await until(self._stage(snapshot), self._options.update_s, what, self.url)
        return self._staged

    async def _stage(self, snapshot: Snapshot) -> _Ready:
        assert self._link is not None
        assert self._way is not None
        sums = Sums(self._layout, snapshot) if self._sums_up else None
        if sums is not None:
            await asyncio.to_thread(sums.prepare)
        return _Ready(snapshot, await self._way.stage(self._link, snapshot), sums)

    def _unstage(self) -> None:
        if self._staged is not None:
            self._staged.staged.close()
            self._staged = None

    @contextmanager
    def _told(self, snapshot: Snapshot) -> Iterator[None]:
        """Errors say of which weights they are."""
        try:
            yield
        except WaitExpired as late:
            raise EngineGone(str(late)) from None
        except EngineError as error:
            raise type(error)(f"version {snapshot.version} by {self._options.weights}: {error}") from error
