"""Verification of the RL objectives: one table of figures with their bounds.

    python bench/objectives.py [ROW ...] [--json PATH] [--quick] [--seeds N]
        [--trl-python PYTHON] [--against DIR|COMMIT]

Rows; without names, all of them (`bench/objectives_rows/`, a module each; docs/objectives.md explains them):

- closed_form: every part of an objective against scalar formulas, value and gradient;
- papers: every preset from rewards to gradients against the formula of its paper, every metric against its definition;
- enumeration: expected gradients, summed over all responses, against the true gradient or their own closed bias;
- invariance: the gradient of a whole model, however a step is cut into passes, packed, or spread over ranks;
- trl: values and gradients against TRL's own loss, in an environment that has TRL (``--trl-python``);
- bandit: fixed points of training with a divergence, through the rollout and the training engine;
- lm_head: memory and time of the fused LM head and of whole logits;
- token_budget: the variation of tokens a step and the response lengths, with a token budget;
- staleness: accuracy after training on samples that are 0 to 16 versions old;
- retention: accuracy gained when one generation gives the samples of 64 updates;
- dynamic, curriculum: steps and tokens that are saved by choosing prompts;
- default_speed: samples/s of the default job over those of another tree (``--against``);
- runs: the default job with each preset (hours without ``--quick``).

Exits with 1 if a figure misses its bound. With --quick only bounds of at most 1e-3 count, which limit numerical
errors: the runs are then too small for the bounds on speed, size and learning.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from common.report import beyond, commit, write
from objectives_rows import (
    bandit,
    closed_form,
    default_speed,
    enumeration,
    invariance,
    lm_head,
    papers,
    retention,
    runs,
    sampling,
    staleness,
    token_budget,
    trl_losses,
)
from rich.console import Console
from rich.table import Table

BOUNDS = {
    "closed_form_max": 1e-12,
    "paper_max": 1e-12,
    "metrics_wrong": 0.0,
    "enumeration_max": 1e-9,
    "enumeration_exact_max": 1e-12,
    "enumeration_biased_max": 1e-9,
    "invariance_max": 1e-11,
    "trl_gradient_max": 1e-6,
    "trl_loss_max": 1e-6,
    "bandit_tv_max": 0.005,
    "presets_failed": 0.0,
    "dynamic_steps_ratio": 0.8,
    "dynamic_equal_groups_trained": 0.0,
    "curriculum_ratio": 0.75,
    "retention_ppo_64": 0.8,
    "c3po_length_bias": 1.03,
    "lm_head_gb": 0.3,
    "lm_head_value_error": 1e-5,
    "lm_head_gradient_error": 2e-3,
}
"""Largest values of figures; a figure without a bound is only reported."""
Row = Callable[[bool], dict[str, float]]
LOWER_BOUNDS = {
    "staleness16_best": 0.95,
    "retention_dpo_64": 0.95,
    "c3po_cv_ratio": 10.0,
    "c3po_length_bias": 0.97,
    "default_speed_ratio": 0.98,
    "bound4_over_bound0_min": 0.98,
}
"""Smallest values of figures."""
ROWS = (
    *("closed_form", "papers", "enumeration", "invariance", "trl", "bandit", "lm_head", "token_budget"),
    *("staleness", "retention", "dynamic", "curriculum", "default_speed", "runs"),
)


NEEDS = {
    "trl": "--trl-python, a Python that has TRL",
    "default_speed": "--against, a commit, or a checkout that has a .venv, to compare with",
}
"""The option that a row needs."""


def rows(trl_python: str, against: str, seeds: int) -> dict[str, Row]:
    """The function that measures each row, without trl if ``trl_python`` and default_speed if ``against`` is empty."""
    found: dict[str, Row] = {
        "closed_form": closed_form.measure,
        "papers": papers.measure,
        "enumeration": enumeration.measure,
        "invariance": invariance.measure,
        "bandit": bandit.measure,
        "lm_head": lm_head.measure,
        "token_budget": token_budget.measure,
        "staleness": staleness.measure,
        "retention": retention.measure,
        "dynamic": sampling.dynamic,
        "curriculum": sampling.curriculum,
        "runs": partial(runs.measure, seeds=seeds),
    }
    if trl_python:
        found["trl"] = partial(trl_losses.measure, python=Path(trl_python))
    if against:
        found["default_speed"] = partial(default_speed.measure, against=against)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"default: all of {', '.join(ROWS)}")
    parser.add_argument("--json", type=Path, help="write {metrics, machine} here, and keep what other rows wrote to it")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--trl-python", default="", help="a Python that has TRL; default: none, and no row trl")
    parser.add_argument(
        "--against", default="", help="a commit, or a checkout with a .venv; default: none, and no row default_speed"
    )
    parser.add_argument("--seeds", type=int, default=runs.SEEDS, help="of the row runs (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"--seeds is {arguments.seeds}; use 1 or more")
    unknown = [name for name in arguments.rows if name not in ROWS]
    if unknown:
        parser.error(f"there is no row {unknown[0]!r}; choose from {', '.join(ROWS)}")
    if arguments.trl_python and not Path(arguments.trl_python).is_file():
        parser.error(f"--trl-python: there is no {arguments.trl_python}")
    if arguments.against and (reason := default_speed.refusal(arguments.against)):
        parser.error(f"--against: {reason}")
    torch.set_num_threads(1)
    console, measured = Console(), rows(arguments.trl_python, arguments.against, arguments.seeds)
    metrics: dict[str, float] = {}
    trees: dict[str, str] = {}
    table = Table("figure", "value", "bound", "seconds", title="objectives")
    for name in arguments.rows or ROWS:
        if name not in measured:
            console.print(f"row {name} is left out: it needs {NEEDS[name]}")
            continue
        begin_s, trees[name] = time.perf_counter(), commit()
        found = measured[name](arguments.quick)
        seconds = f"{time.perf_counter() - begin_s:.1f}"
        for figure, value in found.items():
            table.add_row(figure, f"{value:.3g}", bound_of(figure), seconds)
            seconds = ""
        metrics |= found
    console.print(table)
    others, their_trees = earlier(arguments.json)
    write(arguments.json, others | metrics, threads=1, row_commits=their_trees | trees)
    broken = beyond(metrics, BOUNDS, LOWER_BOUNDS, quick=arguments.quick)
    for figure in broken:
        console.print(f"{figure} is {metrics[figure]:.3g}, its bound is {bound_of(figure)}")
    return int(bool(broken))


def earlier(path: Path | None) -> tuple[dict[str, float], dict[str, str]]:
    """The metrics of a file, and the tree that each row was measured on; empty if there is no such file."""
    if path is None or not path.is_file():
        return {}, {}
    written = json.loads(path.read_text())
    return written["metrics"], written["machine"].get("row_commits", {})


def bound_of(figure: str) -> str:
    """The bounds of a figure as text; empty if it has none."""
    least = [f"at least {LOWER_BOUNDS[figure]:g}"] if figure in LOWER_BOUNDS else []
    return ", ".join([*least, *([f"at most {BOUNDS[figure]:g}"] if figure in BOUNDS else [])])


if __name__ == "__main__":
    sys.exit(main())
