"""Signals of a launcher: SIGTERM and its kind make a run save a checkpoint and end, SIGINT ends the run at once.

What SIGTERM does in the processes of a run; the others of its kind (`flowrt.runtime.termination`) do the same:

- The launcher passes it on to the controller, and waits for the end of the run.
- The controller (`controller_main`) preempts the run: the trainers save a checkpoint and leave
  (`flowrt.controller.transitions.preemption`). Without checkpoints it ends the run.
- A worker (`flowrt.roles.main`) drains: it gets nothing new, and leaves when no other worker needs what it holds
  (`flowrt.controller.transitions.drain`). The drain of a trainer preempts the run.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable

from flowrt.errors import EXIT_INTERRUPTED, WaitExpired
from flowrt.launcher.supervision import RUN
from flowrt.runtime.termination import ignore_termination, termination_signals
from flowrt.runtime.waits import BoundedElsewhere, cancel_and_wait, wait_any, wait_until

INTERRUPT_S = 8.0
SAVED = BoundedElsewhere("checkpoint.preemption_save_timeout_s, in the controller, whose liveness is watched")


class Signals:
    """The signals of this process.

    A second SIGTERM has no effect: schedulers and job scripts both send it. A second SIGINT kills what has not ended.
    """

    def __init__(self, saves: bool) -> None:
        """``saves``: whether SIGTERM makes the run save; otherwise it ends the run at once, like SIGINT."""
        self._saves = saves
        self._interrupted = asyncio.Event()
        self._killed = asyncio.Event()
        self._terminated = asyncio.Event()

    def install(self) -> None:
        """Handle signals on the running event loop."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        for number in termination_signals():
            loop.add_signal_handler(number, (self._terminated if self._saves else self._interrupted).set)

    def close(self) -> None:
        """Ignore further signals until this process exits, if one has ended the run: often several are sent."""
        if self._terminated.is_set() or self._interrupted.is_set():
            ignore_termination()

    def _interrupt(self) -> None:
        (self._killed if self._interrupted.is_set() else self._interrupted).set()

    @property
    def preempted(self) -> bool:
        """Whether a signal made the run save and end; this launcher does not restart it."""
        return self._terminated.is_set()

    async def run(
        self, work: asyncio.Task[int], forward: Callable[[signal.Signals], bool], report: Callable[[str], None]
    ) -> int:
        """Wait for ``work`` and return its exit code; after a signal, end it within a time limit.

        Args:
            work: the run.
            forward: signals the controller, which then ends its run in order; returns False without a controller.
            report: prints a line.
        """
        interrupted = asyncio.create_task(wait_until(self._interrupted.wait(), RUN, "an interruption", "the user"))
        terminated = asyncio.create_task(wait_until(self._terminated.wait(), RUN, "a termination", "the user"))
        await wait_any({work, interrupted, terminated}, RUN, "the end of the run, or a signal", "the run")
        if terminated.done() and not interrupted.done() and not work.done() and forward(signal.SIGTERM):
            report("terminated: saving what is trained before the run ends (Ctrl-C or SIGINT ends it at once)")
            await wait_any({work, interrupted}, SAVED, "the terminated run to end", "the controller")
        interrupted.cancel()
        terminated.cancel()
        if not work.done():
            report("interrupted: ending the run (Ctrl-C again kills its processes)")
            if forward(signal.SIGINT):
                killed = asyncio.create_task(wait_until(self._killed.wait(), RUN, "another interruption", "the user"))
                with contextlib.suppress(WaitExpired):
                    await wait_any({work, killed}, INTERRUPT_S, "the interrupted run to end", "the controller")
                killed.cancel()
            if not work.done():
                await cancel_and_wait({work}, INTERRUPT_S)
                return EXIT_INTERRUPTED
        return work.result()
