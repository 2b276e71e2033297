"""Rows `dynamic` and `curriculum`: the savings from choosing prompts by their rewards, in runs of `flowrt run`.

Runs write a checkpoint every few steps; the held-out accuracy of each checkpoint (greedy) is measured afterwards,
because the rewards of a run that chooses its prompts are a biased sample. The step at which the target accuracy is
reached is interpolated between two checkpoints.

- dynamic: the preset dapo, which replaces groups of equal rewards, with and without that filter, with groups of 4:
  about half of them have equal rewards. Measured are the steps until the accuracy is 0.8, and the groups of equal
  rewards that were trained despite the filter.
- curriculum: half of the prompts have an answer that no response can equal. Measured are the prompt and response tokens
  that were generated until the accuracy on held-out prompts, all of them solvable, is 0.8, with ``curriculum.type``
  solve_rate and with uniform. Both sides replace groups of equal rewards, so that every step trains the same number of
  groups with a policy gradient, and a skipped prompt saves its tokens. (Without the filter, the groups of unsolvable
  prompts would shrink the gradient, which Adam compensates: they would cost tokens and no progress.) The first epoch is
  the same on both sides, because no prompt has a history yet; with few prompts per step and a low learning rate a run
  has many epochs.
"""

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.jobs import run_job

from flowrt.recipes.config_io import parse
from flowrt.recipes.run_dir import checkpoint_dir, checkpoint_steps
from flowrt.recipes.tasks.registry import task_of
from objectives_rows.stale_loop import HELD_OUT, StaleLoop, embedded_model

TARGET, QUICK_TARGET, EVERY, SEEDS = 0.8, 0.6, 4, (0, 1, 2)
DYNAMIC_STEPS, CURRICULUM_STEPS, QUICK_STEPS = 64, 192, 40
POSSIBLE, IMPOSSIBLE = 32, 32
CURRICULUM_LR = 0.15
"""The learning rate of the row `curriculum`, relative to that of the default task."""
CURRICULUM = {
    "uniform": ("--curriculum.type", "uniform"),
    "solve_rate": ("--curriculum.type", "solve_rate"),
}
"""The two sides of the row `curriculum`, with their flags."""
REWARD = 'def reward(response, answer):\n    return float(response.rsplit(",", 1)[-1] == answer)\n'


class CheckpointedRun:
    """A finished run of `flowrt run` with a checkpoint every `EVERY` steps; the constructor runs it.

    Args:
        run_dir: run directory.
        model: directory of the initial model.
        seed: seed of the run.
        steps: optimiser steps.
        flags: further flags.
    """

    def __init__(self, run_dir: Path, model: Path, seed: int, steps: int, flags: Sequence[str]) -> None:
        self._model = model
        words: tuple[object, ...] = ("--model", model, "--seed", seed, "--steps", steps, "--checkpoint.every", EVERY)
        words += ("--checkpoint.keep", steps, "--trainer.save", "False", "--data.eval-prompts", 0, *flags)
        self.job = run_job(run_dir, *words)

    def accuracies(self) -> dict[int, float]:
        """Held-out accuracy of the default task by step, from the initial model (step 0) to the last checkpoint."""
        flags = ["--run-dir", str(self.job.run_dir), "--model", str(self._model), "--algorithm.kl.coef", "0"]
        loop = StaleLoop(parse([*flags, "--data.eval-prompts", str(HELD_OUT)]))
        accuracies = {0: loop.held_out_accuracy()}
        for step in sorted(checkpoint_steps(self.job.run_dir)):
            loop.load(checkpoint_dir(self.job.run_dir, step))
            accuracies[step] = loop.held_out_accuracy()
        return accuracies


def steps_to(target: float, accuracies: dict[int, float]) -> float:
    """The step at which the accuracy first reached the target, interpolated; infinity if it never did."""
    points = sorted(accuracies.items())
    for (before, low), (after, high) in pairwise(points):
        if low < target <= high:
            return before + (after - before) * (target - low) / (high - low)
    return 0.0 if points[0][1] >= target else math.inf


