"""Contact with the controller: heartbeats, and a new line when the old one is cut."""

import asyncio
from collections.abc import Callable, Iterable

from flowrt.client.heartbeat import SILENT_BEATS
from flowrt.client.line import Line
from flowrt.client.returning import find_again
from flowrt.errors import FlowError, WaitExpired
from flowrt.waiting import until
from flowrt.wire import messages as m


class Contact:
    """The present line. While there is none, `send` says nothing: what matters is told to the next controller."""

    def __init__(
        self,
        line: Line,
        welcome: m.Welcome,
        obey: Callable[[m.Message], None],
        end: Callable[[FlowError], None],
        left_alone: Callable[[], None],
        retell: Callable[[], Iterable[m.Message]],
    ) -> None:
        """``left_alone`` is called when the line is cut, ``retell`` says what to begin the next one with."""
        self.welcome = welcome
        self.is_away = False
        self._line = line
        self._obey = obey
        self._end = end
        self._left_alone = left_alone
        self._retell = retell
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        self._cut_off = asyncio.Event()
        self._over = False

    def listen(self) -> None:
        """From now on orders are carried out, those that have come already first."""
        self._heard_s = self._loop.time()
        self._line.hand_over(self._hear, self._end, self._cut)

    def send(self, message: m.Message) -> None:
        if not self.is_away:
            self._line.send(message)

    def watch(self, for_s: float) -> None:
        """Look for an answer that is about to come, for so many seconds at most."""
        if not self.is_away:
            self._line.watch(for_s)

    def over(self) -> None:
        """The session has ended: a line that is cut from now on is not replaced."""
        self._over = True

    def close(self) -> None:
        self._line.close(0 if self.is_away else None)

    async def keep(self, report: Callable[[], None]) -> None:
        """Send heartbeats for as long as there is a controller, and find it when it has gone and come back."""
        while True:
            await self._beat(report)
            try:
                line, welcome = await find_again(self._line, self.welcome)
            except FlowError as error:
                self._end(error)
                return
            self._line, self.welcome, self.is_away = line, welcome, False
            self._cut_off.clear()
            for message in self._retell():
                self.send(message)
            self.listen()

    def _hear(self, message: m.Message) -> None:
        self._heard_s = self._loop.time()
        self._obey(message)

    def _cut(self) -> None:
        """The connection has closed, or nothing comes over it any more."""
        if not self._over and not self.is_away:
            self.is_away = True
            self._line.close(0)
            self._left_alone()
            self._cut_off.set()

    async def _beat(self, report: Callable[[], None]) -> None:
        """Heartbeats until the line is cut, and the verdict on a controller that does not answer them."""
        beat_s = self.welcome.heartbeat_s
        while not self.is_away:
            asked_s = self._loop.time()
            self.send(m.Heartbeat())
            report()
            try:
                await until(self._cut_off.wait(), beat_s, "the next heartbeat", "this worker")
            except WaitExpired:
                # Judged by beats that were really sent: a loop that was held up itself must not blame the controller.
                timely = self._loop.time() - asked_s < 2 * beat_s
                if timely and asked_s - self._heard_s > SILENT_BEATS * beat_s:
                    self._cut()
