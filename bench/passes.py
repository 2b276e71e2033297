"""A trainer's forward and backward pass over groups that share their prompts: padded, folded, folded and compiled.

    python bench/passes.py [--json PATH] [--quick]

Each prompt has 8 responses of 64 tokens; prompts have 16 to 448 tokens. Padded: a prompt is computed with
each of its responses; folded: it is computed once. One thread, a Qwen2 of a million parameters, the loss of GRPO. Also
the growth of peak memory by one pass, in a process of its own.
"""

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from common.harness import Bench, Figures, Options
from common.memory import begin_peak, in_process, peak_bytes
from end_to_end.task import make_model

from flowrt.algorithms.objective import Objective
from flowrt.engines.base import TrainingBatch
from flowrt.engines.hf import load_model
from flowrt.engines.options import TrainOptions
from flowrt.engines.torch.trainer import TorchTrainer

PROMPTS = (16, 64, 256, 448)
"""Tokens of a prompt; the model has 512 positions."""
MEMBERS, ROUNDS = 8, 9
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
        prompts=[prompt for prompt in prompts for _ in range(members)],
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


def memory(folder: Path, way: str, samples: TrainingBatch) -> float:
    """Growth of resident memory by a pass in bytes, in a process of its own."""
    return in_process(_memory, folder, way, samples)


def _memory(folder: Path, way: str, samples: TrainingBatch) -> float:
    trainer = engine(folder, way)
    trainer.accumulate(batch(4, 1, 2))
    before = begin_peak()
    trainer.accumulate(samples)
    return float(peak_bytes() - before)


def passes(options: Options) -> Figures:
    """Milliseconds a sample by the tokens of a prompt, their ratios, and memory."""
    lengths, rounds = (PROMPTS[:2], 2) if options.quick else (PROMPTS, ROUNDS)
    ways = [way for way in WAYS if way != "compiled" or (shutil.which("g++") and not options.quick)]
    metrics: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as name:
        folder = Path(name) / "model"
        make_model(folder, 0)
        engines = {way: engine(folder, way) for way in ways}
        for length in lengths:
            groups = max(1, WHOLE // 4 // (MEMBERS * (length + RESPONSE)))
            samples = batch(length, groups, MEMBERS)
            times: dict[str, list[float]] = {way: [] for way in ways}
            for each in range(rounds + 1):
                for way, trainer in engines.items():
                    spent_s = seconds(trainer, samples)
                    if each:  # the first round warms up
                        times[way].append(1e3 * spent_s / (groups * MEMBERS))
            median_ms = {way: statistics.median(values) for way, values in times.items()}
            metrics |= {f"{way}_ms_{length}": value for way, value in median_ms.items()}
            metrics[f"ratio_{length}"] = median_ms["padded"] / median_ms["folded"]
            peaks = {way: memory(folder, way, samples) for way in ("padded", "folded")}
            metrics[f"memory_ratio_{length}"] = peaks["folded"] / peaks["padded"]
    return metrics


BENCH = Bench(
    about=__doc__,
    parts={"passes": passes},
    machine=lambda _: {"members": MEMBERS, "response_tokens": RESPONSE},
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(BENCH.main())
