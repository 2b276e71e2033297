"""Deltas of weights: their size and the speed of encoding and applying them, for a step at learning rate 1e-6.

The weights are bf16 copies of fp32 weights ~ N(0, 0.02); a step moves each by the learning rate times Adam's update in
steady state, a normal number of mean size 0.2. Rates are bytes of the full version a second, in one thread; a link of
10 Gbit/s moves 1.25 GB/s. "encode" finds and writes the changes, with both checksums given, as a publisher has them for
sending the full version; "summed" also computes the checksum of the new version. "spare" writes into the buckets of an
older version, as receivers do; "whole" is checksum, encode and apply of one version, one after the other (of several
versions, the next is encoded while one is applied).
"""

import statistics
import time
from collections.abc import Callable

import torch

from flowrt.transport.weights.delta import Delta
from flowrt.transport.weights.snapshot import BUCKET_BYTES, Snapshot

STD, LEARNING_RATE = 0.02, 1e-6
# Mean size of Adam's update over the learning rate, simulated: gradients that are a tenth signal, after 100 steps.
STEADY_STATE = 0.2


def versions(full_bytes: int) -> tuple[Snapshot, Snapshot]:
    """Two versions of ``full_bytes`` bytes, one step apart."""
    generator = torch.Generator().manual_seed(0)
    old, new = Snapshot(1, []), Snapshot(2, [])
    for start in range(0, full_bytes, BUCKET_BYTES):
        elements = min(BUCKET_BYTES, full_bytes - start) // 2
        weights = torch.randn(elements, generator=generator).mul_(STD)
        # The mean size of a normal number is 0.798 of its standard deviation.
        update = torch.randn(elements, generator=generator).mul_(STEADY_STATE / 0.798)
        old.buckets += Snapshot.take(1, {"weights": weights.bfloat16()}).buckets
        new.buckets += Snapshot.take(2, {"weights": weights.add_(update, alpha=LEARNING_RATE).bfloat16()}).buckets
    return old, new


def gbps(full_bytes: int, repeats: int, call: Callable[[], object]) -> float:
    """Median rate of ``call``, in GB of the full version a second."""
    seconds = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start_s)
    return full_bytes / statistics.median(seconds) / 1e9


def measure(full_bytes: int, repeats: int) -> dict[str, float]:
    """The fraction of the full bytes, and rates in GB/s.

    Raises RuntimeError if too much changed for a delta, or if the delta does not give the new version bit for bit.
    """
    old, new = versions(full_bytes)
    delta = Delta.between(old, new)
    if delta is None:
        raise RuntimeError(f"a step of {LEARNING_RATE} changed too many elements for a delta")
    spare = Delta.from_buffers(delta.buffers()).apply(old)
    if not all(map(torch.equal, spare.buckets, new.buckets)):
        raise RuntimeError("the delta did not give the new version")
    old_sum, new_sum = old.checksum(), new.checksum()
    rates: dict[str, Callable[[], object]] = {
        "encode": lambda: Delta.between(old, new, base_checksum=old_sum, checksum=new_sum),
        "encode_summed": lambda: Delta.between(old, new, base_checksum=old_sum),
        "apply": lambda: Delta.from_buffers(delta.buffers()).apply(old),
        "apply_spare": lambda: Delta.from_buffers(delta.buffers()).apply(old, spare),
        "whole": lambda: whole(old, new, old_sum, spare),
    }
    figures = {f"delta_{name}_gbps": gbps(full_bytes, repeats, call) for name, call in rates.items()}
    return {"delta_fraction": delta.fraction, **figures}


def whole(old: Snapshot, new: Snapshot, old_sum: int, spare: Snapshot) -> Snapshot:
    """All work between the snapshot of a publisher and the version of a receiver, without the network."""
    delta = Delta.between(old, new, base_checksum=old_sum, checksum=new.checksum())
    assert delta is not None
    return Delta.from_buffers(delta.buffers()).apply(old, spare)
