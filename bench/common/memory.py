"""Memory of a process by the kernel's own counters, and measurements in processes of their own."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def status_bytes(name: str, pid: int | str = "self") -> int:
    """A value of /proc/PID/status in bytes, as VmRSS. Raises ValueError if the process has none."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise ValueError(f"process {pid} has no {name}: is it running?")


def begin_peak() -> int:
    """Begin a new peak of this process; returns its resident memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def peak_bytes(pid: int | str = "self") -> int:
    """The largest resident memory of a process since it began, or since `begin_peak`."""
    return status_bytes("VmHWM", pid)


def in_process(measure: Callable[..., Result], *arguments: object) -> Result:
    """The result of a function of a module in a new process with one thread. Raises EOFError if the process fails."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("spawn").Process(target=_send_result, args=(sender, measure, arguments))
    child.start()
    sender.close()
    try:
        result: Result = receiver.recv()
    finally:
        child.join()
    return result


def _send_result(sender: Connection, measure: Callable[..., object], arguments: tuple[object, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    sender.send(measure(*arguments))
