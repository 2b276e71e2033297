"""The controller's core alone, without sockets, disk or other processes.

    python bench/core_events.py [--quick] [--json PATH] [--parts slots weights …]

``core_events_per_s_LIVE``: offers, pulls and commits of one slot in a steady mix, with LIVE slots in the tables;
``core_flatness`` is the rate with the most slots over the rate with the fewest. ``core_us_a_sample_WORKERS``: processor
time of a trained sample in a simulated run; ``core_flatness_workers`` is its ratio between many and few workers. Each
is measured in a process of its own; `bench/metadata.py` reports the same figures. ``attribution_*``: see
`control_plane/attribution_load.py`; ``ledger_10m_*``, not with ``--quick``: see `control_plane/long_ledger.py`.

Costs that must not grow with slots or workers, in processor time of the core: with 100,000 slots and 4,096 rollout
workers, of a death (``death_ms``), of 200 deaths in one tick (``deaths_200_s``), of a tick while 16 workers drain
(``drain_tick_ms``), of a message while the run is preempted (``preempting_us``), of the first pull and the end of a
step of 512 groups (``first_pull_ms``, ``step_closed_ms``); with 2,048 receivers, of a version that `Rolling` spreads
(``rolling_version_s``) and of the death of the first relay (``relay_break_s``). ``relay_4096_ratio``: simulated time
until 4,096 receivers have a version when one dies and one link is 10 times slower, over the time without.
``month_memory_growth``: growth of memory over the second half of 3 million steps with 10,000 joins and deaths.
"""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from common.children import Child, serve_commands, serve_commands_on_loop
from common.report import Samples, write
from control_plane import attribution_load, controllers, core_costs, long_ledger
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
PARTS = ("events", "attribution", "ledger", "slots", "weights", "relays", "month")
COST_REPEATS = 3
COST_DEADLINE_S = 4 * 3600.0
COSTS: dict[str, dict[str, int]] = {
    "slots": {"workers": 4096, "slots": 100_000},
    "weights": {"workers": 2048},
    "relays": {"receivers": 4096},
    "month": {"steps": 3_000_000, "deaths": 10_000},
}
QUICK_COSTS: dict[str, dict[str, int]] = {
    "slots": {"workers": 128, "slots": 6000},
    "weights": {"workers": 128},
    "relays": {"receivers": 256},
    "month": {"steps": 3000, "deaths": 30},
}


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


def costs(parts: Sequence[str], quick: bool, samples: Samples) -> None:
    """Costs of single events at full size, each part in a process of its own."""
    for part in parts:
        for _ in range(1 if quick or part in ("relays", "month") else COST_REPEATS):
            child = Child("core_events.py", "--serve", "costs")
            child.wait_ready()
            child.tell(part, **(QUICK_COSTS if quick else COSTS)[part])
            for name, value in child.answer(COST_DEADLINE_S).items():
                samples.add(name, value)
            child.leave()


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
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
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
    if arguments.serve == "costs":
        serve_commands(
            {
                "slots": core_costs.slot_costs,
                "weights": core_costs.weight_costs,
                "relays": lambda **size: {"relay_4096_ratio": core_costs.relay_ratio(**size)},
                "month": lambda **size: {"month_memory_growth": core_costs.month_growth(**size)},
            }
        )
        return
    if arguments.serve:
        # The loop of the controller's process, with its settings of the cyclic garbage collector.
        serve_loop(serve_with_live_slots(int(float(arguments.serve))))
        return
    samples = Samples()
    if "events" in arguments.parts:
        controllers.core(*((1, 4) if arguments.quick else (REPEATS, 1)), samples)
    if "attribution" in arguments.parts:
        attribution_load.add_to(samples, repeats=1 if arguments.quick else REPEATS)
    if "ledger" in arguments.parts and not arguments.quick:
        long_ledger.add_to(samples, REPEATS)
    costs([part for part in COSTS if part in arguments.parts], arguments.quick, samples)
    table = Table("metric", "median", title="the controller's core")
    for name, value in samples.medians().items():
        table.add_row(name, f"{value:,.4g}")
    Console().print(table)
    write(arguments.json, samples.medians(), repeats=samples.repeats(), load=os.getloadavg()[1])


if __name__ == "__main__":
    main()
