"""Every family of AutoModelForCausalLM with tiny random weights: generation and training against plain forward passes.

    python bench/architectures.py [--json PATH] [--quick] [--only FAMILY ...]

Each family is built from its configuration (float32) in a process of its own with limits of time and memory. Compared
with a forward pass over each whole sequence alone, without cache and padding: sampled generation of a batch of unequal
lengths, one row alone, greedy tokens, generation across an update in flight (recomputed at once, and caught up with in
the background), and the trainer's packed and padded log-probabilities and gradients. A family is right in all of them,
or refused with a reason, or counted as wrong.
"""

import argparse
import json
import logging
import multiprocessing
import resource
import sys
import traceback
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from architecture.paths import Result, examine
from architecture.tiny import FAMILIES
from common.harness import Bench, Figures, Options

QUICK = (
    *("bert", "falcon", "gemma3", "gpt2", "gpt_neo", "lfm2", "llama", "llama4_text", "mamba2", "mixtral", "opt"),
    "qwen3_next",
)
LIMIT_S = 900.0
LIMIT_BYTES = 8 << 30
STATES = ("right", "refused", "wrong", "traceback")
RESULTS: dict[str, Result] = {}


def in_child(family: str, answer: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    try:
        answer.send(examine(family))
    except BaseException as error:  # noqa: BLE001 (whatever a run would die of is a result)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        text = f"{type(error).__name__} at {place}: {error}".replace("\n", " ")[:300]
        answer.send(Result("traceback", reason=text))


def examined(family: str) -> Result:
    """The result of a family, from a process of its own."""
    theirs, mine = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=in_child, args=(family, mine))
    child.start()
    mine.close()
    try:
        result: Result = theirs.recv() if theirs.poll(LIMIT_S) else Result("traceback", reason=f"over {LIMIT_S:.0f} s")
    except EOFError:
        result = Result("traceback", reason="the process died")
    child.kill()
    child.join()
    return result


def kept(path: Path | None) -> dict[str, Result]:
    """The results of families in the file of an earlier run."""
    if path is None or not path.is_file():
        return {}
    return {family: Result(**fields) for family, fields in json.loads(path.read_text())["families"].items()}


def families(options: Options) -> Figures:
    """Families by their result: right, refused, wrong, or with a traceback."""
    chosen = options.only or (QUICK if options.quick else FAMILIES)
    RESULTS.update(kept(options.json) if options.only else {})
    with ThreadPoolExecutor(options.jobs) as workers:
        for family, result in zip(chosen, workers.map(examined, chosen), strict=True):
            RESULTS[family] = result
            off = f"{result.off_nats:.1e} nats"
            print(f"{family}: {result.state} {result.generation} {result.training} {off} {result.reason}", flush=True)
    counts = Counter(result.state for result in RESULTS.values())
    return {f"arch_{'tracebacks' if state == 'traceback' else state}": float(counts[state]) for state in STATES}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        choices=FAMILIES,
        metavar="FAMILY",
        help="only these families; others keep their results in the file of --json",
    )
    parser.add_argument("--jobs", type=int, default=2, help="families at a time")


BENCH = Bench(
    about=__doc__,
    parts={"families": families},
    most={"arch_wrong": 0.0, "arch_tracebacks": 0.0},
    add_options=add_options,
    machine=lambda _: {"transformers": transformers.__version__},
    tables=lambda: {"families": {family: result.as_json() for family, result in sorted(RESULTS.items())}},
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    sys.exit(BENCH.main())
