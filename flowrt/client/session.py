"""A worker's session with the controller: samples, weights and reports.

- Every wait ends with its answer, with WaitExpired at its deadline, or with the error that ended the session.
- Messages of the controller are handled in order of arrival (`Session._run`): lanes depend on that order.
- The session reconnects by itself to a controller that restarts, and sends open requests again.
- A failed background task ends the session, so that all its waits raise the error.
"""

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from time import monotonic
from typing import Any, TypeVar

import torch

from flowrt.client.connection import Connection, ConnectionLost, Event, Reconnected
from flowrt.client.controller_clock import ControllerClock, StopWatcher
from flowrt.client.evaluations import EvaluationNews
from flowrt.client.requests import RequestTable, ResyncState, resync_messages
from flowrt.client.resource_sampler import ResourceSampler
from flowrt.client.sample_tensors import Batch, Columns, Numbers, SampleTransfers, UncommittedColumns
from flowrt.client.weights import WeightTransfers
from flowrt.errors import FlowError, LocalProtocolError, RemoteProtocolError, Stopped, TransferError
from flowrt.ids import FETCH, STOPPED
from flowrt.net.curve_keys import WorkerKeys
from flowrt.protocol import messages as m
from flowrt.protocol.messages import NO_LIMIT, ColumnLengths, Part, Values, prompts_fault, values_fault
from flowrt.protocol.resources import pack_use
from flowrt.protocol.spans import pack_spans
from flowrt.runtime.clock import MonotonicClock
from flowrt.runtime.host import clock_name
from flowrt.runtime.progress import Progress
from flowrt.runtime.timeline import Span, Timeline
from flowrt.runtime.waits import (
    CONTROLLER,
    BoundedElsewhere,
    cancel_and_wait,
    open_waits,
    pause,
    tracked,
    wait_any,
    wait_until,
)
from flowrt.transport.lanes.lane import LaneSet, available_transports, ignore_exception, make_transports
from flowrt.transport.lanes.open_lanes import most_open_lanes
from flowrt.transport.tensor_store import Rows, TensorStore, lengths_of

log = logging.getLogger(__name__)
Reply = TypeVar("Reply")
MAX_PULL_ATTEMPTS = 3
CLOSE_S = 5.0
LIVENESS = BoundedElsewhere("the liveness timeout of the controller")
NEXT_MESSAGE = "the next message"
"""Name of the wait that every open session has."""
MAX_REPORTED_WAITS = 8
MAX_REPORTED_CHARS = 160
REPORTED_AFTER_S = 2.0
FIRST_USE_S, USE_INTERVAL_S = 1.0, 5.0
"""Seconds between measurements of what this worker uses: the first one, and all others."""


