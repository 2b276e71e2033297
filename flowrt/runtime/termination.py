"""Signals that tell a process to save what it has and end in order."""

import signal

TERMINATION = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""SLURM and submitit send USR1 or USR2 before a time limit, a closed terminal or ssh connection sends HUP."""
TORCHRUN_VARIABLES = ("PET_SIGNALS_TO_HANDLE", "TORCHELASTIC_SIGNALS_TO_HANDLE")
"""Environment variables, of new and old versions: the signals that torchrun passes on; any other one kills it."""
TORCHRUN_SIGNALS = ",".join(number.name for number in (*TERMINATION, signal.SIGINT, signal.SIGQUIT))


def termination_signals() -> tuple[signal.Signals, ...]:
    """Those of `TERMINATION` that this process does not ignore: under nohup it ignores HUP, and goes on doing so."""
    return tuple(number for number in TERMINATION if signal.getsignal(number) is not signal.SIG_IGN)
