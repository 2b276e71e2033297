"""A pretrained model learns a task: examples/larger_number.py on Gemma 3 270M, once for each seed.

    python bench/gemma.py [--model DIR] [--seeds 3] [--quick] [--json PATH]

``--model`` is the directory that scripts/install_gemma writes by default. ``held_out_first`` and ``held_out_last`` are
the rewards of the most likely answers to 64 held-out prompts, before training and after it; ``minutes`` count from the
start of the command to its end. Figures are medians over seeds, ``_least`` the worst seed. ``reward_to_5``,
``reward_to_10`` … are the mean rewards of five steps.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from common.harness import ROOT, Bench, Figures, Options
from common.jobs import run_job

EXAMPLE = ROOT / "examples" / "larger_number.py"
MODEL = Path.home() / ".cache/flowrt/gemma-3-270m"
TIMEOUT_S = 7200.0
WINDOW = 5


def model(text: str) -> Path:
    """A directory with a model. Raises ArgumentTypeError if there is none."""
    if not (Path(text) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"no model in {text}; scripts/install_gemma writes it there")
    return Path(text)


def run(path: Path, seed: int, flags: list[str]) -> dict[str, float]:
    """The figures of one run."""
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        words = (EXAMPLE, "--model", path, "--seed", seed, *flags)
        job = run_job(Path(folder) / "run", *words, timeout_s=TIMEOUT_S)
        summary, rewards = job.summary, [line["reward"] for line in job.lines]
    ends = range(WINDOW, len(rewards) + 1, WINDOW)
    return {
        "minutes": job.total_s / 60,
        "samples_per_s": summary["samples_per_s"],
        "held_out_first": summary["eval_first"],
        "held_out_last": summary["eval_last"],
        **{f"reward_to_{end}": statistics.fmean(rewards[end - WINDOW : end]) for end in ends},
    }


def seeds_of(options: Options) -> int:
    return 1 if options.quick else int(options.seeds)


def learning(options: Options) -> Figures:
    """Held-out answers, the curve of rewards, and the minutes of a run."""
    flags = ["--steps", "5"] if options.quick else []
    runs = [run(options.model, seed, flags) for seed in range(seeds_of(options))]
    return {
        **{name: statistics.median(figures[name] for figures in runs) for name in runs[0]},
        "held_out_last_least": min(figures["held_out_last"] for figures in runs),
        "minutes_most": max(figures["minutes"] for figures in runs),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=model, default=str(MODEL), help="directory of the checkpoint")
    parser.add_argument("--seeds", type=int, default=3)


BENCH = Bench(
    about=__doc__,
    parts={"learning": learning},
    add_options=add_options,
    machine=lambda options: {"seeds": seeds_of(options)},
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
