"""A worker's side of the conversation with the controller: everything a worker does goes through its session.

Every wait ends: with its answer, with a deadline's WaitExpired, or with what ended the session. A controller that goes
and comes back is found again by the session itself: whoever waits for it just waits a little longer.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from flowrt.client import heartbeat
from flowrt.client.arrivals import Arrivals
from flowrt.client.asking import Asking
from flowrt.client.batches import Batch, Columns
from flowrt.client.beside import Beside
from flowrt.client.contact import Contact
from flowrt.client.line import Line
from flowrt.client.memory import Memory
from flowrt.client.orders import Orders
from flowrt.client.params import Params
from flowrt.client.promised import Promised
from flowrt.client.returning import retell
from flowrt.clock import MonotonicClock
from flowrt.errors import FlowError, Stopped, TransferError
from flowrt.metrics import Timeline
from flowrt.transport.lane import LaneSet
from flowrt.transport.rows import lengths_of
from flowrt.transport.settling import seen
from flowrt.transport.store import Rows, TensorStore
from flowrt.transport.transports import transports
from flowrt.waiting import CONTROLLER, first_of, until
from flowrt.wire import messages as m
from flowrt.wire.records import BusySpan, Lengths, Part, Values

Reply = TypeVar("Reply")
PULL_TRIES = 3


class Session:
    """Open one with `connect`, close it with `close`."""

    def __init__(self, worker: str, line: Line, welcome: m.Welcome) -> None:
        self.worker = worker
        self.timeline = Timeline(MonotonicClock())
        self.store = TensorStore(welcome.columns, welcome.store_bytes)
        self._loop = asyncio.get_running_loop()
        tell, rate = lambda *key: self._tell(m.Signal(*key)), 1e6 * welcome.lane_mb_per_s
        able = transports(line.address)
        self._lanes = LaneSet(worker, able, welcome.lane_s, tell, least_bytes_per_s=rate)
        self._arrivals = Arrivals(self.store, self._lanes, lambda *turn: self._tell(m.Undelivered(*turn)))
        self._beside = Beside(self.end)
        self.params = Params(self._lanes, self.send, self._beside.spawn, welcome.lane_s)
        self._asking = Asking(worker, self.send, lambda for_s: self._contact.watch(for_s), self._unclaimed)
        self._promised = Promised(self.store)
        self._memory = Memory(welcome.renewable)
        self._orders = Orders(
            *(self.store, self._lanes, self._arrivals, self.params, self._asking, self._promised, self._memory),
            self.end,
        )
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._ended.add_done_callback(seen)
        self._waits = heartbeat.notable_waits()
        heartbeat.sessions += 1
        obey = self._beside.guarded(self._orders.obey)
        self._contact = Contact(line, welcome, obey, self.end, self._left_alone, self._retell)
        self._beside.spawn(self._contact.keep(self.report))

    @property
    def welcome(self) -> m.Welcome:
        """What the controller said at the door; the one that is there now."""
        return self._contact.welcome

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
    ) -> int | None:
        """Offer one prompt as a group of ``members`` slots, as `offer_many` does; returns the group's id."""
        columns = {column: [tensor] for column, tensor in tensors.items()}
        groups = await self.offer_many(flow, [prompt], epoch, members, columns, None, at_least, deadline_s)
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
    ) -> range | None:
        """Offer prompts, each as a group of ``members`` slots; returns when they are open, all of them at once.

        ``tensors`` are the group columns, one 1-D tensor a prompt (a list, or `Packed`); they stay here until their
        group is done. ``tags`` are inline columns, one number a slot. Returns the ids of the groups, or None when the
        run needs no more prompts. Raises, with nothing opened, WaitExpired when there is no room within ``deadline_s``
        seconds, OverBudget when there is none in this worker's store, LocalProtocolError for a wrong tensor.
        """
        request = self._asking.number()
        columns = tensors or {}
        self._promised.offer(request, columns)
        offer = m.Offer(
            request,
            flow,
            tuple(prompts),
            epoch,
            members,
            at_least,
            tuple([Lengths(column, lengths_of(rows)) for column, rows in columns.items()]),
            tuple([Values(column, tuple(map(float, values))) for column, values in (tags or {}).items()]),
        )
        opened: m.Opened = await self._asking.ask(offer, deadline_s or self.welcome.wait_s)
        return None if opened.first < 0 else range(opened.first, opened.first + len(prompts))

    async def pull(
        self,
        stage: str,
        slots: int,
        tokens: int = 0,
        step: int = -1,
        deadline_s: float | None = None,
        done: Batch | None = None,
    ) -> Batch:
        """Lease up to ``slots`` slots that are ready for ``stage``; waits until there are some.

        ``done`` is a batch, of a stage that makes nothing, on which the work is complete: one message for a commit
        and a pull (the new batch's ``refused`` says if it was too late). Raises WaitExpired, with nothing leased, when
        there are none within ``deadline_s`` seconds; TransferError when their tensors did not come PULL_TRIES times;
        Drained when this worker was told to leave.
        """
        reason, leases = "", () if done is None else (done.grant.lease,)
        for _ in range(PULL_TRIES):
            pull = m.Pull(self._asking.number(), stage, slots, tokens, step, leases)
            grant: m.Grant = await self._asking.ask(pull, deadline_s or self.welcome.wait_s)
            try:
                if grant.parts and self.store.missing(grant.parts):
                    senders = ", ".join(sorted({incoming.turn.sender for incoming in grant.incoming}))
                    await self.unless_ended(self.store.wait_for(grant.parts, senders))
            except TransferError as error:
                reason = str(error)
            except asyncio.CancelledError:
                self._unclaimed(grant)
                raise
            if not self.store.missing(grant.parts):
                tensors = {part.column: self._rows(part, grant) for part in grant.parts}
                return Batch(grant, Columns(tensors), {values.column: list(values.values) for values in grant.inline})
            self._give_back(grant, stage, reason or "freed on its way")
            leases = ()
        raise TransferError(f"{self.worker} pulled {stage} {PULL_TRIES} times and its tensors never came: {reason}")

    async def commit(
        self,
        stage: str,
        slots: Sequence[int],
        leases: Sequence[int],
        tensors: Mapping[str, Rows] | None = None,
        inline: Mapping[str, Sequence[float]] | None = None,
        spans: Sequence[tuple[int, ...]] = (),
    ) -> tuple[int, ...]:
        """Say that the stage is done for these slots; returns those that were refused.

        Tensor columns (lists of 1-D tensors, or `Packed`) stay in this worker's store, inline columns travel with the
        message. Raises, with nothing said or kept, LocalProtocolError when a tensor is not what its column takes,
        OverBudget when the store has no room for them.
        """
        request, columns, ids = self._asking.number(), tensors or {}, tuple(slots)
        self._promised.commit(request, ids, columns)
        parts = tuple([Part(column, ids, lengths_of(rows)) for column, rows in columns.items()])
        values = tuple([Values(column, tuple(map(float, rows))) for column, rows in (inline or {}).items()])
        commit = m.Commit(request, stage, ids, tuple(leases), parts, values, tuple(spans))
        done: m.Committed = await self._asking.ask(commit, self.welcome.wait_s)
        return done.refused

    def give_back(self, stage: str, batch: Batch, reason: str = "not wanted any more") -> None:
        """End the leases on a batch without a result: its slots are served again."""
        if batch.slots:
            self._give_back(batch.grant, stage, reason)

    def lost(self, stage: str, slots: Sequence[int], leases: Sequence[int], reason: str) -> None:
        """These samples cannot be made (an environment broke, …): the run's policy for lost members decides."""
        self._memory.ended(slots, leases)
        self.send(m.Abandon(stage, tuple(slots), tuple(leases), True, reason))

    def exhausted(self, flow: str) -> None:
        """All my prompts of this flow are open. Of the flow to train on: the last step may be smaller."""
        self._memory.exhausted(flow)
        self.send(m.Exhausted(flow))

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """The optimiser has stepped: everything leased to this step is trained."""
        done = m.StepDone(step, tuple((name, float(value)) for name, value in metrics.items()))
        self._memory.step_done(done)
        self.send(done)

    async def saved(self, step: int) -> None:
        """The state after ``step`` steps is written aside; returns once the ledger is on disk as far as that."""
        await self._asking.ask(m.Saved(self._asking.number(), step), self.welcome.wait_s)

    def report(self, numbers: Mapping[str, float] | None = None) -> None:
        """Send the spans of work since the last report, open waits, and named numbers for the summary."""
        named = {name: float(value) for name, value in (numbers or {}).items()}
        self._memory.reported(named)
        if self._contact.is_away:
            return
        spans = tuple(BusySpan(*span) for span in self.timeline.drain())
        before, self._waits = self._waits, heartbeat.notable_waits()
        if spans or named or before or self._waits:
            self.send(m.Report(spans, tuple(named.items()), self._waits))

    def finished(self) -> None:
        """This worker's part of the run is complete; it goes on serving what it holds."""
        self.report()
        self._memory.finished()
        self.send(m.Finished())

    def drain(self) -> None:
        """Ask to leave: nothing more is pulled, and the run goes on without this worker as soon as it can."""
        self.send(m.Drain(0, self.worker))

    async def wait_stopped(self) -> None:
        """Serve others until the controller ends the run; raises Stopped then."""
        await until(asyncio.shield(self._ended), heartbeat.SILENCE, "the end of the run", CONTROLLER)

    async def unless_ended(self, work: Coroutine[Any, Any, Reply]) -> Reply:
        """Run ``work``, but raise what ended the session as soon as that happens."""
        task = self._loop.create_task(work)
        either: list[asyncio.Future[Any]] = [task, self._ended]
        try:
            await first_of(either, heartbeat.SILENCE, "its work, or the end of the run", CONTROLLER)
            if not task.done():
                self._ended.result()
            return await task
        finally:
            task.cancel()  # whoever gives up waiting leaves nothing behind that waits on

    def listen(self) -> None:
        """Carry out what the controller says, from now on."""
        self._contact.listen()

    def send(self, message: m.Message) -> None:
        self._contact.send(message)

    async def close(self, error: str = "") -> None:
        """Say goodbye and drop the connection."""
        self.report()
        self.send(m.Bye(error))
        self.end(Stopped("the session is closed", 0))
        await self._beside.close(heartbeat.CLOSE_S)
        await self._lanes.close()
        self._contact.close()
        heartbeat.sessions -= 1

    def end(self, error: FlowError) -> None:
        """No answer will come any more: whoever waits gets this error."""
        if not self._ended.done():
            self._ended.set_exception(error)
        self._contact.over()
        self._asking.end(error)

    def _left_alone(self) -> None:
        """The controller is gone. A lane that is being made needs it, and it will not know of those that are."""
        self._lanes.drop_all("the controller has gone")

    def _retell(self) -> Iterator[m.Message]:
        return retell(self._memory, self._asking, self.params, self.store)

    def _rows(self, part: Part, grant: m.Grant) -> Rows:
        return self.store.rows(part.column, grant.groups if self.store.scope(part.column) == "group" else grant.slots)

    def _unclaimed(self, answer: m.Message) -> None:
        if isinstance(answer, m.Grant) and answer.slots:
            # Whoever asked has gone; what was leased must not wait for its lease to end.
            self._give_back(answer, "", "nobody waits for this grant any more")

    def _give_back(self, grant: m.Grant, stage: str, reason: str) -> None:
        leases = (grant.lease,) * len(grant.slots)
        self._memory.ended(grant.slots, leases)
        self._tell(m.Abandon(stage, grant.slots, leases, False, reason))

    def _tell(self, message: m.Message) -> None:
        if not self._ended.done():
            self.send(message)
