"""Open requests of a worker and their deadlines, and what is sent again to a restarted controller.

- Each request has one answer, or raises WaitExpired at its deadline. One timer serves all deadlines, because nearly all
  requests are answered long before theirs.
- After a restart of the controller a worker repeats its open requests, the leases to renew, and messages that were sent
  only once (`ResyncState`).
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

from flowrt.client.weights import WeightTransfers
from flowrt.errors import Drained, FlowError, RemoteProtocolError, WaitExpired
from flowrt.protocol import messages as m
from flowrt.runtime.clock import MIN_ABSENCE_S
from flowrt.runtime.waits import CONTROLLER, tracked
from flowrt.transport.tensor_store import TensorStore

CLOCK_RESOLUTION_S = 0.001
"""An event loop may call a timer this much early."""


CHECK_S = 5.0
"""Longest time between two checks of the deadlines, in seconds."""
ANSWER_S = 1.0
"""Time to read answers, or to get them, after this process did not run."""


class Deadlines:
    """Deadlines by number. ``on_expiry`` is called once with each number whose deadline has passed.

    Of a time in which this process does not run (it is stopped, or its loop blocked), at most `CHECK_S` seconds count:
    the answers may be unread, and the controller may have been stopped too.
    """

    def __init__(self, on_expiry: Callable[[int], None]) -> None:
        self._on_expiry = on_expiry
        self._loop = asyncio.get_running_loop()
        self._at_s: dict[int, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = float("inf")  # earliest deadline when the timer was set; it may have been removed since

    def add(self, number: int, seconds: float) -> None:
        """Set the deadline of ``number`` to ``seconds`` from now."""
        self._at_s[number] = at_s = self._loop.time() + seconds
        if at_s < self._timer_s:
            self._set_timer(at_s)

    def remove(self, number: int) -> None:
        """Remove the deadline of ``number``, if it has one."""
        self._at_s.pop(number, None)

    def close(self) -> None:
        """Remove all deadlines."""
        self._at_s.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = min(at_s, self._loop.time() + CHECK_S)
        self._timer = self._loop.call_at(self._timer_s, self._expire_due)

    def _expire_due(self) -> None:
        now = self._loop.time()
        if (late_s := now - self._timer_s) > MIN_ABSENCE_S:
            grace_s = now + ANSWER_S
            self._at_s = {number: max(at_s + late_s, grace_s) for number, at_s in self._at_s.items()}
        self._timer = None
        self._timer_s = float("inf")
        passed = (number for number, at_s in self._at_s.items() if at_s <= now + CLOCK_RESOLUTION_S)
        due = sorted(passed, key=self._at_s.__getitem__)  # several if the loop was blocked
        for number in due:
            del self._at_s[number]
        if self._at_s:
            self._set_timer(min(self._at_s.values()))
        with contextlib.ExitStack() as each:  # makes all calls even if one raises
            for number in reversed(due):
                each.callback(self._on_expiry, number)


Answer = TypeVar("Answer", m.Grant, m.OfferAccepted, m.Committed)
Request = m.Offer | m.Pull | m.Commit | m.CheckpointWritten
CANCEL_TIMEOUT_S = 30.0
"""Seconds that the controller may take to answer a request that was cancelled."""
# Waking a thread may take as long as the answer: while answers come within SPIN_IF_FASTER_S, a single open request
# polls for its answer for up to SPIN_S of processor time before it sleeps.
SPIN_IF_FASTER_S = 0.001
SPIN_S = 0.0005


@dataclass(slots=True)
class _OpenRequest:
    """A request without an answer yet."""

    message: Request
    reply: asyncio.Future[m.Message]
    limit_s: float
    cancelled: bool = False


class RequestTable:
    """The open requests of one session."""

    def __init__(
        self,
        worker: str,
        send: Callable[[m.Message], None],
        spin_wait: Callable[[float], object],
        on_unclaimed: Callable[[m.Message], None],
    ) -> None:
        """Make an empty table.

        Args:
            worker: this worker's name, for errors.
            send: sends a message to the controller.
            spin_wait: polls for messages without sleeping, for at most the given seconds.
            on_unclaimed: called with each answer whose caller has stopped waiting.
        """
        self._worker = worker
        self._send = send
        self._spin_wait = spin_wait
        self._on_unclaimed = on_unclaimed
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, _OpenRequest] = {}
        self._ended: FlowError | None = None
        self._leaving = False
        self._last_number = 0
        self._last_was_fast = False
        self._deadlines = Deadlines(self._expire)

    def number(self) -> int:
        """Return a new request number."""
        self._last_number += 1
        return self._last_number

    async def ask(self, message: Request, answer_type: type[Answer], deadline_s: float) -> Answer:
        """Send a request and return its answer.

        Raises:
            WaitExpired: no answer within ``deadline_s`` seconds. An offer or pull is then cancelled at the controller;
                the error is raised after its answer to that, or CANCEL_TIMEOUT_S later.
            Drained: this worker is leaving the run, and the request is a pull.
            RemoteProtocolError: the controller rejected the request, or answered with a message of another type.
            FlowError: the error that ended the session.
        """
        return await self._answer(self._send_request(message, deadline_s), answer_type)

    def start(self, message: Request, answer_type: type[Answer], deadline_s: float) -> asyncio.Task[Answer]:
        """Send a request now. The returned task has the answer as its result, and raises the errors of `ask`."""
        answer = self._answer(self._send_request(message, deadline_s), answer_type)
        task = self._loop.create_task(answer)
        task.add_done_callback(lambda _: self._remove(message.request))  # even if it was cancelled before it ran
        return task

    def _send_request(self, message: Request, deadline_s: float) -> _OpenRequest:
        if self._ended is not None:
            raise self._ended
        self._send(message)
        self._open[message.request] = request = _OpenRequest(message, self._loop.create_future(), deadline_s)
        self._deadlines.add(message.request, deadline_s)
        return request

    async def _answer(self, request: _OpenRequest, answer_type: type[Answer]) -> Answer:
        message = request.message
        try:
            if self._last_was_fast and len(self._open) == 1:
                self._loop.call_soon(self._spin_for, request)  # after other callbacks, which may send requests too
            sent_s = monotonic()
            with tracked(f"the answer to {type(message).__name__} {message.request}", CONTROLLER, request.limit_s):
                answer = await request.reply
            self._last_was_fast = monotonic() < sent_s + SPIN_IF_FASTER_S
            if not isinstance(answer, answer_type):
                raise RemoteProtocolError(
                    f"the controller answered {type(message).__name__} with {type(answer).__name__}"
                )
            return answer
        except asyncio.CancelledError:
            # The caller stopped waiting: the controller must not keep the request parked, and an answer that has just
            # arrived must not be lost.
            if self._ended is None and request.reply.cancelled():
                self._cancel(request)
            elif self._ended is None and request.reply.exception() is None:
                self._on_unclaimed(request.reply.result())
            raise
        finally:
            self._remove(message.request)

    def _remove(self, number: int) -> None:
        self._deadlines.remove(number)
        self._open.pop(number, None)

    def get(self, number: int) -> Request | None:
        """The request of this number; None if it is not open."""
        request = self._open.get(number)
        return None if request is None else request.message

    def resend_messages(self) -> list[Request]:
        """The requests to send again to a restarted controller. Requests that were cancelled raise WaitExpired."""
        messages = []
        for request in list(self._open.values()):
            if not request.cancelled:
                messages.append(request.message)
            elif not request.reply.done():
                kind = type(request.message).__name__
                reason = f"{self._worker}: {kind} was cancelled, and its controller has gone"
                request.reply.set_exception(WaitExpired(reason))
        return messages

    def on_answer(self, number: int, answer: m.Message) -> None:
        """Complete the request of this number with its answer, or with an error if the answer is `Rejected`."""
        request = self._open.get(number)
        if request is None or request.reply.done():
            self._on_unclaimed(answer)
        elif not isinstance(answer, m.Rejected):
            request.reply.set_result(answer)
        elif request.cancelled:
            kind = type(request.message).__name__
            request.reply.set_exception(WaitExpired(f"{self._worker}: {kind} {answer.reason}"))
        elif self._leaving and isinstance(request.message, m.Pull):
            request.reply.set_exception(Drained(f"{self._worker} is leaving the run: {answer.reason}"))
        else:
            request.reply.set_exception(RemoteProtocolError(answer.reason))

    def set_leaving(self) -> None:
        """From now on a rejected pull raises Drained: this worker is drained."""
        self._leaving = True

    def end(self, error: FlowError) -> None:
        """Let open and later requests raise ``error``: the session has ended."""
        self._ended = self._ended or error
        self._deadlines.close()
        for request in self._open.values():
            if not request.reply.done():
                request.reply.set_exception(error)

    def _spin_for(self, request: _OpenRequest) -> None:
        if len(self._open) == 1 and not request.reply.done():
            self._spin_wait(SPIN_S)

    def _expire(self, number: int) -> None:
        if (request := self._open.get(number)) is None:
            return
        # An answer may be on its way: the controller's answer to the cancellation decides.
        if request.cancelled or not self._cancel(request):
            if not request.reply.done():
                request.reply.set_exception(
                    WaitExpired(
                        f"{self._worker} waited {request.limit_s:.1f} s for an answer to "
                        f"{type(request.message).__name__}, and the controller gave no reason; look at its log"
                    )
                )
            return
        request.limit_s += CANCEL_TIMEOUT_S
        self._deadlines.add(number, CANCEL_TIMEOUT_S)

    def _cancel(self, request: _OpenRequest) -> bool:
        """Cancel a request at the controller; False if its kind cannot be cancelled."""
        if isinstance(request.message, m.Commit | m.CheckpointWritten):
            return False
        request.cancelled = True
        self._send(m.CancelRequest(request.message.request))
        return True


# ---- what is sent again to a restarted controller


@dataclass(slots=True)
class _Lease:
    """A lease with its open slots (neither committed nor released) and the attempt of each."""

    stage: str
    step: int
    slots: dict[int, int]


class ResyncState:
    """Leases of ``renewable`` stages, steps that may not be closed yet, and messages that are sent once in a run."""

    def __init__(self, renewable: Collection[str]) -> None:
        self._renewable = frozenset(renewable)
        self._leases: dict[int, _Lease] = {}
        self._steps: dict[int, m.StepCompleted] = {}
        self._exhausted: dict[str, None] = {}
        self._finished = False
        self._drain: m.Drain | None = None
        self._numbers: dict[str, float] = {}
        self._evaluated: dict[tuple[str, int], m.Evaluated] = {}

    def granted(self, pull: m.Pull, grant: m.Grant) -> None:
        """Add the lease of a grant. A grant for a step shows that all earlier steps are closed, so they are removed."""
        if pull.stage not in self._renewable:
            return
        if pull.step >= 0:
            self._leases = {number: lease for number, lease in self._leases.items() if not 0 <= lease.step < pull.step}
            self._steps = {step: done for step, done in self._steps.items() if step >= pull.step}
        if grant.slots:
            slots = dict(zip(grant.slots, grant.attempts, strict=True))
            self._leases[grant.lease] = _Lease(pull.stage, pull.step, slots)

    def lease_ended(self, slots: Sequence[int], leases: Sequence[int]) -> None:
        """Remove these slots, each with its lease: they are committed or released."""
        if not self._leases:
            return
        for slot, number in zip(slots, leases, strict=True):
            lease = self._leases.get(number)
            if lease is not None and lease.slots.pop(slot, None) is not None and not lease.slots:
                del self._leases[number]

    def step_done(self, done: m.StepCompleted) -> None:
        self._steps[done.step] = done

    def exhausted(self, flow: str) -> None:
        self._exhausted[flow] = None

    def finished(self) -> None:
        self._finished = True

    def drained(self, message: m.Drain) -> None:
        self._drain = message

    def reported(self, numbers: Mapping[str, float]) -> None:
        self._numbers.update(numbers)

    def evaluated(self, done: m.Evaluated) -> None:
        self._evaluated[done.name, done.version] = done

    def renewals(self) -> Iterator[m.RenewLease]:
        """Renewals of the open leases."""
        for number, lease in self._leases.items():
            yield m.RenewLease(
                lease=number,
                stage=lease.stage,
                step=lease.step,
                slots=tuple(lease.slots),
                attempts=tuple(lease.slots.values()),
            )

    def repeated_messages(self) -> Iterator[m.Message]:
        """The other messages to repeat: steps, ends of data, evaluations, reported numbers, end of the role, drain.

        The controller may have received some of them before; a repeated message changes nothing.
        """
        yield from self._steps.values()
        yield from (m.EndOfData(flow) for flow in self._exhausted)
        yield from self._evaluated.values()
        if self._numbers:
            yield m.Report((), tuple(self._numbers.items()), ())
        if self._finished:
            yield m.RoleCompleted()
        if self._drain is not None:
            yield self._drain


def resync_messages(
    resync: ResyncState, requests: RequestTable, weights: WeightTransfers, store: TensorStore
) -> Iterator[m.Message]:
    """All messages for a restarted controller, in the order in which it needs them.

    Weights in use, leases, reports, open requests (their answers may have been lost), and last the inventory of tensors
    and versions held here.
    """
    yield from weights.in_use()
    yield from resync.renewals()
    yield from resync.repeated_messages()
    yield from requests.resend_messages()
    yield m.Inventory(store.inventory(), weights.servable())
