"""Requests of a worker and their answers: each is answered once, or its wait ends at a deadline, saying for what."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from flowrt.client.deadlines import Deadlines
from flowrt.errors import Drained, FlowError, RemoteProtocolError, WaitExpired
from flowrt.waiting import CONTROLLER, noted
from flowrt.wire import messages as m

Request = m.Offer | m.Pull | m.Commit | m.Saved
LAST_WORD_S = 30.0
"""How long the controller may take to answer a request that was withdrawn."""
BRISK_S = 0.001
"""While answers come sooner than this, whoever waits for a single one looks for it before it sleeps, …"""
WATCH_S = 0.0005
"""… for so long at most: what a request may cost in processor time. To wake up may take as long as to be answered."""


@dataclass(slots=True)
class _Open:
    """A request without an answer yet."""

    message: Request
    reply: asyncio.Future[Any]
    limit_s: float
    withdrawn: bool = False


class Asking:
    """The open requests of one session."""

    def __init__(
        self,
        worker: str,
        send: Callable[[m.Message], None],
        watch: Callable[[float], object],
        unclaimed: Callable[[m.Message], None],
    ) -> None:
        """``watch`` looks for answers, without sleeping, for so many seconds at most.

        ``unclaimed`` is called with each answer that nobody waits for any more.
        """
        self._worker = worker
        self._send = send
        self._watch = watch
        self._unclaimed = unclaimed
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, _Open] = {}
        self._ended: FlowError | None = None
        self._leaving = False
        self._numbers = 0
        self._brisk = False  # the last answer came at once
        self._deadlines = Deadlines(self._expire)

    def number(self) -> int:
        """A fresh request number."""
        self._numbers += 1
        return self._numbers

    async def ask(self, message: Request, deadline_s: float) -> Any:
        """Send a request and wait for its answer.

        Raises WaitExpired when there is none within ``deadline_s`` seconds: then the controller has forgotten the
        request. Raises RemoteProtocolError when it is refused, and what ended the session when that happens.
        """
        if self._ended is not None:
            raise self._ended
        number = message.request
        self._open[number] = one = _Open(message, self._loop.create_future(), deadline_s)
        self._deadlines.add(number, deadline_s)
        try:
            self._send(message)
            if self._brisk and len(self._open) == 1:
                self._loop.call_soon(self._look_for, one)  # after whoever else has something to do, or to ask
            asked_s = monotonic()
            with noted(f"the answer to {type(message).__name__} {number}", CONTROLLER, deadline_s):
                answer = await one.reply
            self._brisk = monotonic() < asked_s + BRISK_S
            return answer
        except asyncio.CancelledError:
            # Whoever asked has given up: nothing may wait at the controller in its name, nor an answer be lost that
            # came at this very moment.
            if self._ended is None and one.reply.cancelled():
                self._withdraw(one)
            elif self._ended is None and one.reply.exception() is None:
                self._unclaimed(one.reply.result())
            raise
        finally:
            self._deadlines.drop(number)
            del self._open[number]

    def asked(self, request: int) -> Request | None:
        """The request of this number, if it has no answer yet."""
        one = self._open.get(request)
        return None if one is None else one.message

    def again(self) -> list[Request]:
        """What a controller that has come back has to be asked again; what was withdrawn from it is over."""
        again = []
        for one in list(self._open.values()):
            if not one.withdrawn:
                again.append(one.message)
            elif not one.reply.done():
                kind = type(one.message).__name__
                one.reply.set_exception(WaitExpired(f"{self._worker}: {kind} was withdrawn, and its controller left"))
        return again

    def answer(self, request: int, outcome: m.Message) -> None:
        """Hand an answer to whoever waits for it."""
        one = self._open.get(request)
        if one is None or one.reply.done():
            self._unclaimed(outcome)
        elif not isinstance(outcome, m.Refused):
            one.reply.set_result(outcome)
        elif one.withdrawn:
            one.reply.set_exception(WaitExpired(f"{self._worker}: {type(one.message).__name__} {outcome.reason}"))
        elif self._leaving and isinstance(one.message, m.Pull):
            one.reply.set_exception(Drained(f"{self._worker} is leaving the run: {outcome.reason}"))
        else:
            one.reply.set_exception(RemoteProtocolError(outcome.reason))

    def leave(self) -> None:
        """This worker was told to leave: what it pulls is refused from now on, and that is no mistake."""
        self._leaving = True

    def end(self, error: FlowError) -> None:
        """No answer will come any more: whoever waits gets this error."""
        self._ended = self._ended or error
        self._deadlines.close()
        for one in self._open.values():
            if not one.reply.done():
                one.reply.set_exception(error)

    def _look_for(self, one: _Open) -> None:
        if len(self._open) == 1 and not one.reply.done():
            self._watch(WATCH_S)

    def _expire(self, number: int) -> None:
        if (one := self._open.get(number)) is None:
            return
        # It may have been answered at this very moment; the controller's answer to the withdrawal decides.
        if one.withdrawn or not self._withdraw(one):
            if not one.reply.done():
                one.reply.set_exception(
                    WaitExpired(
                        f"{self._worker} waited {one.limit_s:.1f} s for an answer to {type(one.message).__name__}, and "
                        "the controller does not even say why; look at its log"
                    )
                )
            return
        one.limit_s += LAST_WORD_S
        self._deadlines.add(number, LAST_WORD_S)

    def _withdraw(self, one: _Open) -> bool:
        if isinstance(one.message, m.Commit | m.Saved):
            return False
        one.withdrawn = True
        self._send(m.Withdraw(one.message.request))
        return True
