"""Stored samples: what they cost the default job, and the size of their file.

- samples_ratio: samples/s of the default job with stored samples over those without, by turns (median of 5 pairs of
  120 steps; one pair of 30 with --quick);
- store_mb: largest size of the file and its log together, of 30,000 steps (2,000 with --quick) with a limit of 64 MB
  (8 MB): ten minutes of 50 steps/s, written without pauses;
- store_flagged_kept: share of its flagged samples, one a step, that are left at the end;
- store_memory_mb: memory that the writer takes in addition, in MB;
- store_row_us: time to write a sample, in microseconds, with its deletion.
"""

import struct
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from random import Random

import psutil
from common.harness import by_turns, median_ratio
from common.jobs import run_job

from flowrt.controller.storage.sample_store import SAMPLES, GroupEnd, SampleWriter
from flowrt.observability.stored_samples import SampleFilter, SampleReader
from flowrt.protocol.sample_records import ScoredSample, TrainedSample, encode_record, pack_text

FLOORS: Mapping[str, float] = {"samples_ratio": 0.98, "store_flagged_kept": 1.0}
BOUNDS: Mapping[str, float] = {"store_mb": 70.0, "store_memory_mb": 40.0}
ROWS, MEMBERS, TOKENS, WORDS = 32, 8, 60, 60
"""Samples of a step, of a group; tokens and words of a completion."""
BATCH_STEPS = 25
"""Steps between two ticks of the controller."""


def measure(quick: bool) -> dict[str, float]:
    return {**_job(quick), **_store(quick)}


def _job(quick: bool) -> dict[str, float]:
    steps, pairs = (30, 1) if quick else (120, 5)
    with tempfile.TemporaryDirectory() as name:

        def samples_per_s(per_step: int, pair: int) -> float:
            words = ("--samples.per-step", per_step, "--seed", pair, "--steps", steps)
            return run_job(Path(name) / f"{pair}-{per_step}", *words).samples_per_s

        rates = by_turns({"off": partial(samples_per_s, 0), "on": partial(samples_per_s, 32)}, pairs)
    return {"samples_ratio": median_ratio(rates["on"], rates["off"])}


def _store(quick: bool) -> dict[str, float]:
    steps, limit = (2_000, 8_000_000) if quick else (30_000, 64_000_000)
    random = Random(0)
    words = ["".join(random.choices("abcdefghij", k=random.randint(2, 9))) for _ in range(2_000)]
    logprobs = struct.pack(f"<{TOKENS}e", *(-random.random() for _ in range(TOKENS)))
    ids = struct.pack(f"<{TOKENS}i", *(random.randrange(50_000) for _ in range(TOKENS)))
    prompt_text = pack_text(" ".join(words[:20]))
    largest, written_s, flagged = 0, 0.0, 0
    process = psutil.Process()
    before = process.memory_info().rss
    memory = before
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        writer = SampleWriter(path / SAMPLES, per_step=ROWS, max_bytes=limit, run_attempt=1, step=0)
        for first in range(0, steps, BATCH_STEPS):
            records: list[tuple[bytes, int]] = []
            outcomes = []
            for step in range(first, first + BATCH_STEPS):
                for number in range(ROWS):
                    prompt, member = step * ROWS + number // MEMBERS, number % MEMBERS
                    is_flagged = not number
                    flagged += is_flagged
                    start = random.randrange(len(words) - WORDS)
                    text = pack_text("yes" if is_flagged else " ".join(words[start : start + WORDS]))
                    scored = ScoredSample(
                        flow="train",
                        eval_name="",
                        epoch=0,
                        prompt=prompt,
                        member=member,
                        attempt=0,
                        reward=random.random(),
                        parts=(),
                        finish="stop",
                        reason="timeout: it took too long" if is_flagged else "",
                        is_single=False,
                        spans=(step, TOKENS),
                        reward_s=0.0,
                        data=(prompt_text, text, ids),
                    )
                    trained = TrainedSample(step, 0, prompt, member, 0, 0.5, (logprobs, logprobs))
                    records += [(encode_record(sample) or b"", step) for sample in (scored, trained)]
                outcomes += [GroupEnd(0, step * ROWS + group, step) for group in range(ROWS // MEMBERS)]
            start_s = time.monotonic()
            assert not writer.write(records, outcomes)
            written_s += time.monotonic() - start_s
            largest = max(largest, sum(file.stat().st_size for file in path.iterdir()))
            memory = max(memory, process.memory_info().rss)
        writer.close()
        kept = SampleReader(path).query(SampleFilter(reason="timeout"), limit=1).total
    return {
        "store_mb": largest / 1e6,
        "store_flagged_kept": kept / flagged,
        "store_memory_mb": (memory - before) / 1e6,
        "store_row_us": 1e6 * written_s / (steps * ROWS),
    }