class Session:
    """One worker's session. Open it with `connect`, close it with `close`.

    Example:
        session = await connect("tcp://10.0.0.1:5555", "reward-0", "reward", deadline_s=60)
        while not (batch := await session.pull("reward", slots=8)).closed:
            rewards = [float(response.numel()) for response in batch.tensors["response"]]
            await session.commit("reward", batch.slots, batch.leases, inline={"reward": rewards})
        session.finished()
        await session.close()
    """

    def __init__(self, worker: str, connection: Connection) -> None:
        """Start the session of ``worker`` over an open connection."""
        welcome = connection.welcome
        self.worker = worker
        self.timeline = Timeline(MonotonicClock())
        self.progress = Progress()
        """Whether the work of this worker advances, which extends its leases; the code that works reports it."""
        self.resources = ResourceSampler()
        """What this worker uses; the role sets its ``engine``."""
        self._resource_use = b""  # measured and not yet reported
        self._clock = ControllerClock(is_shared=welcome.clock == clock_name())
        self._reported_s = 0.0
        """Time on the controller's clock up to which this worker has reported its work."""
        self._stops = StopWatcher()
        self._stops.start()
        self.store = TensorStore(welcome.columns, welcome.store_bytes)
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._ended.add_done_callback(ignore_exception)
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_waits = reported_waits()
        self._lanes = LaneSet(
            worker,
            make_transports(connection.address),
            welcome.transfer_idle_timeout_s,
            self._send_rendezvous_key,
            min_bytes_per_s=1e6 * welcome.min_transfer_mb_per_s,
            most_open=most_open_lanes(),
            ask_to_retire=lambda turn: self._send_if_open(m.RetireLane(turn)),
        )
        self._sample_transfers = SampleTransfers(self.store, self._lanes, self._send_if_open)
        self.params = WeightTransfers(self._lanes, self.send, self._spawn, welcome.transfer_idle_timeout_s)
        self._requests = RequestTable(worker, connection.send, connection.spin_wait, self._release_unclaimed)
        self._uncommitted = UncommittedColumns(self.store)
        self._resync = ResyncState(welcome.renewable)
        self._released = asyncio.Event()
        self.is_saving = False
        """Whether the role writes unfinished work to disk, for which the end of its process waits."""
        self.on_freed: Callable[[Sequence[str], Sequence[int]], None] | None = None
        """Called when columns (empty: all) of slots are freed on the controller's order."""
        self.evaluations = EvaluationNews()
        connection.handle_directly(self._on_message)
        self._spawn(self._run())
        self._spawn(self._send_heartbeats())
        self._spawn(self._measure_resources())

    @property
    def welcome(self) -> m.Welcome:
        """The welcome of the present controller."""
        return self._connection.welcome

    # ---- messages of the controller

    async def _run(self) -> None:
        """Handle the events of the connection, until it fails or the session is closed.

        The connection passes most messages directly to `_on_message`.
        """
        with tracked(NEXT_MESSAGE, CONTROLLER, LIVENESS):
            try:
                async for event in self._connection:
                    self._handle(event)
            except FlowError as error:
                self.end(error)

    def _on_message(self, message: m.Message) -> None:
        self._handle(message)

    def _handle(self, event: Event) -> None:  # noqa: C901 - one case for each message
        """Handle one event. Raises RemoteProtocolError for a message that a controller never sends."""
        match event:
            # answers to requests
            case m.Grant():
                request = self._requests.get(event.request)
                if isinstance(request, m.Pull):
                    self._resync.granted(request, event)
                for incoming in event.incoming:
                    self._sample_transfers.receive(incoming)
                self._requests.on_answer(event.request, event)
            case m.OfferAccepted():
                self._uncommitted.offer_accepted(event.request, event.first)
                self._requests.on_answer(event.request, event)
            case m.Committed():
                request = self._requests.get(event.request)
                if isinstance(request, m.Commit):
                    self._resync.lease_ended(request.slots, request.leases)
                self._uncommitted.committed(event.request, event.refused)
                self._requests.on_answer(event.request, event)
            case m.Rejected():
                self._uncommitted.rejected(event.request)
                self._requests.on_answer(event.request, event)
            # orders
            case m.SendSamples():
                self._sample_transfers.send(event)
            case m.ReleaseTensors(columns, slots, groups):
                self._free(columns, slots, groups)
            case m.RendezvousKey(peer, lane, key, value):
                self._lanes.deliver(peer, lane, key, value)
            case m.RetireLane(turn):
                self._lanes.retire(turn)
            case m.ReceiveWeights() | m.StopFetch() | m.SendWeights() | m.EvictVersion():
                self.params.execute(event)
            case m.GroupsDropped() | m.Evaluated():
                self.evaluations.add(event)
            case m.Drain():
                self._requests.set_leaving()
            case m.Stop(reason, code):
                self.end(Stopped(reason, code))
            case m.Heartbeat(sent_s, _, answered_s):
                if sent_s and answered_s:
                    self._on_exchange(sent_s, answered_s)
            # the connection itself
            case ConnectionLost():
                # A restarted controller does not know the open lanes.
                self._lanes.drop_all("the controller has gone")
            case Reconnected():
                self._clock.reset(is_shared=self.welcome.clock == clock_name())
                for message in resync_messages(self._resync, self._requests, self.params, self.store):
                    self.send(message)
            case _:
                raise RemoteProtocolError(f"the controller sent {type(event).__name__}, which only workers send")

    def _free(self, columns: Sequence[str], slots: Sequence[int], groups: Sequence[int]) -> None:
        self.store.free(columns, slots, groups)
        if self.on_freed is not None:
            self.on_freed(columns, slots)
        if groups:
            self._released.set()

    # ---- samples

    async def offer(
        self,
        flow: str,
        prompt: int,
        epoch: int,
        members: int,
        tensors: Mapping[str, torch.Tensor],
        at_least: int = 0,
        deadline_s: float | None = None,
        at_most: int = NO_LIMIT,
    ) -> int | None:
        """Offer one prompt as a group of ``members`` slots, as `offer_many` does.

        Returns the group's id, or None when the run needs no more prompts.
        """
        columns = {column: [tensor] for column, tensor in tensors.items()}
        groups = await self.offer_many(flow, [prompt], epoch, members, columns, None, at_least, deadline_s, at_most)
        return None if groups is None else groups[0]

    async def offer_many(
        self,
        flow: str,
        prompts: Sequence[int],
        epoch: int = 0,
        members: int = 1,
        tensors: Mapping[str, Rows] | None = None,
        tags: Mapping[str, Sequence[float]] | None = None,
        at_least: int = 0,
        deadline_s: float | None = None,
        at_most: int = NO_LIMIT,
    ) -> range | None:
        """Offer prompts, each as a group of ``members`` slots; returns when all of them are admitted.

        Args:
            flow: the flow of the recipe that the prompts enter.
            prompts: ids from 0 to 2**63 - 1, in any order (hashes, for example); to train on, each once in an epoch.
            epoch: the pass over the data set.
            members: samples per prompt.
            tensors: group columns, one 1-D tensor per prompt (a list, or `Packed`). They stay in this worker's store
                until their group is done.
            tags: inline columns, one number per slot.
            at_least: the lowest policy version that may generate these samples; -1: the version that the last closed
                step made.
            deadline_s: seconds to wait for admission; None for the run's default.
            at_most: the version that has to generate all tokens of these samples, equal to ``at_least``; the offer
                waits for its publication. Not for a flow that is trained. Without it, any later version may.

        Returns:
            The ids of the groups, or None when the run needs no more prompts, or no worker has version ``at_most`` any
            more. `wait_groups_closed` waits for the end of their groups, `EvaluationNews` has those that were dropped.

        Raises:
            WaitExpired: the groups were not admitted in time; none is open.
            OverBudget: this worker's store has no room for the tensors; none is open.
            LocalProtocolError: a prompt id, tensor or number is invalid; none is open.
            RemoteProtocolError: the controller rejected the offer.
            FlowError: the error that ended the session.
        """
        if fault := prompts_fault(prompts):
            raise LocalProtocolError(f"offer to flow {flow!r}: {fault}; take a hash modulo 2**63, for example")
        tag_values = _inline_values(f"offer to flow {flow!r}", tags)
        request = self._requests.number()
        columns = tensors or {}
        self._uncommitted.add_offer(request, columns)
        lengths = tuple([ColumnLengths(column, lengths_of(rows)) for column, rows in columns.items()])
        offer = m.Offer(
            request=request,
            flow=flow,
            prompts=tuple(prompts),
            epoch=epoch,
            members=members,
            at_least=at_least,
            lengths=lengths,
            tags=tag_values,
            at_most=at_most,
        )
        opened = await self._requests.ask(offer, m.OfferAccepted, deadline_s or self.welcome.request_timeout_s)
        return None if opened.first < 0 else range(opened.first, opened.first + len(prompts))

    async def wait_groups_closed(self, groups: Sequence[int]) -> None:
        """Wait until groups that this worker has offered are closed: all their stages are done, or they were dropped.

        The controller then orders this worker to free their columns; an order that a crash of the controller has lost
        is repeated by the next one. Groups without columns count as closed.
        """
        still_open = list(groups)
        while still_open:
            if not self.store.has_group(still_open[-1]):
                still_open.pop()
                continue
            self._released.clear()
            await wait_until(self._released.wait(), LIVENESS, f"the end of group {still_open[-1]}", CONTROLLER)

    async def pull(
        self,
        stage: str,
        slots: int,
        tokens: int = 0,
        step: int = -1,
        deadline_s: float | None = None,
        done: Batch | None = None,
    ) -> Batch:
        """Lease up to ``slots`` slots that are ready for ``stage``; waits until at least one is.

        Args:
            stage: the stage to work on.
            slots: the most slots to lease. A trainer passes 0 and is granted by token budget.
            tokens: tokens that the caller can take; 0 for no limit.
            step: the optimiser step that a trainer pulls for; -1 for other stages.
            deadline_s: seconds to wait; None for the run's default.
            done: a completed batch of a stage that makes no columns. It is committed with the same message; `refused`
                of the new batch is not empty if its lease had expired.

        Raises:
            WaitExpired: no slot was ready in time; nothing is leased.
            TransferError: the tensors of one worker did not arrive in MAX_PULL_ATTEMPTS attempts.
            Drained: this worker has been asked to leave the run.
            RemoteProtocolError: the controller rejected the pull.
            FlowError: the error that ended the session.
        """
        reason = ""
        failures = Counter[str]()
        leases = () if done is None else (done.grant.lease,)
        while max(failures.values(), default=0) < MAX_PULL_ATTEMPTS:
            pull = m.Pull(
                request=self._requests.number(), stage=stage, slots=slots, tokens=tokens, step=step, done=leases
            )
            grant = await self._requests.ask(pull, m.Grant, deadline_s or self.welcome.request_timeout_s)
            try:
                if grant.parts and self.store.missing(grant.parts):
                    senders = ", ".join(sorted({incoming.turn.sender for incoming in grant.incoming}))
                    with self.timeline.busy(FETCH, root=grant.incoming[0].turn.sender if grant.incoming else ""):
                        await self.unless_ended(self.store.wait_for(grant.parts, senders))
            except TransferError as error:
                reason = str(error)
            except asyncio.CancelledError:
                self._release_unclaimed(grant)
                raise
            if not self.store.missing(grant.parts):
                tensors = {part.column: self._rows(part, grant) for part in grant.parts}
                numbers = Numbers((values.column, list(values.values)) for values in grant.inline)
                return Batch(grant, Columns(tensors), numbers)
            self._release(grant, stage, reason or "freed during the transfer")
            failures.update(
                {incoming.turn.sender for incoming in grant.incoming if self.store.missing(incoming.parts)} or {""}
            )
            leases = ()
        raise TransferError(
            f"{self.worker} pulled {stage} {MAX_PULL_ATTEMPTS} times and its tensors never arrived: {reason}"
        )

    async def commit(
        self,
        stage: str,
        slots: Sequence[int],
        leases: Sequence[int],
        tensors: Mapping[str, Rows] | None = None,
        inline: Mapping[str, Sequence[float]] | None = None,
        spans: Sequence[tuple[int, ...]] = (),
    ) -> tuple[int, ...]:
        """Commit the results of a stage for these slots.

        Args:
            stage: the stage that is done.
            slots: ids of the slots.
            leases: the lease of each slot, see `Batch.leases`.
            tensors: tensor columns, one 1-D tensor per slot (a list, or `Packed`). They stay in this worker's store.
            inline: inline columns, one number per slot; they travel with the message.
            spans: for generated samples: (version, tokens, version, tokens, ...) of each slot.

        Returns:
            The slots that were refused, because their lease had expired or they were dropped.

        Raises:
            LocalProtocolError: a tensor does not fit its column or a number is not finite; nothing is committed.
            OverBudget: the store has no room for the tensors; nothing is committed.
            WaitExpired: no answer within the run's request timeout.
            RemoteProtocolError: the controller rejected the commit.
            FlowError: the error that ended the session.
        """
        commit = self._make_commit(stage, slots, leases, tensors, inline, spans)
        done = await self._requests.ask(commit, m.Committed, self.welcome.request_timeout_s)
        return done.refused

    def start_commit(
        self,
        stage: str,
        slots: Sequence[int],
        leases: Sequence[int],
        tensors: Mapping[str, Rows] | None = None,
        inline: Mapping[str, Sequence[float]] | None = None,
        spans: Sequence[tuple[int, ...]] = (),
    ) -> "asyncio.Task[m.Committed]":
        """As `commit`, but returns when the message is sent; ``refused`` of the task's result has the refused slots.

        Later messages may be sent before the answer: the controller handles messages in order. LocalProtocolError and
        OverBudget are raised by this call, the other errors of `commit` by the task.
        """
        commit = self._make_commit(stage, slots, leases, tensors, inline, spans)
        return self._requests.start(commit, m.Committed, self.welcome.request_timeout_s)

    def _make_commit(
        self,
        stage: str,
        slots: Sequence[int],
        leases: Sequence[int],
        tensors: Mapping[str, Rows] | None,
        inline: Mapping[str, Sequence[float]] | None,
        spans: Sequence[tuple[int, ...]],
    ) -> m.Commit:
        """Make a commit, and keep its tensors until the answer. Raises LocalProtocolError and OverBudget."""
        values = _inline_values(f"commit of stage {stage!r}", inline)
        request = self._requests.number()
        columns = tensors or {}
        ids = tuple(slots)
        self._uncommitted.add_commit(request, ids, columns)
        parts = tuple([Part(column, ids, lengths_of(rows)) for column, rows in columns.items()])
        return m.Commit(
            request=request,
            stage=stage,
            slots=ids,
            leases=tuple(leases),
            parts=parts,
            inline=values,
            spans=tuple(spans),
        )

    def give_back(self, stage: str, batch: Batch, reason: str = "not wanted any more") -> None:
        """Release the leases on a batch without a result. Its slots are granted again, to this or another worker."""
        if batch.slots:
            self._release(batch.grant, stage, reason)

    def give_back_slots(self, stage: str, slots: Sequence[int], leases: Sequence[int], reason: str) -> None:
        """Release the leases on these slots without a result. They are granted again, to this or another worker."""
        self._resync.lease_ended(slots, leases)
        self.send(m.ReleaseLease(stage=stage, slots=tuple(slots), leases=tuple(leases), lost=False, reason=reason))

    def lost(self, stage: str, slots: Sequence[int], leases: Sequence[int], reason: str) -> None:
        """Report samples that cannot be made (a broken environment, for example); the run's policy decides on them."""
        self._resync.lease_ended(slots, leases)
        self.send(m.ReleaseLease(stage=stage, slots=tuple(slots), leases=tuple(leases), lost=True, reason=reason))

    def exhausted(self, flow: str) -> None:
        """Report that this worker offers no more prompts to this flow.

        The last optimiser step of a trained flow may be smaller than the others.
        """
        self._resync.exhausted(flow)
        self.send(m.EndOfData(flow))

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report an optimiser step: all samples leased to it are trained."""
        done = m.StepCompleted(step, tuple((name, float(value)) for name, value in metrics.items()))
        self._resync.step_done(done)
        self.send(done)

    async def saved(self, step: int) -> None:
        """Report a checkpoint after ``step`` steps; returns when the ledger is on disk up to that step.

        Raises WaitExpired, RemoteProtocolError and FlowError as `commit`.
        """
        written = m.CheckpointWritten(self._requests.number(), step)
        await self._requests.ask(written, m.Committed, self.welcome.request_timeout_s)

    def report(self, numbers: Mapping[str, float] | None = None) -> None:
        """Send busy spans since the last report, open waits, and named numbers for the summary."""
        named = {name: float(value) for name, value in (numbers or {}).items()}
        self._resync.reported(named)
        if self._connection.is_away:
            return
        spans = self._take_spans()
        waits = reported_waits()
        if spans or named or waits or self._last_waits or self._resource_use:
            self.send(m.Report(spans, tuple(named.items()), waits, self._resource_use))
        self._last_waits, self._resource_use = waits, b""

    def _take_spans(self) -> tuple[bytes, ...]:
        """The spans since the last report, on the controller's clock; empty while its offset is unknown."""
        offset_s = self._clock.offset_s
        if offset_s is None:
            return ()
        spans = [*self.timeline.drain(), *self._stops.take()]
        self._reported_s = monotonic() + offset_s
        return pack_spans(spans, offset_s)

    def _on_exchange(self, sent_s: float, answered_s: float) -> None:
        """Update the clock's offset with an answered heartbeat, and report a stop of this host that it shows."""
        now = monotonic()
        jump_s = self._clock.add(sent_s, answered_s, now)
        if not jump_s:
            return
        log.warning("the clock of the controller and that of this host differ by %+.3f s more than before", jump_s)
        if jump_s > 0:  # this host was suspended, and its clock stood still
            end_s = now + (self._clock.offset_s or 0.0)
            self.send(m.Report(pack_spans([Span(STOPPED, end_s - jump_s, end_s)]), (), ()))

    def evaluated(self, name: str, version: int, numbers: Mapping[str, float]) -> None:
        """Report the results of an evaluation; the trainers are told.

        Args:
            name: name of the data set; empty: no evaluation follows.
            version: the version that generated all answers.
            numbers: results by name; empty: the version could not be evaluated.
        """
        results = tuple((key, float(value)) for key, value in numbers.items())
        done = m.Evaluated(name, version, results)
        self._resync.evaluated(done)
        self.send(done)

    def finished(self) -> None:
        """Report that this worker's role is complete. The worker continues to serve the tensors that it holds."""
        self.report()
        self._resync.finished()
        self.send(m.RoleCompleted())

    def drain(self) -> None:
        """Ask to leave the run: this worker is granted no more slots and leaves once its tensors are not needed.

        A controller that is away is asked when it is back.
        """
        drain = m.Drain(0, self.worker)
        self._resync.drained(drain)
        self.send(drain)

    async def wait_stopped(self) -> None:
        """Serve tensors to other workers until the session ends, then raise its error: Stopped if the run ended."""
        await wait_until(asyncio.shield(self._ended), LIVENESS, "the end of the run", CONTROLLER)

    @property
    def is_ended(self) -> bool:
        """Whether the session has ended: its waits raise its error."""
        return self._ended.done()

    async def unless_ended(self, work: Coroutine[Any, Any, Reply]) -> Reply:
        """Run ``work`` and return its result. Raises the error that ends the session if that comes first."""
        task = self._loop.create_task(work)
        either: list[asyncio.Future[Any]] = [task, self._ended]
        try:
            await wait_any(either, LIVENESS, "its work, or the end of the run", CONTROLLER)
            if not task.done():
                self._ended.result()
            return await task
        finally:
            task.cancel()  # a caller that stops waiting leaves no task behind

    def send(self, message: m.Message) -> None:
        """Send a message to the controller; it is dropped while there is no connection."""
        self._connection.send(message)

    async def close(self, error: str = "", code: int = 0) -> None:
        """Leave the run and close the connection.

        Args:
            error: the reason if this worker has failed.
            code: exit code of this worker.
        """
        self.report()
        self._stops.close()
        self.send(m.Leave(error, code))
        self.end(Stopped("the session is closed", 0))
        await cancel_and_wait(self._tasks, CLOSE_S)
        await self._lanes.close()
        self._connection.close()

    def end(self, error: FlowError) -> None:
        """End the session: all open and later waits raise ``error``."""
        if not self._ended.done():
            self._ended.set_exception(error)
        self._connection.stop_reconnecting()
        self._requests.end(error)

    async def _send_heartbeats(self) -> None:
        """Send heartbeats and reports until the session is closed."""
        while True:
            self.report()
            await self._connection.heartbeat(m.Heartbeat(monotonic(), self._reported_s, advances=self.progress.take()))

    async def _measure_resources(self) -> None:
        """Measure what this worker uses, to be sent with the next report, until the session is closed."""
        interval_s = FIRST_USE_S
        while True:
            await pause(interval_s)
            # On a thread: the driver of an accelerator may be slow, and only this task waits for it.
            self._resource_use = pack_use(await asyncio.to_thread(self.resources.take))
            interval_s = USE_INTERVAL_S

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` as a background task of the session."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("a background task failed", exc_info=error)
        self.end(error if isinstance(error, FlowError) else FlowError(f"this worker failed: {error!r}; see its log"))

    def _rows(self, part: Part, grant: m.Grant) -> Rows:
        return self.store.rows(part.column, grant.groups if self.store.scope(part.column) == "group" else grant.slots)

    def _release_unclaimed(self, answer: m.Message) -> None:
        if isinstance(answer, m.Grant) and answer.slots:
            # The caller stopped waiting: the slots should be granted again before their lease expires.
            self._release(answer, "", "the caller of this pull has stopped waiting")

    def _release(self, grant: m.Grant, stage: str, reason: str) -> None:
        leases = (grant.lease,) * len(grant.slots)
        self._resync.lease_ended(grant.slots, leases)
        self._send_if_open(m.ReleaseLease(stage=stage, slots=grant.slots, leases=leases, lost=False, reason=reason))

    def _send_rendezvous_key(self, peer: str, lane: str, key: str, value: bytes) -> None:
        self._send_if_open(m.RendezvousKey(peer, lane, key, value))

    def _send_if_open(self, message: m.Message) -> None:
        if not self._ended.done():
            self.send(message)


def reported_waits() -> tuple[tuple[str, str, float, float], ...]:
    """Long open waits of this process, oldest first, as (what, blocked on, age_s, limit_s).

    Waits for the controller are left out: the controller knows them. In a process with more than one session, waits
    cannot be attributed to a worker and none is reported.
    """
    now = monotonic()
    waits = open_waits()
    if sum(wait.what == NEXT_MESSAGE for wait in waits) > 1:
        return ()
    long = [wait for wait in waits if wait.blocked_on != CONTROLLER and now - wait.since_s > REPORTED_AFTER_S]
    return tuple(
        (wait.what[:MAX_REPORTED_CHARS], wait.blocked_on[:MAX_REPORTED_CHARS], now - wait.since_s, wait.limit_s)
        for wait in long[:MAX_REPORTED_WAITS]
    )


def _inline_values(what: str, columns: Mapping[str, Sequence[float]] | None) -> tuple[Values, ...]:
    """Inline columns as records. Raises LocalProtocolError for a number that is not finite."""
    numbers = tuple([Values(column, tuple(map(float, values))) for column, values in (columns or {}).items()])
    if fault := values_fault(numbers):
        raise LocalProtocolError(f"{what}: {fault}")
    return numbers


async def connect(address: str, worker: str, role: str, deadline_s: float, keys: WorkerKeys | None = None) -> Session:
    """Join the run of the controller at ``tcp://HOST:PORT``.

    Args:
        address: the controller's address.
        worker: this worker's name, unique in the run.
        role: its role in the recipe.
        deadline_s: seconds to wait for the controller's welcome.
        keys: CURVE keys, for a controller that has them.

    Raises:
        WaitExpired: no controller answered in time.
        LocalProtocolError: the controller refused this worker.
        Stopped: the controller refused this worker for good.
        ConfigError: the address is malformed, or the keys of this worker and of the controller do not match.
    """
    hello = m.Hello(
        protocol=m.PROTOCOL,
        worker=worker,
        role=role,
        host=socket.gethostname(),
        pid=os.getpid(),
        lanes=available_transports(),
        clock=clock_name(),
    )
    connection = Connection(address, hello, keys)
    await connection.open(deadline_s)
    return Session(worker, connection)
