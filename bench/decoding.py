"""The torch rollout engine: decoding in eager mode and compiled.

    python bench/decoding.py [--json PATH] [--quick]

Groups of 8 with prompts of 11 tokens and responses of 64, one thread, a Qwen2 of a million parameters. The two engines
take turns; ``differ_fraction`` is the share of samples whose tokens differ between them.
"""

import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from common.harness import Bench, Figures, Options, Samples
from end_to_end.task import make_model

from flowrt.engines.base import Prompt, Response
from flowrt.engines.hf import load_model
from flowrt.engines.stopping import StopConditions
from flowrt.engines.torch.rollout import TorchRollout, optimize_layout

VOCABULARY = 37
MEMBERS, PROMPT, RESPONSE = 8, 11, 64
ROWS = (16, 64, 128)
ROUNDS = 15
WAYS = ("plain", "compiled")


def engine(folder: Path, rows: int, way: str) -> TorchRollout:
    return TorchRollout(
        optimize_layout(load_model(folder)),  # as a rollout worker does
        stop=StopConditions(),
        rows=rows,
        max_new_tokens=RESPONSE,
        temperature=1.0,
        compiled=way == "compiled",
    )


def generate(engine: TorchRollout, rows: int, seed: int) -> tuple[float, dict[int, Response]]:
    """Generate all rows at once; returns the seconds and the responses by row."""
    dice = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(1, VOCABULARY, (PROMPT,), generator=dice, dtype=torch.int32) for _ in range(rows)]
    never, done = threading.Event(), dict[int, Response]()
    begin_s = time.perf_counter()
    engine.add([Prompt(row, tokens[row // MEMBERS], seed * rows + row) for row in range(rows)])
    while engine.running:
        done |= {response.key: response for response in engine.run(never)}
    return time.perf_counter() - begin_s, done


def decoding(options: Options) -> Figures:
    """Milliseconds a sample, and the share of samples that differ."""
    numbers, rounds = (ROWS[:1], 2) if options.quick else (ROWS, ROUNDS)
    samples = Samples()
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as name:
        folder = Path(name) / "model"
        make_model(folder, 0)
        for rows in numbers:
            engines = {way: engine(folder, rows, way) for way in WAYS}
            for each in range(rounds + 1):
                results = {way: generate(rollout, rows, each) for way, rollout in engines.items()}
                if not each:  # the first round warms up
                    continue
                for way, (spent_s, _) in results.items():
                    samples.add(f"{way}_ms_{rows}", 1e3 * spent_s / rows)
                samples.add(f"ratio_{rows}", results["plain"][0] / results["compiled"][0])
                plain, compiled = (results[way][1] for way in WAYS)
                differ = sum(not torch.equal(response.tokens, compiled[key].tokens) for key, response in plain.items())
                samples.add(f"differ_fraction_{rows}", differ / rows)
    return samples.medians()


BENCH = Bench(
    about=__doc__,
    parts={"decoding": decoding},
    machine=lambda _: {"new_tokens": RESPONSE, "rounds": ROUNDS},
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(BENCH.main())
