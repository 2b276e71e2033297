"""A worker's side of the conversation with the controller: everything a worker does goes through its session.

Orders of the controller (serve this, receive that, free these) are carried out in the order in which they came; lanes
depend on it. Every wait ends: with its answer, with a deadline's WaitExpired, or with what ended the session.
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import torch

from flowrt.client.batches import Batch
from flowrt.client.params import Params
from flowrt.clock import MonotonicClock
from flowrt.errors import FlowError, RemoteProtocolError, Stopped, TransferError, WaitExpired
from flowrt.metrics import Timeline
from flowrt.transport.backends import GlooBackend
from flowrt.transport.lane import LaneSet, seen
from flowrt.transport.packets import pack, packet_bytes, unpack
from flowrt.transport.store import TensorStore
from flowrt.wire import messages as m
from flowrt.wire.link import ClientLink
from flowrt.wire.records import BusySpan, Incoming, Part, Values

Reply = TypeVar("Reply")
LANE_DEADLINE_S = 60.0
PULL_TRIES = 3
SILENT_BEATS = 30  # heartbeats without any word from the controller after which it counts as gone


class Session:
    """Open one with `connect`, close it with `close`."""

    def __init__(self, worker: str, address: str, link: ClientLink, welcome: m.Welcome) -> None:
        self.worker = worker
        self.welcome = welcome
        self.timeline = Timeline(MonotonicClock())
        self.store = TensorStore(welcome.columns)
        self._address = address
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._lanes = LaneSet(worker, GlooBackend(address), LANE_DEADLINE_S, self._signal)
        self.params = Params(self._lanes, self.send, self._spawn)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._offered: dict[int, Mapping[str, torch.Tensor]] = {}
        self._requests = 0
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._ended.add_done_callback(seen)
        self._background: set[asyncio.Task[Any]] = set()
        self._heard_s = self._loop.time()
        self._spawn(self._beat())

    # ---- samples

    async def offer(
        self,
        flow: str,
        prompt: int,
        epoch: int,
        members: int,
        tensors: Mapping[str, torch.Tensor],
        at_least: int = 0,
    ) -> int | None:
        """Offer a prompt as a group of ``members`` slots; returns when admission has opened it.

        ``tensors`` are the group's columns; they stay here until the group is done. Returns the group's id, or None
        when the run needs no more prompts.
        """
        request = self._next_request()
        self._offered[request] = tensors
        lengths = tuple(len(tensor) for tensor in tensors.values())
        opened: m.Opened = await self._ask(
            m.Offer(request, flow, prompt, epoch, members, at_least, tuple(tensors), lengths)
        )
        return None if opened.group < 0 else opened.group

    async def pull(self, stage: str, slots: int, tokens: int = 0, step: int = -1) -> Batch:
        """Lease up to ``slots`` slots that are ready for ``stage``; waits until there are some.

        Slots whose tensors did not come are given back and the pull is repeated; raises TransferError when that
        has happened PULL_TRIES times in a row.
        """
        reason = ""
        for _ in range(PULL_TRIES):
            grant: m.Grant = await self._ask(m.Pull(self._next_request(), stage, slots, tokens, step))
            try:
                await self.unless_ended(self.store.wait_for(grant.parts))
            except TransferError as error:
                reason = str(error)
            missing = self.store.missing(grant.parts)
            if not missing:
                tensors = {part.column: self._rows(part, grant) for part in grant.parts}
                return Batch(grant, tensors, {values.column: list(values.values) for values in grant.inline})
            self.send(m.Abandon(stage, grant.slots, grant.leases, reason or "freed on its way"))
        raise TransferError(
            f"{self.worker} pulled stage {stage} {PULL_TRIES} times and its tensors never came: {reason}"
        )

    async def commit(
        self,
        stage: str,
        slots: Sequence[int],
        leases: Sequence[int],
        tensors: Mapping[str, Sequence[torch.Tensor]] | None = None,
        inline: Mapping[str, Sequence[float]] | None = None,
        spans: Sequence[tuple[int, ...]] = (),
    ) -> tuple[int, ...]:
        """Say that the stage is done for these slots; returns the slots that were refused.

        Tensor columns stay in this worker's store, inline columns travel with the message.
        """
        parts = []
        for column, rows in (tensors or {}).items():
            for slot, tensor in zip(slots, rows, strict=True):
                self.store.put(column, slot, tensor)
            parts.append(Part(column, tuple(slots), tuple(len(tensor) for tensor in rows)))
        values = tuple(Values(column, tuple(map(float, rows))) for column, rows in (inline or {}).items())
        done: m.Committed = await self._ask(
            m.Commit(self._next_request(), stage, tuple(slots), tuple(leases), tuple(parts), values, tuple(spans))
        )
        if done.refused:
            self.store.free(tuple(tensors or ()), done.refused, ())
        return done.refused

    def exhausted(self) -> None:
        """All prompts to train on are open: the last step may be smaller."""
        self.send(m.Exhausted())

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """The optimiser has stepped: everything leased to this step is trained."""
        self.send(m.StepDone(step, tuple((name, float(value)) for name, value in metrics.items())))

    def report(self, numbers: Mapping[str, float] | None = None) -> None:
        """Send the spans of work since the last report, and named numbers for the summary."""
        spans = tuple(BusySpan(*span) for span in self.timeline.drain())
        if spans or numbers:
            self.send(m.Report(spans, tuple((name, float(value)) for name, value in (numbers or {}).items())))

    def finished(self) -> None:
        """This worker's part of the run is complete; it goes on serving what it holds."""
        self.report()
        self.send(m.Finished())

    async def wait_stopped(self) -> None:
        """Serve others until the controller ends the run; raises Stopped then."""
        await asyncio.shield(self._ended)

    async def unless_ended(self, work: Coroutine[Any, Any, Reply]) -> Reply:
        """Run ``work``, but raise what ended the session as soon as that happens."""
        task = self._loop.create_task(work)
        either: list[asyncio.Future[Any]] = [task, self._ended]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.shield(self._ended)
            return await task
        finally:
            task.cancel()  # whoever gives up waiting leaves nothing behind that waits on

    # ---- plumbing

    def send(self, message: m.Message) -> None:
        self._link.send(message)

    async def close(self, error: str = "") -> None:
        """Say goodbye and drop the connection."""
        self.report()
        self.send(m.Bye(error))
        self.end(Stopped("the session is closed", 0))
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._lanes.close()
        self._link.close()

    def end(self, error: FlowError) -> None:
        """No answer will come any more: whoever waits gets this error."""
        if not self._ended.done():
            self._ended.set_exception(error)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)

    def receive(self, message: m.Message) -> None:
        """One message of the controller."""
        self._heard_s = self._loop.time()
        match message:
            case m.Grant():
                for incoming in message.incoming:
                    self._receive_packet(incoming)
                self._answer(message.request, message)
            case m.Opened():
                for column, tensor in self._offered.pop(message.request, {}).items():
                    if message.group >= 0:
                        self.store.put(column, message.group, tensor)
                self._answer(message.request, message)
            case m.Committed():
                self._answer(message.request, message)
            case m.Refused():
                self._answer(message.request, RemoteProtocolError(message.reason))
            case m.Serve(turn, parts):
                packet = pack(self.store, parts, turn.sequence)
                self._lanes.transfer(turn, [packet]).add_done_callback(seen)
            case m.Free(columns, slots, groups):
                self.store.free(columns, slots, groups)
            case m.Signal(peer, lane, key, value):
                self._lanes.deliver(peer, lane, key, value)
            case m.Fetch():
                self.params.fetch(message)
            case m.ServeWeights():
                self.params.serve(message)
            case m.Retire():
                self.params.retire(message)
            case m.Stop(reason, code):
                self.end(Stopped(reason, code))
            case m.Heartbeat():
                pass
            case _:
                raise RemoteProtocolError(f"the controller sent {type(message).__name__}, which only workers say")

    def _receive_packet(self, incoming: Incoming) -> None:
        packet = torch.empty(packet_bytes(self.store, incoming.parts), dtype=torch.uint8)
        arrival: asyncio.Future[None] = self._loop.create_future()
        arrival.add_done_callback(seen)
        self.store.expect(incoming.parts, arrival)

        def on_packet(received: asyncio.Future[None]) -> None:
            try:
                received.result()
                for column, item, tensor in unpack(self.store, incoming.parts, incoming.turn.sequence, packet):
                    self.store.arrive(column, item, tensor, arrival)
            except FlowError as error:
                self.store.fail(incoming.parts, arrival)
                if not self._ended.done():
                    self.send(m.Undelivered(incoming, str(error)))
                arrival.set_exception(error)
                return
            arrival.set_result(None)

        self._lanes.transfer(incoming.turn, [packet]).add_done_callback(on_packet)

    def _rows(self, part: Part, grant: m.Grant) -> list[torch.Tensor]:
        ids = grant.groups if self.store.scope(part.column) == "group" else grant.slots
        return [self.store.get(part.column, item) for item in ids]

    async def _ask(self, message: m.Offer | m.Pull | m.Commit) -> Any:
        if self._ended.done():
            await asyncio.shield(self._ended)
        reply: asyncio.Future[Any] = self._loop.create_future()
        self._replies[message.request] = reply
        try:
            self.send(message)
            async with asyncio.timeout(self.welcome.wait_s):
                return await reply
        except TimeoutError:
            raise WaitExpired(
                f"{self.worker} waited {self.welcome.wait_s:.0f} s for an answer to {type(message).__name__}; "
                "look at `waits` in the run's status, or raise controller.wait_s"
            ) from None
        finally:
            del self._replies[message.request]

    def _answer(self, request: int, outcome: m.Message | FlowError) -> None:
        reply = self._replies.get(request)
        if reply is None or reply.done():
            if isinstance(outcome, m.Grant) and outcome.slots:
                # Whoever asked has gone; what was leased must not wait for its lease to end.
                self.send(m.Abandon("", outcome.slots, outcome.leases, "nobody waits for this grant any more"))
            return
        if isinstance(outcome, FlowError):
            reply.set_exception(outcome)
        else:
            reply.set_result(outcome)

    def _next_request(self) -> int:
        self._requests += 1
        return self._requests

    def _signal(self, peer: str, lane: str, key: str, value: bytes) -> None:
        if not self._ended.done():
            self.send(m.Signal(peer, lane, key, value))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _beat(self) -> None:
        """Heartbeats, and the verdict on a controller that does not answer them."""
        beat_s = self.welcome.heartbeat_s
        while True:
            asked_s = self._loop.time()
            self.send(m.Heartbeat())
            self.report()
            await asyncio.sleep(beat_s)
            # Judged by beats that were really sent: a loop that was itself held up must not blame the controller.
            if self._loop.time() - asked_s < 2 * beat_s and asked_s - self._heard_s > SILENT_BEATS * beat_s:
                self.end(WaitExpired(f"controller {self._address} not heard of for {SILENT_BEATS * beat_s:.0f} s"))
                return
