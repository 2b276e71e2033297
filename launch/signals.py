"""How a run is told to end from outside: as soon as what it has trained is saved (SIGTERM), or at once (SIGINT)."""

import asyncio
import contextlib
import signal
from collections.abc import Callable

from flowrt.launch.supervisor import RUN

from flowrt.errors import EXIT_INTERRUPTED, WaitExpired
from flowrt.waiting import all_of, cancelled, first_of, until

INTERRUPT_S = 8.0


class Signals:
    """To get SIGTERM again changes nothing: schedulers send it to every process, and job scripts pass it on."""

    def __init__(self, drain_s: float) -> None:
        """``drain_s`` is how long saving may take; at 0 nothing is saved, and SIGTERM ends the run at once too."""
        self._drain_s = drain_s
        self._now = asyncio.Event()
        self._saved = asyncio.Event()

    def listen(self) -> None:
        """From now on signals are heard."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._now.set)
        loop.add_signal_handler(signal.SIGTERM, (self._saved if self._drain_s else self._now).set)

    @property
    def is_leaving(self) -> bool:
        """The run is to end, and to be gone on with by somebody else: it is not started again here."""
        return self._saved.is_set()

    async def guard(
        self, work: asyncio.Task[int], tell: Callable[[signal.Signals], bool], say: Callable[[str], None]
    ) -> int:
        """The outcome of the work; when a signal comes, it ends soon. ``tell`` passes one on to the controller.

        A controller that listens ends its run in order; before there is one there is nothing to put in order.
        """
        now = asyncio.create_task(until(self._now.wait(), RUN, "an interruption", "the user"))
        saved = asyncio.create_task(until(self._saved.wait(), RUN, "a termination", "the user"))
        await first_of({work, now, saved}, RUN, "the end of the run, or a signal", "the run")
        if saved.done() and not now.done() and not work.done() and tell(signal.SIGTERM):
            say("terminated: what is trained is saved first (Ctrl-C, or SIGINT: it ends at once)")
            with contextlib.suppress(WaitExpired):
                limit_s = self._drain_s + INTERRUPT_S
                await first_of({work, now}, limit_s, "the terminated run to end", "the controller")
        now.cancel()
        saved.cancel()
        if not work.done():
            say("interrupted: ending the run")
            if tell(signal.SIGINT):
                with contextlib.suppress(WaitExpired):
                    await all_of({work}, INTERRUPT_S, "the interrupted run to end", "the controller")
            if not work.done():
                await cancelled({work}, INTERRUPT_S)
                return EXIT_INTERRUPTED
        return work.result()
