"""The controller's core alone, without sockets, disk or other processes: a child of `bench/core_events.py`.

python bench/control_plane/cores.py live SLOTS     a core with this many slots
python bench/control_plane/cores.py costs          commands for costs of single events, runs and the ledger
"""

import sys
import time

from common.children import serve_commands, serve_commands_on_loop
from control_plane import attribution_load, core_costs, long_ledger
from control_plane.servers import POLICIES, STREAM, long_timeouts

from flowrt.controller.core import Core
from flowrt.controller.events import Command, Event, MessageReceived, Send, WorkerConnected
from flowrt.engines.simulated.workload import GenerationCost, Lengths, LogNormal, TrainCost
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import Values
from flowrt.runtime.event_loop import serve_loop
from flowrt.simulation.cluster import ClusterPlan, ClusterSimulation

PORTION = 1000
WORKER = WorkerId("worker")


def offer(core: Core, rows: int) -> None:
    numbers = tuple(range(rows))
    values = (Values("value", tuple(map(float, numbers))),)
    core.handle(
        MessageReceived(
            WORKER,
            m.Offer(request=1, flow="rows", prompts=numbers, epoch=0, members=1, at_least=0, lengths=(), tags=values),
        ),
        0.0,
    )


def measure(core: Core, cycles: int) -> float:
    """Events a second over ``cycles`` offers, pulls and commits, which leave the number of live slots unchanged."""
    start_s = time.perf_counter()
    for _ in range(cycles):
        offer(core, 1)
        (answer,) = core.handle(
            MessageReceived(WORKER, m.Pull(request=2, stage="consume", slots=1, tokens=0, step=-1)), 0.0
        )
        assert isinstance(answer, Send)
        grant = answer.message
        assert isinstance(grant, m.Grant)
        core.handle(
            MessageReceived(
                WORKER,
                m.Commit(
                    request=3, stage="consume", slots=grant.slots, leases=(grant.lease,), parts=(), inline=(), spans=()
                ),
            ),
            0.0,
        )
    return 3 * cycles / (time.perf_counter() - start_s)


class TimedCore(Core):
    """A core that sums the processor time of all events in ``spent_s`` (seconds)."""

    spent_s = 0.0

    def transition(self, event: Event, now: float) -> list[Command]:
        start_s = time.process_time()
        commands = super().transition(event, now)
        self.spent_s += time.process_time() - start_s
        return commands


def sample_us(workers: int, steps: int) -> float:
    """Processor time of the core, in microseconds a trained sample, in a run of 512 groups of 8 samples a step."""
    plan = ClusterPlan(
        workers=workers,
        rows=16,
        groups_per_step=512,
        members=8,
        steps=steps,
        lengths=Lengths(LogNormal(200, 0.8, 2000), correlation=0.6, seed=1),
        decode=GenerationCost(base_s=0.01, per_row_s=0.0005),
        train=TrainCost(token_s=1e-6, optimizer_s=0.5),
    )
    fleet = ClusterSimulation(plan, TimedCore)
    fleet.run()
    assert isinstance(fleet.core, TimedCore)
    return 1e6 * fleet.core.spent_s / sum(closed.samples for _, closed in fleet.steps)


async def serve_with_live_slots(live: int) -> None:
    core = Core(long_timeouts(), STREAM, POLICIES)
    core.handle(WorkerConnected(WORKER, "bench", "host"), 0.0)
    for _ in range(0, live, PORTION):
        offer(core, min(live, PORTION))
    measure(core, 1000)
    await serve_commands_on_loop({"measure": lambda cycles: measure(core, cycles)}, live)


if __name__ == "__main__":
    if sys.argv[1] == "live":
        # The loop of the controller's process, with its settings of the cyclic garbage collector.
        serve_loop(serve_with_live_slots(int(sys.argv[2])))
    else:
        serve_commands(
            {
                "sample_us": sample_us,
                "start_on_ledger": long_ledger.start,
                "attribution": attribution_load.measure,
                "slots": core_costs.slot_costs,
                "weights": core_costs.weight_costs,
                "relays": lambda **size: {"relay_4096_ratio": core_costs.relay_ratio(**size)},
                "month": lambda **size: {"month_memory_growth": core_costs.month_growth(**size)},
            }
        )
