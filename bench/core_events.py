"""The controller's core alone, without sockets, disk or other processes.

    python bench/core_events.py [--quick] [--json PATH] [--parts PART ...]

``core_events_per_s_LIVE``: offers, pulls and commits of one slot in a steady mix, with LIVE slots in the tables;
``core_flatness`` is the rate with the most slots over the rate with the fewest. ``core_us_a_sample_WORKERS``: processor
time of a trained sample in a simulated run; ``core_flatness_workers`` is its ratio between many and few workers. Each
is measured in a process of its own. ``attribution_*``: see `control_plane/attribution_load.py`; ``ledger_10m_*``, not
with ``--quick``: see `control_plane/long_ledger.py`.

Costs that must not grow with slots or workers, in processor time of the core: with 100,000 slots and 4,096 rollout
workers, of a death (``death_ms``), of 200 deaths in one tick (``deaths_200_s``), of a tick while 16 workers drain
(``drain_tick_ms``), of a message while the run is preempted (``preempting_us``), of the first pull and the end of a
step of 512 groups (``first_pull_ms``, ``step_closed_ms``); with 2,048 receivers, of a version that `Rolling` spreads
(``rolling_version_s``) and of the death of the first relay (``relay_break_s``). ``relay_4096_ratio``: simulated time
until 4,096 receivers have a version when one dies and one link is 10 times slower, over the time without.
``month_memory_growth``: growth of memory over the second half of 3 million steps with 10,000 joins and deaths.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from common.children import Child, ask_all, start_all
from common.harness import Bench, Figures, Options, Part, Samples, Skipped
from control_plane import attribution_load, long_ledger

REPEATS, COST_REPEATS = 5, 3
LIVE = {"1e3": 1000, "1e5": 100_000, "1e6": 1_000_000}
CYCLES = 10_000
WORKERS = (4, 64)
COST_DEADLINE_S = 4 * 3600.0
SIZES: dict[str, dict[str, int]] = {
    "slots": {"workers": 4096, "slots": 100_000},
    "weights": {"workers": 2048},
    "relays": {"receivers": 4096},
    "month": {"steps": 3_000_000, "deaths": 10_000},
}
QUICK_SIZES: dict[str, dict[str, int]] = {
    "slots": {"workers": 128, "slots": 6000},
    "weights": {"workers": 128},
    "relays": {"receivers": 256},
    "month": {"steps": 3000, "deaths": 30},
}


@contextmanager
def core() -> Iterator[Child]:
    """A process for costs of the core."""
    (child,) = start_all([Child("control_plane/cores.py", "costs")])
    yield child
    child.leave()


def events(options: Options) -> Figures:
    """Events a second by live slots, processor time of a trained sample by rollout workers."""
    repeats, shrink = (1, 4) if options.quick else (REPEATS, 1)
    samples = Samples()
    cores = {live: Child("control_plane/cores.py", "live", str(count)) for live, count in LIVE.items()}
    start_all([*cores.values()])
    ask_all([*cores.values()], "measure", cycles=1000)
    with core() as runs:
        for _ in range(repeats):
            for live, child in cores.items():
                samples.add(f"core_events_per_s_{live}", child.ask("measure", cycles=CYCLES // shrink))
            least, *_, most = (samples.last(f"core_events_per_s_{live}") for live in LIVE)
            samples.add("core_flatness", most / least)
            for workers in WORKERS:
                cost_us = runs.ask("sample_us", workers=workers, steps=max(4 // shrink, 2))
                samples.add(f"core_us_a_sample_{workers}", cost_us)
            few, many = (samples.last(f"core_us_a_sample_{workers}") for workers in WORKERS)
            samples.add("core_flatness_workers", many / few)
    for child in cores.values():
        child.leave()
    return samples.medians()


def costs(order: str, options: Options, *, repeats: int, **size: Any) -> Figures:
    """Costs of single events, each repetition in a process of its own."""
    samples = Samples()
    for _ in range(1 if options.quick else repeats):
        with core() as child:
            child.tell(order, **size)
            for name, value in child.answer(COST_DEADLINE_S).items():
                samples.add(name, value)
    return samples.medians()


def attribution(options: Options) -> Figures:
    """What attribution and timeline cost the controller's process at 4,096 workers."""
    return costs("attribution", options, repeats=REPEATS, seconds=attribution_load.SECONDS)


def ledger(options: Options) -> Figures:
    """A start on a ledger of 10 million prompt-epochs, and its summary."""
    if options.quick:
        raise Skipped("a ledger of 10 million prompts takes minutes to write")
    with long_ledger.written() as (path, steps):
        figures = costs("start_on_ledger", options, repeats=REPEATS, path=path, steps=steps)
    return {f"ledger_10m_{name}": value for name, value in figures.items()}


def at_size(part: str, repeats: int) -> Part:
    """A part at full size, or small with --quick."""

    def measure(options: Options) -> Figures:
        return costs(part, options, repeats=repeats, **(QUICK_SIZES if options.quick else SIZES)[part])

    return measure


BENCH = Bench(
    about=__doc__,
    parts={
        "events": events,
        "attribution": attribution,
        "ledger": ledger,
        "slots": at_size("slots", COST_REPEATS),
        "weights": at_size("weights", COST_REPEATS),
        "relays": at_size("relays", 1),
        "month": at_size("month", 1),
    },
    most={
        "core_flatness_workers": 1.2,
        "death_ms": 2.0,
        "deaths_200_s": 0.4,
        "drain_tick_ms": 1.0,
        "preempting_us": 5.0,
        "step_closed_ms": 20.0,
        "first_pull_ms": 20.0,
        "rolling_version_s": 0.2,
        "relay_break_s": 0.2,
        "attribution_loop_share": 0.05,
        "relay_4096_ratio": 1.5,
        "ledger_10m_start_s": 3.0,
        "ledger_10m_summary_s": 3.0,
        "month_memory_growth": 0.05,
    },
    least={"core_flatness": 0.8},
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
