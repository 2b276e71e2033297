"""`flowrt run gsm8k` on word problems from a file; the summary of the run as metrics.

python bench/gsm8k.py --data FILE.jsonl [--quick] [--json PATH]
"""

import argparse
import sqlite3
import sys
import tempfile
from pathlib import Path

from common.harness import Bench, Figures, Options
from common.jobs import run_job

TIMEOUT_S = 1800.0


def gsm8k(options: Options) -> Figures:
    """The numbers of the summary, and the prompts that the ledger has as trained."""
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        words = ("gsm8k", "--data", options.data, *(("--steps", 10) if options.quick else ()))
        job = run_job(Path(folder) / "run", *words, timeout_s=TIMEOUT_S)
        summary = job.summary
        with sqlite3.connect(job.run_dir / "ledger.sqlite") as ledger:
            trained = ledger.execute("SELECT COUNT(*) FROM events WHERE state = 'trained'").fetchone()[0]
        if options.page:
            options.page.write_bytes((job.run_dir / "run.html").read_bytes())
    metrics = {name: value for name, value in summary.items() if isinstance(value, int | float)}
    metrics |= {f"busy_{role}": share for role, share in summary["busy_fraction"].items()}
    metrics["prompts_trained"] = trained
    if summary["reward_first"] > 0:
        metrics["reward_ratio"] = summary["reward_last"] / summary["reward_first"]
    return metrics


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="copy the run's page, run.html, here")


BENCH = Bench(about=__doc__, parts={"gsm8k": gsm8k}, add_options=add_options)

if __name__ == "__main__":
    sys.exit(BENCH.main())
