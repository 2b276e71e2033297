"""A rollout engine that drives an SGLang server over HTTP: one that it starts, or one that is running.

Sequences are requests of their own, so that each comes back when it ends and the server batches them as it likes. It
goes on while nobody looks. What a server had when it failed is sent again, from where the sequences were known to be.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flowrt.engines import sglang_protocol as said
from flowrt.engines.options import SglangOptions
from flowrt.engines.protocols import Interrupt, Prompt, Response
from flowrt.engines.sglang_host import SglangHost
from flowrt.engines.sglang_server import SglangServer
from flowrt.errors import EngineError, EngineGone, WaitExpired
from flowrt.transport.weights import Snapshot
from flowrt.waiting import Guard, blocking, cancelled, joined, taken, until

LOOK_EVERY_S = 0.005
CLOSE_S = 15.0
OWN_DEADLINES = Guard("the deadlines of the server's start, of its requests and of changes of weights")


@dataclass(slots=True)
class _Begun:
    """A sequence, with what is known of its answer."""

    prompt: Prompt
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)

    def add(self, piece: said.Piece) -> None:
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        for version, count in zip(piece.spans[::2], piece.spans[1::2], strict=True):
            if self.spans and self.spans[-2] == version:
                self.spans[-1] += count
            else:
                self.spans += [version, count]

    def response(self) -> Response:
        return Response(
            self.prompt.key,
            torch.tensor(self.tokens, dtype=torch.int32),
            torch.tensor(self.logprobs, dtype=torch.float32),
            tuple(self.spans),
        )


class SglangRollout:
    """At most ``rows`` sequences at a time, in an event loop on a thread of its own.

    Seeds are sent with every request; a server obeys them if it was started with --enable-deterministic-inference.
    """

    def __init__(
        self,
        options: SglangOptions,
        model: Path,
        *,
        eos_id: int,
        rows: int,
        max_new_tokens: int,
        temperature: float,
        threads: int,
        log_path: Path,
    ) -> None:
        if temperature <= 0:
            raise EngineError(
                f"rollout temperature is {temperature}; use a value above 0 (greedy is a prompt's choice)"
            )
        self._rows = rows
        self._sampling = said.Sampling(temperature, max_new_tokens, eos_id)
        self._server = None
        if not options.url:
            self._server = SglangServer(options, model, rows=rows, threads=threads, log=log_path)
        self._host = SglangHost(options, model, self._server)
        self._finished: queue.SimpleQueue[Response] = queue.SimpleQueue()
        self._running = 0
        self._fatal: BaseException | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: set[Future[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Start the server, or find the running one and give it the checkpoint's weights; returns when it can serve."""
        self._do(self._host.start())

    @property
    def version(self) -> int:
        """Of the weights that sequences are begun with."""
        return self._host.version

    @property
    def room(self) -> int:
        """None while the server is down or its weights are in doubt."""
        return self._rows - self._running if self._host.serving.is_set() else 0

    @property
    def running(self) -> int:
        return self._running

    @property
    def url(self) -> str:
        """Address of the server."""
        return self._host.url

    @property
    def server_pid(self) -> int:
        """Process group of the server that this engine started; 0 when there is none."""
        return 0 if self._server is None else self._server.pid

    @property
    def server_key(self) -> str:
        """What requests to the server that this engine started have to bear; empty when there is none."""
        return "" if self._server is None else self._server.key

    def add(self, prompts: Sequence[Prompt]) -> None:
        free = self._rows - self._running
        if len(prompts) > free:
            raise EngineError(f"{len(prompts)} prompts for {free} free rows; pull no more than there is room for")
        self._running += len(prompts)
        for prompt in prompts:
            self._loop.call_soon_threadsafe(self._begin, prompt)

    def run(self, interrupt: Interrupt) -> list[Response]:
        finished: list[Response] = []
        while self._running and not finished and not self._closed:
            if self._fatal is not None:
                raise self._fatal
            try:
                finished.append(taken(self._finished, LOOK_EVERY_S, "the end of a sequence", self.url))
            except WaitExpired:
                if interrupt.is_set():
                    break
        while not self._finished.empty():
            finished.append(self._finished.get_nowait())
        self._running -= len(finished)
        return finished

    def prepare(self, snapshot: Snapshot) -> Callable[[], None] | None:
        """Between two runs: what is done beside the next ones, so that the server stands still for loading alone."""
        if not self._running or self._host.has_tried(snapshot):
            return None
        return lambda: self._do(self._host.stage(snapshot))

    def swap(self, snapshot: Snapshot) -> None:
        self._do(self._host.swap(snapshot))

    def close(self) -> None:
        """End everything: requests, connections, the server that was started. Nothing happens the second time.

        Threads that wait in this engine come back.
        """
        if self._closed:
            return
        self._closed = True
        try:
            for call in list(self._calls):
                call.cancel()
            self._do(self._close())
        finally:
            if self._server is not None:
                self._server.kill()
            self._loop.call_soon_threadsafe(self._loop.stop)
            if joined(self._thread, CLOSE_S):
                self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        call = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._calls.add(call)
        try:
            blocking(call.result, OWN_DEADLINES, "the engine's own thread", self.url or "the SGLang server")
        except CancelledError:
            raise EngineError("the engine was closed") from None
        finally:
            self._calls.discard(call)

    def _begin(self, prompt: Prompt) -> None:
        task = self._loop.create_task(self._generate(_Begun(prompt)))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fatal = self._fatal or task.exception()

    async def _generate(self, begun: _Begun) -> None:
        """Ask until the sequence has ended, whatever happens to the server meanwhile."""
        host, prompt = self._host, begun.prompt
        while True:
            await until(host.serving.wait(), OWN_DEADLINES, "a server with all of its weights", host.url)
            version, cuts, life = host.version, host.cuts, host.lives
            call = said.generate(
                [*prompt.tokens.tolist(), *begun.tokens],
                self._sampling,
                made=len(begun.tokens),
                seed=prompt.seed,
                greedy=prompt.greedy,
                version=version,
            )
            try:
                answer = await host.generate(call)
            except EngineGone as gone:
                await host.revive(life, gone)
                continue
            piece = said.piece(answer, host.can, version)
            begun.add(piece)
            if not piece.cut or len(begun.tokens) == self._sampling.max_new_tokens:
                self._finished.put(begun.response())
                return
            if (host.cuts, host.lives) == (cuts, life):
                raise EngineError(f"the SGLang server gave up a sequence: {piece.cut}")

    async def _close(self) -> None:
        await self._host.close()
        await cancelled(list(self._tasks), CLOSE_S)
