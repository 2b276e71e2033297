"""A process that only computes speaks to nobody: it is alive for as long as it uses the processor."""

import asyncio
from pathlib import Path

from flowrt.launch.processes import Child

from flowrt.errors import WaitExpired
from flowrt.waiting import Guard, Lifesign, cancelled, pause

COMPUTES = Guard("its own end: it computes, and waits for nobody")
LOOK_S = 0.5
END_S = 1.0


async def computed(child: Child, still_s: float) -> int:
    """Its exit code. Raises WaitExpired when it has used no processor for ``still_s`` seconds (where that is known)."""
    if _used_ticks(child.process.pid) is None:
        left: int = await child.ended(COMPUTES)
        return left
    sign = Lifesign(still_s)
    watch = asyncio.create_task(_watched(child.process.pid, sign))
    try:
        left = await child.ended(sign)
    except WaitExpired as late:
        raise WaitExpired(
            f"{child.name} has stood still for {still_s:.0f} s: it is stopped, or waits for a disk that does not "
            f"answer; look at its log {child.log}"
        ) from late
    finally:
        await cancelled({watch}, END_S)
    return left


async def _watched(pid: int, sign: Lifesign) -> None:
    before = _used_ticks(pid)
    while True:
        await pause(LOOK_S)
        now = _used_ticks(pid)
        if now != before:
            sign.give()
        before = now


def _used_ticks(pid: int) -> int | None:
    """Processor time of a process so far; None where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])
