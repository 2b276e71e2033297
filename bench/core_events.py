"""The controller's core alone, without sockets, disk or other processes.

    python bench/core_events.py [--quick] [--json PATH]

``core_events_per_s_LIVE``: offers, pulls and commits of one slot in a steady mix, with LIVE slots in the tables;
``core_flatness`` is the rate with the most slots over the rate with the fewest. ``core_us_a_sample_WORKERS``: processor
time of a trained sample in a simulated run; ``core_flatness_workers`` is its ratio between many and few workers. Each
is measured in a process of its own; `bench/metadata.py` reports the same figures. ``attribution_*``: see
`control_plane/attribution_load.py`; ``ledger_10m_*``, not with ``--quick``: see `control_plane/long_ledger.py`.
"""

import argparse
import os
import time
from pathlib import Path

from common.children import serve_commands, serve_commands_on_loop
from common.report import Samples, write
from control_plane import attribution_load, controllers, long_ledger
from control_plane.servers import POLICIES, STREAM, long_timeouts
from rich.console import Console
from rich.table import Table

from flowrt.controller.core import Core
from flowrt.controller.events import Command, Event, MessageReceived, Send, WorkerConnected
from flowrt.engines.simulated.workload import GenerationCost, Lengths, LogNormal, TrainCost
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import Values
from flowrt.runtime.event_loop import serve_loop
from flowrt.simulation.cluster import ClusterPlan, ClusterSimulation

REPEATS = 5
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help=f"1 repeat in place of {REPEATS}, a quarter of the work")
    parser.add_argument("--json", type=Path, help="write {metrics, machine} here")
    arguments = parser.parse_args()
    if arguments.serve == "workers":
        serve_commands({"measure": sample_us})
        return
    if arguments.serve == "ledger":
        serve_commands({"start": long_ledger.start})
        return
    if arguments.serve == "attribution":
        serve_commands({"measure": attribution_load.measure})
        return
    if arguments.serve:
        # The loop of the controller's process, with its settings of the cyclic garbage collector.
        serve_loop(serve_with_live_slots(int(float(arguments.serve))))
        return
    samples = Samples()
    controllers.core(*((1, 4) if arguments.quick else (REPEATS, 1)), samples)
    attribution_load.add_to(samples, repeats=1 if arguments.quick else REPEATS)
    if not arguments.quick:
        long_ledger.add_to(samples, REPEATS)
    table = Table("metric", "median", title="the controller's core")
    for name, value in samples.medians().items():
        table.add_row(name, f"{value:,.4g}")
    Console().print(table)
    write(arguments.json, samples.medians(), repeats=samples.repeats(), load=os.getloadavg()[1])


if __name__ == "__main__":
    main()
