"""Deltas of weights: their size and the speed of encoding and applying them, by model size and kind of step.

    python bench/deltas.py [--quick] [--json PATH]

The weights are bf16 copies of fp32 weights ~ N(0, 0.02); a step moves each by the learning rate times Adam's update: a
normal number of mean size 0.2 in steady state, +1 or -1 in the very first step. Rates are bytes of the full version a
second, in one thread; a link of 10 Gbit/s moves 1.25 GB/s. "encode" finds and writes the changes, with both checksums
given, as a publisher has them for sending the full version; "summed" also computes the checksum of the new version.
"spare" writes into the buckets of an older version, as receivers do; "whole" is checksum, encode and apply of one
version, one after the other (of several versions, the next is encoded while one is applied).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common.report import write
from rich.console import Console
from rich.table import Table

from flowrt.transport.weights.delta import Delta
from flowrt.transport.weights.snapshot import BUCKET_BYTES, Snapshot

STD = 0.02
# Mean size of Adam's update over the learning rate, simulated: gradients that are a tenth signal, after 100 steps.
STEADY_STATE = 0.2
REPEATS = 5
PLAIN = "settled, 1e-6"
STEPS = {
    PLAIN: (1e-6, STEADY_STATE),
    "first, 1e-6": (1e-6, None),
    "settled, 3e-6": (3e-6, STEADY_STATE),
    "settled, 1e-5": (1e-5, STEADY_STATE),
}


def versions(full_bytes: int, learning_rate: float, mean_size: float | None) -> tuple[Snapshot, Snapshot]:
    """Two versions of ``full_bytes`` bytes, one step apart; ``mean_size`` None is Adam's first step."""
    generator = torch.Generator().manual_seed(0)
    old, new = Snapshot(1, []), Snapshot(2, [])
    for start in range(0, full_bytes, BUCKET_BYTES):
        elements = min(BUCKET_BYTES, full_bytes - start) // 2
        weights = torch.randn(elements, generator=generator).mul_(STD)
        update = torch.randn(elements, generator=generator)
        # The mean size of a normal number is 0.798 of its standard deviation.
        update = update.sign() if mean_size is None else update.mul_(mean_size / 0.798)
        old.buckets += Snapshot.take(1, {"weights": weights.bfloat16()}).buckets
        new.buckets += Snapshot.take(2, {"weights": weights.add_(update, alpha=learning_rate).bfloat16()}).buckets
    return old, new


def gbps(full_bytes: int, repeats: int, call: Callable[[], object]) -> float:
    """Median rate of ``call``, in GB of the full version a second."""
    seconds = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start_s)
    return full_bytes / statistics.median(seconds) / 1e9


def measure(full_bytes: int, learning_rate: float, mean_size: float | None, repeats: int = REPEATS) -> dict[str, float]:
    """Fractions of the full bytes, and rates in GB/s, of one size and kind of step.

    Raises SystemExit if too much changed for a delta, or if the delta does not give the new version bit for bit.
    """
    old, new = versions(full_bytes, learning_rate, mean_size)
    pairs = zip(old.buckets, new.buckets, strict=True)
    differing = sum(int(torch.count_nonzero(a.view(torch.int16) != b.view(torch.int16))) for a, b in pairs)
    delta = Delta.between(old, new)
    if delta is None:
        raise SystemExit(f"a step of {learning_rate} changed {differing} elements: too many for a delta")
    arrived = Delta.from_buffers(delta.buffers())
    spare = arrived.apply(old)
    if not all(map(torch.equal, spare.buckets, new.buckets)):
        raise SystemExit("the delta did not give the new version")
    old_sum, new_sum = old.checksum(), new.checksum()
    return {
        "changed_fraction": differing * 2 / full_bytes,
        "delta_fraction": delta.fraction,
        "delta_encode_gbps": gbps(
            full_bytes, repeats, lambda: Delta.between(old, new, base_checksum=old_sum, checksum=new_sum)
        ),
        "delta_encode_summed_gbps": gbps(full_bytes, repeats, lambda: Delta.between(old, new, base_checksum=old_sum)),
        "delta_apply_gbps": gbps(full_bytes, repeats, lambda: Delta.from_buffers(delta.buffers()).apply(old)),
        "delta_apply_spare_gbps": gbps(
            full_bytes, repeats, lambda: Delta.from_buffers(delta.buffers()).apply(old, spare)
        ),
        "checksum_gbps": gbps(full_bytes, repeats, new.checksum),
        "delta_whole_gbps": gbps(full_bytes, repeats, lambda: whole(old, new, old_sum, spare)),
    }


def whole(old: Snapshot, new: Snapshot, old_sum: int, spare: Snapshot) -> Snapshot:
    """All work between the snapshot of a publisher and the version of a receiver, without the network."""
    delta = Delta.between(old, new, base_checksum=old_sum, checksum=new.checksum())
    assert delta is not None
    return Delta.from_buffers(delta.buffers()).apply(old, spare)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write {metrics, machine} here")
    parser.add_argument("--quick", action="store_true", help="64 MB only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [64] if arguments.quick else [64, 256, 1024]
    table = Table(
        "full",
        "step",
        "changed",
        "delta",
        "encode",
        "summed",
        "apply",
        "spare",
        "checksum",
        "whole",
        title="deltas (GB/s)",
    )
    metrics: dict[str, float] = {}
    for size in sizes:
        for name, step in STEPS.items():
            found = measure(size * 2**20, *step)
            changed, fraction, *found_gbps = found.values()
            shown = [f"{changed:.2%}", f"{fraction:.2%}", *(f"{rate:.2f}" for rate in found_gbps)]
            table.add_row(f"{size} MiB", name, *shown)
            key = f"{size}_mib_{name.replace(', ', '_lr_')}"
            metrics |= {f"{key}_{metric}": value for metric, value in found.items()}
            # The plain keys are those of the largest model.
            if name == PLAIN:
                metrics |= found
    Console(width=120).print(table)
    write(arguments.json, metrics, threads=1)


if __name__ == "__main__":
    main()
