"""Weight sync: time for n receivers over that for one, bytes that a trainer sends, pauses of generation.

    python bench/weights.py [--quick] [--json PATH] [--mbit 400] [--megabytes 64]

Controller, trainer and receivers are processes behind links of their own, each limited in both directions; that takes
root and the tools ip and tc, and is left out with a reason elsewhere.
"""

import argparse
import statistics
import sys

import torch
from common.harness import Bench, Figures, Options, Part, percentile
from common.links import LinkedProcess, Unavailable, become_switch, forked, sent_bytes
from weight_sync import deltas
from weight_sync.roles import controller_orders, receiver_orders, trainer_orders
from weight_sync.stalls import WAYS, rollout_orders

RECEIVERS = (1, 2, 4, 8)
CONTROLLER, TRAINER, FIRST = 1, 2, 3
PERIOD_S = 2.0
PROMPTS = 20_000


def fan_out(mbit_s: float, megabytes: int, repeats: int) -> dict[str, float]:
    """Seconds until all of n receivers hold a version, and the copies of it that the trainer sent."""
    processes: list[LinkedProcess] = []
    try:
        processes = [LinkedProcess(controller_orders, CONTROLLER), LinkedProcess(trainer_orders, TRAINER, mbit_s)]
        processes += [LinkedProcess(receiver_orders, FIRST + number, mbit_s) for number in range(max(RECEIVERS))]
        controller, trainer, *receivers = processes
        address, keys = controller.ask("serve", host=f"10.77.0.{CONTROLLER}")
        size = trainer.ask("join", address=address, keys=keys, megabytes=megabytes)
        version, joined = 0, 0
        metrics: dict[str, float] = {}
        for count in RECEIVERS:
            for number in range(joined, count):
                receivers[number].ask("join", address=address, keys=keys, name=f"receiver-{number}")
                if version:  # let it fetch the version that exists, before the measurement
                    receivers[number].ask("hold", version=version)
            joined = count
            seconds, copies = [], []
            for repeat in range(repeats + 1):
                version += 1
                before = sent_bytes(TRAINER)
                for receiver in receivers[:count]:
                    receiver.tell("hold", version=version)
                begun_s = trainer.ask("publish", version=version)
                held_s = [receiver.answer() for receiver in receivers[:count]]
                if repeat:  # the first one opens the lanes
                    seconds.append(max(held_s) - begun_s)
                    copies.append((sent_bytes(TRAINER) - before) / size)
            metrics[f"fanout_s_{count}"] = statistics.median(seconds)
            metrics[f"egress_copies_{count}"] = statistics.median(copies)
            metrics[f"fanout_ratio_{count}"] = metrics[f"fanout_s_{count}"] / metrics["fanout_s_1"]
        metrics["fanout_wire_s"] = size * 8 / (mbit_s * 1e6)
        return metrics
    finally:
        for process in processes:
            process.leave()


def measure_stalls(host: str, mbit_s: float, versions: int, swaps: int) -> dict[str, float]:
    """Pauses of a generating worker with a version every PERIOD_S seconds, in each of the WAYS; tokens/s over none."""
    linked = bool(mbit_s)
    processes = [LinkedProcess(controller_orders, CONTROLLER if linked else 0)]
    try:
        processes += [
            LinkedProcess(trainer_orders, TRAINER if linked else 0, mbit_s),
            LinkedProcess(rollout_orders, FIRST if linked else 0, mbit_s),
        ]
        controller, trainer, worker = processes
        address, keys = controller.ask("serve", host=host)
        size = trainer.ask("join", address=address, keys=keys, megabytes=0)
        worker.ask("join", address=address, keys=keys)
        swap_ms = worker.ask("swap_ms", times=swaps)
        metrics = {"swap_ms_p50": percentile(swap_ms, 0.5), "swap_ms_p99": percentile(swap_ms, 0.99)}
        metrics["swap_gbps"] = size / 1e6 / metrics["swap_ms_p50"]
        trainer.ask("offer", prompts=PROMPTS)
        worker.ask("start")
        worker.ask("measure", seconds=PERIOD_S, way="boundary")  # warm
        seconds = versions * PERIOD_S
        for turn, way in enumerate(WAYS):
            quiet = worker.ask("measure", seconds=seconds / 2, way=way)
            worker.tell("measure", seconds=seconds, way=way)
            trainer.ask("publish_every", period_s=PERIOD_S, versions=versions, first=1 + turn * versions)
            answer = worker.answer()
            if answer["versions"] < versions - 1:
                print(f"{way}: only {answer['versions']} of {versions} versions were used")
            ending = "" if way == "boundary" else f"_{way}"
            metrics[f"stall_fraction{ending}"] = answer["stall_fraction"]
            metrics[f"stall_ms{ending}"] = answer["stall_ms"]
            metrics[f"tokens_ratio{ending}"] = answer["tokens_per_s"] / quiet["tokens_per_s"]
        return metrics
    finally:
        for process in processes:
            process.leave()


def links_of(options: Options) -> float:
    """The rate of the links in Mbit/s; 0 where they cannot be limited, with the reason on the terminal."""
    try:
        become_switch()
    except Unavailable as reason:
        print(f"no links of a limited rate: {reason}")
        return 0.0
    return float(options.mbit)


def in_own_network(measure: Part) -> Part:
    """A part whose process has a network of its own."""
    return lambda options: forked(measure, options)


def delta_figures(options: Options) -> Figures:
    """Size and speed of a version that is sent as a delta from the previous one."""
    return deltas.measure((64 if options.quick else 256) * 2**20, repeats=3)


def fan_out_figures(options: Options) -> Figures:
    """Seconds until receivers behind limited links hold a version, and copies that the trainer sends."""
    mbit_s = links_of(options)
    return fan_out(mbit_s, options.megabytes, 1 if options.quick else 5) if mbit_s else {}


def stall_figures(options: Options) -> Figures:
    """Pauses of generation, by when new weights are used."""
    mbit_s = links_of(options)
    host = f"10.77.0.{CONTROLLER}" if mbit_s else "127.0.0.1"
    return measure_stalls(host, mbit_s, *((3, 100) if options.quick else (5, 400)))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mbit", type=float, default=400.0, help="rate of each link, in Mbit/s")
    parser.add_argument("--megabytes", type=int, default=64, help="size of a version on its way to many")


BENCH = Bench(
    about=__doc__,
    parts={
        "deltas": delta_figures,
        "fan_out": in_own_network(fan_out_figures),
        "stalls": in_own_network(stall_figures),
    },
    add_options=add_options,
    machine=lambda options: {"mbit_s": options.mbit, "megabytes": options.megabytes},
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(BENCH.main())
