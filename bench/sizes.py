"""Memory of the torch engines at real vocabularies and lengths, on tiny layers; and what lengths cost a prefill.

    python bench/sizes.py [--parts CASE ...] [--json PATH] [--quick]

Each case runs in a process of its own. Its peak is VmHWM of /proc/self/status, less the resident memory of the same
process after its imports, before it builds a model. ``memory_ratio_CASE`` is the peak divided by

- lengths_256 (256 prompts of 1 to 256 tokens, vocabulary 262,144), prompt_32k (one prompt of 32,768), prompts_16k (8 of
  16,384): weights + KV cache of all prompts at their full length + one chunk of prefill;
- catch_up (256 sequences of 4,096 tokens, computed again with new weights): weights three times (model, copy, version)
  + KV cache twice + one chunk;
- top_k (an update on 8,192 response tokens in one pass, 50 candidates each, vocabulary 262,144): 20 bytes a parameter
  (weights, gradient twice, AdamW) + one pass.

Weights, cache and parameters are sizes of tensors. One chunk is measured, in another process: the peak of the same job
with only the prompts of its largest chunk (lengths_256: the chunk with the most prompts and so the most logits;
prompt_32k and prompts_16k: the last piece of a prompt, in an empty cache; catch_up: one sequence), less its own weights
and cache. One pass is the peak
of the same update with a vocabulary of 4,096, less its 20 bytes a parameter. So a ratio is 1 if memory does not grow
with the number of prompts, of their lengths, with positions, or with the vocabulary, but for what has to grow.

``prefill_lengths_ratio`` is the processor time of a prefill of 64 prompts of 64 lengths (32 to 1,040 tokens) over that
of 64 prompts of equal length with as many tokens; medians of alternating runs on one thread.
"""

import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common.harness import Bench, Figures, Options, Part
from common.memory import begin_peak, in_process, peak_bytes

from flowrt.algorithms.objective import Objective
from flowrt.algorithms.support import Support
from flowrt.engines.base import Prompt, TrainingBatch
from flowrt.engines.hf import named_parameters
from flowrt.engines.options import TrainOptions
from flowrt.engines.stopping import StopConditions
from flowrt.engines.tiny_model import build_model
from flowrt.engines.torch.cached_model import CachedModel
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.transport.weights.snapshot import Snapshot

WIDE = 262_144
NARROW = 4096
TOP_K = 50
FLOAT_BYTES = 4


def model(vocabulary: int, length: int, *, hidden: int = 32, layers: int = 1) -> Any:
    return build_model(
        vocab_size=vocabulary,
        hidden_size=hidden,
        layers=layers,
        heads=2,
        intermediate_size=2 * hidden,
        max_length=length + 8,
        seed=0,
    ).eval()


def prompts(lengths: Sequence[int]) -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    return [
        Prompt(key, torch.randint(2, 1000, (length,), generator=generator, dtype=torch.int32), key)
        for key, length in enumerate(lengths)
    ]


def weight_bytes(built: Any) -> int:
    return int(sum(parameter.numel() * FLOAT_BYTES for parameter in built.parameters()))


def cache_bytes(built: Any, rows: int, length: int) -> int:
    config = built.config
    kv_size = int(config.num_key_value_heads * config.head_dim)
    return 2 * int(config.num_hidden_layers) * rows * length * kv_size * FLOAT_BYTES


def engine_of(built: Any, rows: int, new_tokens: int = 1) -> TorchRollout:
    return TorchRollout(built, stop=StopConditions(), rows=rows, max_new_tokens=new_tokens, temperature=1.0)


def generate(vocabulary: int, lengths: Sequence[int]) -> int:
    """Prefill these prompts and draw a token for each. Returns the size of weights and cache."""
    built = model(vocabulary, max(lengths))
    engine = engine_of(built, len(lengths))
    engine.add(prompts(lengths))
    while engine.running:
        engine.run(threading.Event())
    return weight_bytes(built) + cache_bytes(built, len(lengths), max(lengths))


def last_piece(length: int) -> int:
    """Compute the last piece of a prompt alone. Returns the size of weights and cache."""
    built = model(NARROW, length)
    cached = CachedModel(built, 1)
    (prompt,) = prompts([length])
    with torch.inference_mode():
        cached.prefill([prompt.tokens[:1]], [0])
        start = length
        while start + cached.piece(start) > length:
            start -= 1
        cached.advance(prompt.tokens.long(), 0, start + 1)
    return weight_bytes(built) + cache_bytes(built, 1, length)


