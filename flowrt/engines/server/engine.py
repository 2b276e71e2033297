"""A rollout engine on a generation server, which the engine starts or which is already running.

- Each sequence is a request, so the server batches as it does for any client, and generates between calls of `run`.
- Sequences of a failed server are sent again with the tokens received so far.
- A sequence ends as in other engines (`StopConditions`). The server ends it at stop tokens and stop strings too, but
  may know others, and misses a stop string that was generated in more tokens than the tokenizer makes of it.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flowrt.algorithms.support import Support, singletons
from flowrt.engines.base import Interrupt, NewTokens, Prompt, Response
from flowrt.engines.options import SamplingOptions, ServerOptions
from flowrt.engines.server.dialect import Continuation, Dialect, PartialResponse, Sampling
from flowrt.engines.server.process import ServerProcess
from flowrt.engines.server.supervisor import ServerSupervisor
from flowrt.engines.stopping import StopConditions
from flowrt.errors import EngineError, EngineGone, WaitExpired
from flowrt.protocol.resources import EngineUse
from flowrt.runtime.waits import BoundedElsewhere, blocking, cancel_and_wait, join_thread, pause, queue_get, wait_until
from flowrt.transport.weights.snapshot import Snapshot

log = logging.getLogger("flowrt")
POLL_INTERVAL_S = 0.005
CLOSE_TIMEOUT_S = 15.0
RETURN_S = 15.0
"""Time limit of the return of all unfinished sequences by a server."""
SERVER_DEADLINES = BoundedElsewhere("the time limits of the server's start, its requests and weight updates")


@dataclass(slots=True, eq=False)
class _Sequence:
    """A running sequence and the response so far."""

    prompt: Prompt
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)
    supports: list[tuple[int, ...]] = field(default_factory=list)
    end: int | None = None
    """Number of tokens after which the sequence ends; None if nothing has ended it yet."""
    is_requested: bool = False
    """Whether the server has a request for more tokens."""

    @classmethod
    def of(cls, prompt: Prompt) -> "_Sequence":
        """A sequence that begins with the prefix of the prompt, if there is one."""
        prefix = prompt.prefix
        if prefix is None:
            return cls(prompt)
        supports: list[tuple[int, ...]] = []
        if prefix.support is not None:
            of_positions = prefix.support.tokens_E.split(prefix.support.counts_T.tolist())
            supports = [tuple(tokens.tolist()) for tokens in of_positions]
        return cls(prompt, prefix.tokens.tolist(), prefix.logprobs.tolist(), list(prefix.spans), supports)

    def add(self, part: PartialResponse, stop: StopConditions) -> None:
        """Append tokens that the server returned, and search them for the end of the sequence."""
        begin = len(self.tokens)
        self.tokens += part.tokens
        self.end = stop.end_of(self.tokens, begin)
        self.logprobs += part.logprobs
        self.supports += part.supports or ()
        for version, count in zip(part.spans[::2], part.spans[1::2], strict=True):
            if self.spans and self.spans[-2] == version:
                self.spans[-1] += count
            else:
                self.spans += [version, count]

    def response(self, *, with_support: bool) -> Response:
        """The complete response, up to the first token that ends it."""
        whole = self.after(0, with_support=with_support)
        return Response(
            self.prompt.key,
            whole.tokens,
            whole.logprobs,
            whole.spans,
            truncated=self.end is None,
            support=whole.support,
        )

    def after(self, start: int, *, with_support: bool) -> NewTokens:
        """The tokens from ``start`` on, up to the first one that ends the sequence."""
        tokens = torch.tensor(self.tokens[start : self.end], dtype=torch.int32)
        return NewTokens(
            start,
            tokens,
            torch.tensor(self.logprobs[start : self.end], dtype=torch.float32),
            _first_spans(self.spans, start + len(tokens)),
            support=self._support(start, tokens) if with_support else None,
        )

    def _support(self, start: int, tokens: torch.Tensor) -> Support:
        if not self.supports:  # greedy, or with sampling options of its own
            return singletons(tokens)
        supports = self.supports[start : start + len(tokens)]
        return Support(
            torch.tensor([token for support in supports for token in support], dtype=torch.int32),
            torch.tensor([len(support) for support in supports], dtype=torch.int32),
        )


def _first_spans(spans: Sequence[int], tokens: int) -> tuple[int, ...]:
    """The (version, count) pairs of the first tokens, flattened."""
    first: list[int] = []
    for version, count in zip(spans[::2], spans[1::2], strict=True):
        left = tokens - sum(first[1::2])
        if left > 0:
            first += [version, min(count, left)]
    return tuple(first)


def _own(sampling: Sampling, options: SamplingOptions) -> Sampling:
    """The parameters of a sequence with sampling options of its own, whose support is not recorded."""
    return replace(sampling, temperature=options.temperature, truncation=options.truncation, records_supports=False)


class ServerRollout:
    """Up to ``rows`` sequences at a time, in an event loop on a separate thread.

    A seed is sent with every request; whether and how a server uses it is a matter of its kind.

    Args:
        dialect: the kind of server.
        options: options of the server.
        server: the server to start; None: the server at ``url`` runs already.
        url: address of the running server.
        model: directory of the checkpoint.
        stop: stop tokens and stop strings.
        rows: maximum number of running sequences.
        sampling: sampling parameters; the temperature must be above 0. Responses have a support if the truncation is
            active.

    Raises EngineError if the temperature is not above 0.
    """

    def __init__(
        self,
        dialect: Dialect,
        options: ServerOptions,
        *,
        server: ServerProcess | None,
        url: str,
        model: Path,
        stop: StopConditions,
        rows: int,
        sampling: Sampling,
    ) -> None:
        if sampling.temperature <= 0:
            raise EngineError(
                f"rollout temperature is {sampling.temperature}; use a value above 0 (prompts can be greedy)"
            )
        self._dialect = dialect
        self._rows = rows
        self._stop = stop
        self._sampling = sampling
        self._server = server
        self._supervisor = ServerSupervisor(dialect, options, server, url=url, model=model)
        self._cut_warned = False
        self._finished: queue.SimpleQueue[Response] = queue.SimpleQueue()
        self._running = 0
        self._received = 0  # tokens of all sequences
        self._fatal: BaseException | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._sequences: dict[_Sequence, None] = {}
        self._calls: set[Future[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Start the server, or reset the running one to the checkpoint's weights; returns when it can generate.

        Raises EngineError if no server becomes ready, or the server does not support truncated sampling.
        """
        self._run_in_loop(self._supervisor.start())
        lacks = self._supervisor.facts.no_supports
        if self._sampling.truncation.is_active and lacks:
            raise EngineError(
                f"the {self._dialect.name} server at {self.url} does not return which tokens could be drawn, which "
                f"training with rollout.top_k, top_p or min_p needs; {lacks}"
            )

    @property
    def version(self) -> int:
        """Version of the weights with which sequences start."""
        return self._supervisor.version

    @property
    def room(self) -> int:
        """Number of sequences that `add` accepts; 0 while the server is down or its weights are uncertain."""
        return self._rows - self._running if self._supervisor.serving.is_set() else 0

    @property
    def running(self) -> int:
        return self._running

    def use(self) -> EngineUse:
        """Tokens that the server has returned, and its accelerators (see `ReportsUse`)."""
        return EngineUse(self._received, devices=self._supervisor.facts.devices)

    @property
    def url(self) -> str:
        """Address of the server."""
        return self._supervisor.url

    @property
    def server_pid(self) -> int:
        """Process group of the server that this engine started; 0 if there is none."""
        return 0 if self._server is None else self._server.pid

    @property
    def server_key(self) -> str:
        """API key of the server that this engine started; empty if there is none."""
        return "" if self._server is None else self._server.key

    def add(self, prompts: Sequence[Prompt]) -> None:
        free = self._rows - self._running
        if len(prompts) > free:
            raise EngineError(f"{len(prompts)} prompts for {free} free rows; add at most `room` prompts")
        self._running += len(prompts)
        for prompt in prompts:
            self._loop.call_soon_threadsafe(self._start_sequence, prompt)

    def run(self, interrupt: Interrupt) -> list[Response]:
        finished: list[Response] = []
        while self._running and not finished and not self._closed:
            if self._fatal is not None:
                raise self._fatal
            try:
                finished.append(queue_get(self._finished, POLL_INTERVAL_S, "the end of a sequence", self.url))
            except WaitExpired:
                if interrupt.is_set():
                    break
        while not self._finished.empty():
            finished.append(self._finished.get_nowait())
        self._running -= len(finished)
        return finished

    def prepare(self, snapshot: Snapshot) -> Callable[[], None] | None:
        """Work that stages the snapshot while the server generates (see `SupportsInFlightUpdate`).

        None if no sequence runs, or staging this snapshot was attempted before.
        """
        if not self._running or self._supervisor.has_tried_staging(snapshot):
            return None
        return lambda: self._run_in_loop(self._supervisor.stage(snapshot))

    def swap(self, snapshot: Snapshot) -> None:
        self._run_in_loop(self._supervisor.swap(snapshot))

    def new_tokens(self, starts: Mapping[int, int]) -> dict[int, NewTokens]:
        """What is generated of the running sequences from these tokens on, by key (see `ContinuesSequences`).

        The server returns what it has of each, and computes it again from its cache of prefixes.
        """
        self._run_in_loop(self._return_unfinished())
        has_support = self._sampling.truncation.is_active
        new: dict[int, NewTokens] = {}
        for sequence in list(self._sequences):
            start = starts.get(sequence.prompt.key, 0)
            if sequence.end is None and len(sequence.tokens) > start:
                new[sequence.prompt.key] = sequence.after(start, with_support=has_support)
        return new

    async def _return_unfinished(self) -> None:
        """Have the server return what it has of the running sequences, and wait until that is here."""
        if not any(sequence.is_requested for sequence in self._sequences):
            return
        async with self._supervisor.interrupted():
            try:
                await wait_until(self._all_returned(), RETURN_S, "unfinished sequences", self.url)
            except WaitExpired as late:
                log.warning("%s; the tokens since the last update of the weights are not kept", late)

    async def _all_returned(self) -> None:
        while any(sequence.is_requested for sequence in self._sequences):
            await pause(POLL_INTERVAL_S)

    def close(self) -> None:
        """End requests, connections and a server that was started. Calls that wait on other threads end or raise."""
        if self._closed:
            return
        self._closed = True
        try:
            for call in list(self._calls):
                call.cancel()
            self._run_in_loop(self._close())
        finally:
            if self._server is not None:
                self._server.kill()
            self._loop.call_soon_threadsafe(self._loop.stop)
            if join_thread(self._thread, CLOSE_TIMEOUT_S):
                self._loop.close()

    def _run_in_loop(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the engine's loop and wait for it. Raises its exception, or EngineError after `close`."""
        call = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._calls.add(call)
        try:
            blocking(
                call.result, SERVER_DEADLINES, "the engine's own thread", self.url or f"the {self._dialect.name} server"
            )
        except CancelledError:
            raise EngineError("the engine was closed") from None
        finally:
            self._calls.discard(call)

    def _start_sequence(self, prompt: Prompt) -> None:
        sequence = _Sequence.of(prompt)
        self._sequences[sequence] = None
        task = self._loop.create_task(self._generate(sequence))
        self._tasks.add(task)
        task.add_done_callback(partial(self._on_ended, sequence))

    def _on_ended(self, sequence: _Sequence, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        del self._sequences[sequence]
        if not task.cancelled() and task.exception() is not None:
            self._fatal = self._fatal or task.exception()

    async def _generate(self, sequence: _Sequence) -> None:
        """Send requests until the sequence is complete, across updates and failures of the server."""
        supervisor, prompt = self._supervisor, sequence.prompt
        has_support = self._sampling.truncation.is_active
        sampling = self._sampling if prompt.sampling is None else _own(self._sampling, prompt.sampling)
        limit = self._limit(prompt)
        while True:
            await wait_until(
                supervisor.serving.wait(), SERVER_DEADLINES, "a server with all of its weights", supervisor.url
            )
            version, aborts, incarnation = supervisor.version, supervisor.aborts, supervisor.incarnation
            part = Continuation(
                [*prompt.tokens.tolist(), *sequence.tokens],
                len(sequence.tokens),
                replace(sampling, max_new_tokens=limit),
                seed=prompt.seed,
                greedy=prompt.greedy,
                version=version,
            )
            sequence.is_requested = True
            try:
                answer = await supervisor.generate(part)
                response = self._dialect.parse_generated(answer, part)
                await asyncio.to_thread(sequence.add, response, self._stop)
                self._received += len(response.tokens)
            except EngineGone as gone:
                sequence.is_requested = False
                await supervisor.replace(incarnation, gone)
                continue
            finally:
                sequence.is_requested = False
            if sequence.end is not None or self._is_full(sequence, response):
                self._finished.put(sequence.response(with_support=has_support))
                return
            name = self._dialect.name
            if response.abort_reason and (supervisor.aborts, supervisor.incarnation) == (aborts, incarnation):
                raise EngineError(f"the {name} server aborted a sequence: {response.abort_reason}")
            if not response.abort_reason and not response.tokens:
                raise EngineError(f"the {name} server ended a sequence without a token; does it serve the run's model?")

    def _limit(self, prompt: Prompt) -> int:
        """Maximum length of the response to a prompt, in tokens."""
        return min(prompt.max_new_tokens or self._sampling.max_new_tokens, self._sampling.max_new_tokens)

    def _is_full(self, sequence: _Sequence, response: PartialResponse) -> bool:
        """Whether the sequence can have no more tokens: by the limit of the run, or by one of the server."""
        count, prompt = len(sequence.tokens), len(sequence.prompt.tokens)
        if count >= self._limit(sequence.prompt):
            return True
        longest = self._supervisor.facts.longest_input
        if not response.at_limit and (longest is None or prompt + count < longest):
            return False
        if not self._cut_warned:
            self._cut_warned = True
            log.warning(
                "the %s server cuts sequences before their limit (%d): %d tokens after a prompt of %d tokens; start it "
                "with a larger context length and cache",
                self._dialect.name,
                self._limit(sequence.prompt),
                count,
                prompt,
            )
        return True

    async def _close(self) -> None:
        await self._supervisor.close()
        await cancel_and_wait(list(self._tasks), CLOSE_TIMEOUT_S)
