"""Signals that tell a process to save what it has and end in order.

What each process of a run does then: `flowrt.launcher.signals`.
"""

import asyncio
import signal

TERMINATION = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""SLURM and submitit send USR1 or USR2 before a time limit, a closed terminal or ssh connection sends HUP."""
TORCHRUN_VARIABLES = ("PET_SIGNALS_TO_HANDLE", "TORCHELASTIC_SIGNALS_TO_HANDLE")
"""Environment variables, of new and old versions: the signals that torchrun passes on; any other one kills it."""
TORCHRUN_SIGNALS = ",".join(number.name for number in (*TERMINATION, signal.SIGINT, signal.SIGQUIT))


def termination_signals() -> tuple[signal.Signals, ...]:
    """Those of `TERMINATION` that this process does not ignore: under nohup it ignores HUP, and goes on doing so."""
    return tuple(number for number in TERMINATION if signal.getsignal(number) is not signal.SIG_IGN)


class EarlySignals:
    """Keeps signals that arrive before this process can end in order; without it they would kill the process.

    Create it on the main thread. Handlers that are installed later replace its own.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        """In the order of their arrival."""
        for number in termination_signals():
            signal.signal(number, lambda number, _: self.received.append(signal.Signals(number)))


def ignore_termination() -> None:
    """Ignore further signals of this kind: the exit code of this process is decided, and they must not change it.

    Without this, a signal that arrives while the interpreter shuts down would kill the process. Call it on the main
    thread, in a running event loop that handles these signals, or without one.
    """
    numbers = termination_signals()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        loop = None
    for number in numbers:
        if loop is not None:
            loop.remove_signal_handler(number)  # otherwise the loop makes the signal fatal again when it closes
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
