"""The journal of one rollout worker at real shape: its size, the time of a write and a read, and their memory.

    python -m durability.shape --rows 256 --tokens 32768 --supports 0    (in bench/; prints its figures as JSON)

A process of its own, whose peak memory is measured. The engine has the tokens of all sequences in two tensors, as the
torch engine does, and returns copies.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common.memory import begin_peak, peak_bytes

from flowrt.algorithms.support import Support
from flowrt.client.sample_tensors import Batch, Columns, Numbers
from flowrt.controller.storage.journals import read_journals
from flowrt.engines.base import Interrupt, NewTokens, Prompt, Response
from flowrt.protocol.journals import SampleKey, journal_of, journals_of
from flowrt.protocol.messages import Grant
from flowrt.roles.journal import Journal, KeptJournals, prompt_checksum
from flowrt.roles.kept_sequences import KeptSequences
from flowrt.runtime.compute_thread import ComputeThread
from flowrt.transport.weights.snapshot import Snapshot

PROMPT = torch.arange(1000, dtype=torch.int32)
TICK_S = 0.001
MORE = 300
"""Tokens that each sequence gets between two writes."""
INDEXED_PARTS = 32
"""Parts of each sample in the journal whose headers are read."""


class Engine:
    """Sequences of random tokens; ``supports``: tokens that could be drawn at each position, 0: all."""

    running = room = 0

    def __init__(self, rows: int, tokens: int, supports: int) -> None:
        self.count = tokens - MORE
        self._tokens_RT = torch.randint(0, 262_144, (rows, tokens), dtype=torch.int32)
        self._logprobs_RT = -torch.rand(rows, tokens)
        self._supports = supports

    def new_tokens(self, starts: Mapping[int, int]) -> dict[int, NewTokens]:
        """Up to the first ``count`` tokens of each sequence."""
        new: dict[int, NewTokens] = {}
        for row, (tokens_T, logprobs_T) in enumerate(zip(self._tokens_RT, self._logprobs_RT, strict=True)):
            start, width = starts.get(row, 0), self._supports
            count = self.count - start
            support = Support(torch.zeros(count * width, dtype=torch.int32), torch.full((count,), width))
            columns = tokens_T[start : self.count].clone(), logprobs_T[start : self.count].clone()
            new[row] = NewTokens(start, *columns, (3, self.count), support if width else None)
        return new

    def add(self, prompts: Sequence[Prompt]) -> None:
        """Not used."""

    def run(self, interrupt: Interrupt) -> list[Response]:
        """Nothing ends."""
        interrupt.wait(0.0)
        return []

    def swap(self, snapshot: Snapshot) -> None:
        """Not used."""


async def longest_gap_s(work: Awaitable[object]) -> float:
    """The longest time for which the event loop ran nothing else while it did this work, in seconds."""
    longest = 0.0
    is_over = asyncio.ensure_future(work)
    while not is_over.done():
        before = time.perf_counter()
        await asyncio.sleep(TICK_S)
        longest = max(longest, time.perf_counter() - before - TICK_S)
    await is_over
    return longest


def batch(rows: int) -> Batch:
    """The grant of all rows, of one prompt."""
    slots = tuple(range(rows))
    same = (0,) * rows
    grant = Grant(0, 0, slots, ("train",), same, slots, same, same, same, (), (), (), (), False)
    return Batch(grant, Columns({"prompt": [PROMPT] * rows}), Numbers())


def begin(run_dir: Path, engine: Engine, rows: int) -> tuple[KeptSequences, Journal]:
    """A worker that generates these rows, and its journal."""
    session: Any = SimpleNamespace()
    journal = Journal(run_dir / journal_of(journals_of(1), "rollout-0"), lambda: 0)
    sequences = KeptSequences(
        session, engine, journal, KeptJournals(run_dir), interval_s=1e-9, continues=True, max_new_tokens=1 << 20
    )
    sequences.begin(ComputeThread(), threading.Event())
    pulled = batch(rows)
    for row in range(rows):
        sequences.started(row, pulled, row, None)
    return sequences, journal


async def write(run_dir: Path, engine: Engine, rows: int) -> dict[str, float]:
    """Write all sequences, then what each has got since, and close the journal."""
    sequences, journal = begin(run_dir, engine, rows)
    before = begin_peak()
    begun = time.perf_counter()
    gap_s = await longest_gap_s(sequences.write_if_due())
    stopped_s = time.perf_counter() - begun
    gap_s = max(gap_s, await longest_gap_s(asyncio.wrap_future(journal._thread.submit(time.perf_counter))))
    written_s = time.perf_counter() - begun
    engine.count += MORE
    begun = time.perf_counter()
    gap_s = max(gap_s, await longest_gap_s(sequences.write_if_due()))
    more_s = time.perf_counter() - begun
    gap_s = max(gap_s, await longest_gap_s(sequences.save()))
    return {
        "engine_stopped_s": stopped_s,
        "written_s": written_s,
        "engine_stopped_later_s": more_s,
        "loop_blocked_s": gap_s,
        "write_peak_mb": (peak_bytes() - before) / 1e6,
    }


def read(run_dir: Path, rows: int) -> dict[str, float]:
    """Read the journal as the controller does at a resume, and all its samples as a worker does."""
    begun = time.perf_counter()
    journaled = read_journals(run_dir, [0, 3], {}, lambda oldest: oldest >= 0)
    controller_s = time.perf_counter() - begun
    before = begin_peak()
    begun = time.perf_counter()
    journals, checksum = KeptJournals(run_dir), prompt_checksum(PROMPT)
    kept = [journals.read(journaled.kept[0].journal, SampleKey(0, 0, row, 0), checksum) for row in range(rows)]
    worker_s = time.perf_counter() - begun
    count = sum(len(sample.prefix.tokens) for sample in kept if sample is not None)
    if count != journaled.tokens or len(journaled.kept) != rows:
        raise RuntimeError(f"{count} tokens were read, and {journaled.tokens} of {len(journaled.kept)} samples found")
    [size] = [path.stat().st_size for path in run_dir.rglob("*.journal")]
    return {
        "bytes_per_token": size / count,
        "controller_read_s": controller_s,
        "worker_read_s": worker_s,
        "read_peak_mb": (peak_bytes() - before) / 1e6,
    }


async def write_short(run_dir: Path, rows: int) -> None:
    """Write samples in many short parts, as after many intervals."""
    engine = Engine(rows, INDEXED_PARTS + MORE, 0)
    sequences, _ = begin(run_dir, engine, rows)
    for count in range(1, INDEXED_PARTS + 1):
        engine.count = count
        await sequences.write_if_due()
    await sequences.save()


def headers_per_s(run_dir: Path, rows: int) -> float:
    """Parts of samples whose headers the controller reads in a second at a resume."""
    asyncio.run(write_short(run_dir, rows))
    begun = time.perf_counter()
    read_journals(run_dir, [0, 3], {}, lambda oldest: oldest >= 0)
    return rows * INDEXED_PARTS / (time.perf_counter() - begun)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--supports", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        engine = Engine(arguments.rows, arguments.tokens, arguments.supports)
        metrics = asyncio.run(write(run_dir, engine, arguments.rows)) | read(run_dir, arguments.rows)
        metrics["headers_per_s"] = headers_per_s(run_dir / "short", arguments.rows)
    print(json.dumps(metrics))
    return 0


if __name__ == "__main__":
    sys.exit(main())
