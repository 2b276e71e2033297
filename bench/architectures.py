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
from common.report import write
from rich.console import Console
from rich.table import Table

QUICK = (
    *("bert", "falcon", "gemma3", "gpt2", "gpt_neo", "lfm2", "llama", "llama4_text", "mamba2", "mixtral", "opt"),
    "qwen3_next",
)
LIMIT_S = 900.0
LIMIT_BYTES = 8 << 30
STATES = ("right", "refused", "wrong", "traceback")


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write {metrics, machine} here")
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK)} families")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        choices=FAMILIES,
        metavar="FAMILY",
        help="only these families; others keep their results in the file of --json",
    )
    parser.add_argument("--jobs", type=int, default=2, help="families at a time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    families = arguments.only or (QUICK if arguments.quick else FAMILIES)
    console = Console(width=160)
    results: dict[str, Result] = {}
    with ThreadPoolExecutor(arguments.jobs) as workers:
        for family, one in zip(families, workers.map(examined, families), strict=True):
            results[family] = one
            console.print(f"{family}: {one.state} {one.generation} {one.training} {one.reason}", soft_wrap=True)
    table = Table("family", "result", "generates", "trains", "off by (nats)", "reason", title="architectures")
    for family, one in results.items():
        table.add_row(family, one.state, one.generation, one.training, f"{one.off_nats:.1e}", one.reason)
    console.print(table)
    if arguments.only and arguments.json is not None and arguments.json.is_file():
        earlier = json.loads(arguments.json.read_text())["families"]
        results = {family: Result(**one) for family, one in earlier.items()} | results
    counts = Counter(one.state for one in results.values())
    metrics = {
        "arch_right": float(counts["right"]),
        "arch_refused": float(counts["refused"]),
        "arch_wrong": float(counts["wrong"]),
        "arch_tracebacks": float(counts["traceback"]),
    }
    about = {family: one.as_json() for family, one in results.items()}
    write(arguments.json, metrics, transformers=transformers.__version__)
    if arguments.json is not None:
        whole = json.loads(arguments.json.read_text()) | {"families": about}
        arguments.json.write_text(json.dumps(whole, indent=1) + "\n")
    return int(bool(counts["wrong"] or counts["traceback"]))


if __name__ == "__main__":
    sys.exit(main())
