"""`flowrt run gsm8k` on word problems from a file; the summary of the run as metrics.

python bench/gsm8k.py --data FILE.jsonl [--quick] [--json PATH]
"""

import argparse
import json
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

from common.report import write
from rich.console import Console
from rich.table import Table

TIMEOUT_S = 1800.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path, help="write {metrics, machine} here")
    parser.add_argument("--quick", action="store_true", help="10 steps")
    parser.add_argument("--page", type=Path, help="copy the run's page, run.html, here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "flowrt.cli", "run", "gsm8k", "--data", str(arguments.data)]
        command += ["--run-dir", str(run_dir), *(["--steps", "10"] if arguments.quick else [])]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        summary = json.loads((run_dir / "summary.json").read_text())
        with sqlite3.connect(run_dir / "ledger.sqlite") as ledger:
            trained = ledger.execute("SELECT COUNT(*) FROM events WHERE state = 'trained'").fetchone()[0]
        if arguments.page:
            arguments.page.write_bytes((run_dir / "run.html").read_bytes())
    metrics = {name: value for name, value in summary.items() if isinstance(value, int | float)}
    metrics |= {f"busy_{role}": share for role, share in summary["busy_fraction"].items()}
    metrics["prompts_trained"] = trained
    if summary["reward_first"] > 0:
        metrics["reward_ratio"] = summary["reward_last"] / summary["reward_first"]
    table = Table("metric", "value", title="flowrt run gsm8k")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)
    write(arguments.json, metrics)


if __name__ == "__main__":
    main()