class OneStep:
    """An interrupt that is set: the engine returns after a step."""

    def is_set(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002
        return True


def catch_up(rows: int) -> int:
    """Compute keys and values again with new weights. Returns the size of weights and caches."""
    length = 4096
    built = model(NARROW, length + 64)
    engine = engine_of(built, rows, new_tokens=64)
    snapshot = Snapshot.take(1, named_parameters(model(NARROW, length + 64)))
    engine.add(prompts([length] * rows))
    while len(engine._running) < rows:
        engine.run(OneStep())
    while (work := engine.prepare(snapshot)) is not None:
        work()
    engine.swap(snapshot)
    return 3 * weight_bytes(built) + 2 * cache_bytes(built, rows, length)


def top_k(vocabulary: int, tokens: int) -> int:
    """One update with truncated sampling. Returns 20 bytes a parameter."""
    built = model(vocabulary, 1024)
    options = TrainOptions(lr=1e-3, forward_tokens=2 * tokens)
    trainer = TorchTrainer(built, options, Objective(), temperature=1.0)
    generator = torch.Generator().manual_seed(0)
    count, length = tokens // 512, 512
    responses = [torch.randint(2, 4000, (length,), generator=generator, dtype=torch.int32) for _ in range(count)]
    supports = [
        Support(
            (response.unsqueeze(1) + 7 * torch.arange(TOP_K, dtype=torch.int32)).remainder(NARROW).flatten(),
            torch.full((length,), TOP_K, dtype=torch.int32),
        )
        for response in responses
    ]
    trainer.accumulate(
        TrainingBatch(
            prompts=[prompt.tokens for prompt in prompts([8] * count)],
            responses=responses,
            rollout_logprobs=[-torch.ones(length) for _ in responses],
            reference_logprobs=None,
            advantages_N=torch.randn(count, generator=generator),
            weights_N=torch.ones(count),
            groups_N=torch.arange(count),
            supports=supports,
        )
    )
    trainer.step()
    return 20 * weight_bytes(built) // FLOAT_BYTES


def largest_chunk(lengths: Sequence[int]) -> list[int]:
    """The lengths of the chunk with the most prompts, and so the most logits."""
    cached, left, chunks = CachedModel(model(NARROW, 8), 1), sorted(lengths), []
    while left:
        count = cached.chunk(left)
        chunks.append(left[:count])
        left = left[count:]
    return max(chunks, key=len)


def jobs(*, quick: bool) -> dict[str, tuple[Callable[[], int], Callable[[], int]]]:
    """By case: the job, and one chunk of it."""
    lengths = list(range(1, 257, 8 if quick else 1))
    long, half, rows, tokens = (4096, 2048, 8, 2048) if quick else (32_768, 16_384, 256, 8192)
    return {
        "lengths_256": (lambda: generate(WIDE, lengths), lambda: generate(WIDE, largest_chunk(lengths))),
        "prompt_32k": (lambda: generate(NARROW, [long]), lambda: last_piece(long)),
        "prompts_16k": (lambda: generate(NARROW, [half] * 8), lambda: last_piece(half)),
        "catch_up": (lambda: catch_up(rows), lambda: catch_up(1)),
        "top_k": (lambda: top_k(WIDE, tokens), lambda: top_k(NARROW, tokens)),
    }


def lengths(options: Options) -> Figures:
    """Processor time of a prefill of many lengths over that of equal lengths."""
    different = list(range(32, 1041, 16))
    equal = [sum(different) // len(different)] * len(different)
    built = model(32_000, 1100, hidden=256, layers=2)

    def seconds(lengths: Sequence[int]) -> float:
        engine = engine_of(built, len(lengths))
        engine.add(prompts(lengths))
        begin_s = time.process_time()
        while engine.running:
            engine.run(threading.Event())
        return time.process_time() - begin_s

    rounds = 2 if options.quick else 9
    pairs = [(seconds(different), seconds(equal)) for _ in range(rounds + 1)][1:]
    ratio = statistics.median(different_s for different_s, _ in pairs) / statistics.median(other for _, other in pairs)
    return {"prefill_lengths_ratio": round(ratio, 3)}


CASES = ("lengths_256", "prompt_32k", "prompts_16k", "catch_up", "top_k")


def peak_and_known(case: str, part: int, quick: bool) -> tuple[int, int]:
    """Run a job (0) or one chunk of it (1) in this process; returns its peak and its known size, in bytes."""
    before = begin_peak()
    known = jobs(quick=quick)[case][part]()
    return peak_bytes() - before, known


def memory(case: str) -> Part:
    """The measurement of a case."""

    def measure(options: Options) -> Figures:
        peak, known = in_process(peak_and_known, case, 0, options.quick)
        chunk_peak, chunk_known = in_process(peak_and_known, case, 1, options.quick)
        chunk = chunk_peak - chunk_known
        return {
            f"memory_ratio_{case}": round(peak / (known + chunk), 3),
            f"peak_mb_{case}": round(peak / 1e6, 1),
            f"known_mb_{case}": round(known / 1e6, 1),
            f"chunk_mb_{case}": round(chunk / 1e6, 1),
        }

    return measure


def worst(metrics: Figures) -> Figures:
    """The largest ratio of the cases that were measured."""
    return {"memory_ratio_max": max(metrics.get(f"memory_ratio_{case}", 0.0) for case in CASES)}


BENCH = Bench(
    about=__doc__,
    parts={**{case: memory(case) for case in CASES}, "lengths": lengths},
    most={"memory_ratio_max": 1.3, "prefill_lengths_ratio": 1.2},
    derived=worst,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(BENCH.main())
