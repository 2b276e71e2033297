"""Pauses for a version of a 7B model on a GPU: of the trainer for a snapshot, of the generator for a swap.

Not run on a GPU yet.
"""

import statistics
import time

import torch

from flowrt.transport.weights.snapshot import Snapshot

LAYERS, WIDTH, INNER, VOCABULARY = 32, 4096, 11008, 32000
REPEATS = 5
STEPS = 20


def weights(layers: int) -> dict[str, torch.Tensor]:
    """Tensors of the shapes of a decoder of 7B parameters, in bf16, on the GPU."""
    shapes = {"embedding": (VOCABULARY, WIDTH), "head": (VOCABULARY, WIDTH)}
    for layer in range(layers):
        shapes |= {f"{layer}.{name}": (WIDTH, WIDTH) for name in "qkvo"}
        shapes |= {f"{layer}.{name}": (INNER, WIDTH) for name in ("gate", "up", "down")}
    return {name: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for name, shape in shapes.items()}


def step(tensors: dict[str, torch.Tensor], rows: torch.Tensor) -> None:
    """Multiply ``rows`` with every matrix, as a decode step does; returns when the GPU has finished."""
    for tensor in tensors.values():
        torch.nn.functional.linear(rows, tensor)
    torch.cuda.synchronize()


def measure_on_gpu(quick: bool) -> dict[str, float]:
    """Median milliseconds of a decode step, a snapshot and a swap, with sizes in GB and rates in GB/s."""
    tensors = weights(2 if quick else LAYERS)
    size = sum(tensor.nbytes for tensor in tensors.values())
    rows = torch.randn(64, WIDTH, device="cuda", dtype=torch.bfloat16)
    arrived = Snapshot.take(0, tensors)
    # A version received over a lane is in pageable memory; the receiver pins it during staging, before the swap.
    arrived = Snapshot(0, [torch.empty(bucket.numel(), dtype=torch.uint8).copy_(bucket) for bucket in arrived.buckets])
    arrived = arrived.pinned_for(torch.device("cuda"))
    taken_ms, stall_ms, step_ms = [], [], []
    for version in range(1, REPEATS + 2):
        begun_s = time.perf_counter()
        snapshot = Snapshot.take(version, tensors)
        taken_ms.append(1000 * (time.perf_counter() - begun_s))
        del snapshot
        for _ in range(STEPS):
            begun_s = time.perf_counter()
            step(tensors, rows)
            step_ms.append(1000 * (time.perf_counter() - begun_s))
        begun_s = time.perf_counter()
        arrived.restore(tensors)
        stall_ms.append(1000 * (time.perf_counter() - begun_s))
    snapshot_ms, generator_ms = statistics.median(taken_ms[1:]), statistics.median(stall_ms[1:])
    return {
        "gpu_weights_gb": size / 1e9,
        "gpu_decode_step_ms": statistics.median(step_ms),
        "gpu_snapshot_ms": snapshot_ms,
        "gpu_snapshot_gbps": size / 1e6 / snapshot_ms,
        "gpu_stall_ms": generator_ms,
        "gpu_swap_gbps": size / 1e6 / generator_ms,
    }
