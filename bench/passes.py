"""A trainer's forward and backward pass over groups that share their prompts: padded, folded, folded and compiled.

    python bench/passes.py [--json PATH] [--quick]

Each prompt has ``--members`` responses of 64 tokens; prompts have 16 to 448 tokens. Padded: a prompt is computed with
each of its responses; folded: it is computed once. One thread, a Qwen2 of a million parameters, the loss of GRPO. Also
the growth of peak memory by one pass, in a process of its own.
"""

import argparse
import multiprocessing
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common.report import write
from end_to_end.task import make_model
from rich.console import Console
from rich.table import Table

from flowrt.algorithms.objective import Objective
from flowrt.engines.base import TrainingBatch
from flowrt.engines.hf import load_model
from flowrt.engines.options import TrainOptions
from flowrt.engines.torch.trainer import TorchTrainer

PROMPTS = (16, 64, 256, 448)
"""Tokens of a prompt; the model has 512 positions."""
RESPONSE, VOCABULARY, WHOLE = 64, 37, 8192
WAYS = {
    "padded": TrainOptions(forward_tokens=WHOLE, share_prompts=False),
    "folded": TrainOptions(forward_tokens=WHOLE),
    "compiled": TrainOptions(forward_tokens=WHOLE, compile=True),
}


def engine(folder: Path, way: str) -> TorchTrainer:
    return TorchTrainer(load_model(folder), WAYS[way], Objective(), temperature=1.0)


def batch(prompt: int, groups: int, members: int) -> TrainingBatch:
    """Whole groups of one length, so that no variant computes padding of shorter prompts."""
    dice = torch.Generator().manual_seed(prompt)
    prompts = [torch.randint(1, VOCABULARY, (prompt,), generator=dice) for _ in range(groups)]
    count = groups * members
    return TrainingBatch(
        prompts=[one for one in prompts for _ in range(members)],
        responses=[torch.randint(1, VOCABULARY, (RESPONSE,), generator=dice) for _ in range(count)],
        rollout_logprobs=[torch.full((RESPONSE,), -3.6) for _ in range(count)],
        reference_logprobs=None,
        advantages_N=torch.randn(count, generator=dice),
        weights_N=torch.ones(count),
        groups_N=torch.zeros(count, dtype=torch.int64),
    )


def seconds(trainer: TorchTrainer, samples: TrainingBatch) -> float:
    begin_s = time.perf_counter()
    trainer.accumulate(samples)
    return time.perf_counter() - begin_s


def peak_bytes(folder: Path, way: str, samples: TrainingBatch, found: Any) -> None:
    """Send the growth of resident memory by a pass in bytes, from the kernel's high-water mark, to ``found``."""
    torch.set_num_threads(1)
    trainer = engine(folder, way)
    trainer.accumulate(batch(4, 1, 2))
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    trainer.accumulate(samples)
    found.send(resident("VmHWM") - before)


def resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(what))


def memory(folder: Path, way: str, samples: TrainingBatch) -> float:
    mine, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("spawn").Process(target=peak_bytes, args=(folder, way, samples, theirs))
    child.start()
    peak = float(mine.recv())
    child.join()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write {metrics, machine} here")
    parser.add_argument("--quick", action="store_true", help="two lengths, two rounds")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lengths, rounds = (PROMPTS[:2], 2) if arguments.quick else (PROMPTS, arguments.rounds)
    ways = [way for way in WAYS if way != "compiled" or (shutil.which("g++") and not arguments.quick)]
    metrics: dict[str, float] = {}
    table = Table("prompt", *(f"{way} ms/sample" for way in ways), "times faster", "memory", title="a trainer's pass")
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as name:
        folder = Path(name) / "model"
        make_model(folder, 0)
        engines = {way: engine(folder, way) for way in ways}
        for length in lengths:
            groups = max(1, WHOLE // 4 // (arguments.members * (length + RESPONSE)))
            samples = batch(length, groups, arguments.members)
            times: dict[str, list[float]] = {way: [] for way in ways}
            for each in range(rounds + 1):
                for way, trainer in engines.items():
                    spent_s = seconds(trainer, samples)
                    if each:  # the first round warms up
                        times[way].append(1e3 * spent_s / (groups * arguments.members))
            median_ms = {way: statistics.median(values) for way, values in times.items()}
            metrics |= {f"{way}_ms_{length}": value for way, value in median_ms.items()}
            metrics[f"ratio_{length}"] = median_ms["padded"] / median_ms["folded"]
            peaks = {way: memory(folder, way, samples) for way in ("padded", "folded")}
            metrics[f"memory_ratio_{length}"] = peaks["folded"] / peaks["padded"]
            cells = [*(f"{value:.2f}" for value in median_ms.values()), f"{metrics[f'ratio_{length}']:.2f}"]
            table.add_row(str(length), *cells, f"{metrics[f'memory_ratio_{length}']:.2f}")
    Console().print(table)
    write(arguments.json, metrics, members=arguments.members, response_tokens=RESPONSE)


if __name__ == "__main__":
    main()
