"""The mind alone, in this process: offer, pull and commit of one slot in a steady mix. A child of a bench."""

import sys
import time

from children import obey_on_loop
from servers import POLICIES, STREAM, patient

from flowrt.controller.core import Core
from flowrt.controller.events import Joined, Said, Send
from flowrt.ids import WorkerId
from flowrt.wire import messages as m
from flowrt.wire.loops import serve_loop
from flowrt.wire.records import Values

PORTION = 1000
WORKER = WorkerId("worker")


def offer(core: Core, rows: int) -> None:
    numbers = tuple(range(rows))
    values = (Values("value", tuple(map(float, numbers))),)
    core.handle(Said(WORKER, m.Offer(1, "rows", numbers, 0, 1, 0, (), values)), 0.0)


def measure(core: Core, cycles: int) -> float:
    """Events a second over so many offers, pulls and commits; as many slots live after as before."""
    start_s = time.perf_counter()
    for _ in range(cycles):
        offer(core, 1)
        (answer,) = core.handle(Said(WORKER, m.Pull(2, "consume", 1, 0, -1)), 0.0)
        assert isinstance(answer, Send)
        grant = answer.message
        assert isinstance(grant, m.Grant)
        core.handle(Said(WORKER, m.Commit(3, "consume", grant.slots, (grant.lease,), (), (), ())), 0.0)
    return 3 * cycles / (time.perf_counter() - start_s)


async def obey() -> None:
    core = Core(patient(), STREAM, POLICIES)
    core.handle(Joined(WORKER, "bench", "host"), 0.0)
    live = int(float(sys.argv[1]))
    for _ in range(0, live, PORTION):
        offer(core, min(live, PORTION))
    measure(core, 1000)
    await obey_on_loop({"measure": lambda cycles: measure(core, cycles)}, live)


if __name__ == "__main__":
    serve_loop(obey())  # as the controller's process is set up, its collector of cycles included