def dynamic(quick: bool) -> dict[str, float]:
    """Metrics of the row `dynamic`: median steps to the target with and without dynamic sampling, and their ratio."""
    shape = ["--algorithm", "dapo", "--prompts-per-step", "8", "--group-size", "4"]
    sides = {"with": shape, "without": [*shape, "--algorithm.filter.zero_variance", "False"]}
    steps: dict[str, list[float]] = {side: [] for side in sides}
    equal_groups = 0
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        model = embedded_model(f"{folder}/start")
        for seed in SEEDS[:1] if quick else SEEDS:
            for side, flags in sides.items():
                run = CheckpointedRun(
                    Path(folder) / f"{side}-{seed}", model, seed, QUICK_STEPS if quick else DYNAMIC_STEPS, flags
                )
                steps[side].append(steps_to(TARGET, run.accuracies()))
                if side == "with":
                    equal_groups += sum(line["refused_groups_trained"] for line in run.job.lines)
    medians = {side: statistics.median(counts) for side, counts in steps.items()}
    return {
        "dynamic_steps_with": medians["with"],
        "dynamic_steps_without": medians["without"],
        "dynamic_steps_ratio": medians["with"] / medians["without"],
        "dynamic_equal_groups_trained": float(equal_groups),
    }


def curriculum(quick: bool) -> dict[str, float]:
    """Metrics of the row `curriculum`: median tokens to the target with solve_rate and uniform, and their ratio."""
    tokens: dict[str, list[float]] = {side: [] for side in CURRICULUM}
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        model = embedded_model(f"{folder}/start")
        data, reward = Path(folder) / "rows.jsonl", Path(folder) / "reward.py"
        reward.write_text(REWARD)
        problems = task_of(parse(["--run-dir", folder])).training_problems()[: POSSIBLE + IMPOSSIBLE]
        rows = [
            {"prompt": problem.prompt, "answer": problem.answer if number % 2 else "none"}
            for number, problem in enumerate(problems)
        ]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = ["--recipe", "custom", "--data", str(data), "--reward", f"{reward}:reward", "--data.epochs", "0"]
        shape = ["--prompts-per-step", "2", "--group-size", "8", "--rollout.max-new-tokens", "16"]
        shape += ["--algorithm.filter.zero-variance", "True", "--algorithm.kl.coef", "0"]
        shape += training_flags(1.0 if quick else CURRICULUM_LR)
        for seed in SEEDS[:1] if quick else SEEDS:
            for policy, flags in CURRICULUM.items():
                run = CheckpointedRun(
                    Path(folder) / f"{policy}-{seed}",
                    model,
                    seed,
                    2 * QUICK_STEPS if quick else CURRICULUM_STEPS,
                    [*files, *shape, *flags],
                )
                generated = [0.0]
                for line in run.job.lines:
                    generated.append(generated[-1] + generated_tokens(line))
                accuracies = run.accuracies()
                step = steps_to(QUICK_TARGET if quick else TARGET, accuracies)
                tokens[policy].append(math.inf if math.isinf(step) else at(generated, step))
                reached = f"{tokens[policy][-1]:.0f} tokens, step {step:.0f}"
                sys.stdout.write(f"{policy}, seed {seed}: {reached}; best accuracy {max(accuracies.values()):.3f}\n")
                sys.stdout.flush()
    medians = {policy: statistics.median(counts) for policy, counts in tokens.items()}
    return {
        "curriculum_tokens_solve_rate": medians["solve_rate"],
        "curriculum_tokens_uniform": medians["uniform"],
        "curriculum_ratio": medians["solve_rate"] / medians["uniform"],
    }


def generated_tokens(line: Mapping[str, Any]) -> float:
    """Estimate of the tokens generated for a step: filtered groups count with the mean tokens of trained groups.

    Args:
        line: the line of the step in metrics.jsonl.
    """
    return float(line["tokens"] * (line["groups"] + line["filtered_groups"]) / line["groups"])


def training_flags(lr_scale: float = 1.0) -> list[str]:
    """Flags of recipe custom for the optimiser settings of the default task, with a scaled learning rate."""
    trainer = parse([]).trainer
    return [
        *("--trainer.lr", str(trainer.lr * lr_scale), "--trainer.beta2", str(trainer.beta2)),
        *("--trainer.warmup-steps", str(trainer.warmup_steps)),
    ]


def at(values: Sequence[float], step: float) -> float:
    """A cumulative value, given for each step, interpolated at a fractional step."""
    low = int(step)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (step - low)
