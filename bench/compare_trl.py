"""TRL's GRPO trainer and flowrt on the same model, problems, group size, lengths and steps, all cores for each.

    python bench/compare_trl.py --baseline-python PYTHON [--seeds 0 1 2 3 4] [--json PATH]     # a Python that has TRL

A Qwen2 of a million parameters learns to write the kind of characters that its prompt asks for
(`end_to_end/task.py`). A response ends with its end token, or after ``--new-tokens`` tokens. Both start from the same
random weights. TRL generates and trains in turns, in one process with as many threads as there are cores; flowrt runs
one rollout worker and two trainer ranks in parallel, with a thread each, at ``--staleness`` 1. Samples per second
count from the end of the first step.

Speed that costs reward is no speed: ``seconds_to_reward`` is the time from the end of the first step until the mean
reward of five steps in a row is at least ``--target``. The medians are over the ``--seeds``; where a side does not
reach the target with half of them, its median is not reported, and ``reached`` is the share of those that do.
``reward_min`` is the lowest final reward of all seeds.

``bound_samples_per_s`` is what flowrt could reach at most: 1 / max(generation, training), from the seconds a sample
that its own rollout workers and its trainer ranks were busy, over the same steps.

Both are compiled by torch.compile: the trainer's passes on both sides, and flowrt's decode steps as well, while TRL
generates by transformers as it is. Both run in float32 and in bfloat16, with float32 weights in the optimiser: flowrt
by its fsdp engine then, TRL by its ``bf16``. On some CPUs bfloat16 is the slower one. ``samples_per_s``, ``reward``,
``baseline_samples_per_s``, ``baseline_reward`` and ``ratio`` are of the faster run of each side in each round;
``float32_ratio`` and ``bfloat16_ratio`` compare the two in one type. ``--dtypes`` selects types; with ``--no-compile``
neither side is compiled.

Samples of the second step that flowrt has generated before the first one ends are not subtracted: at most one step.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.harness import Bench, Figures, Options
from common.jobs import Job, flowrt
from end_to_end.task import make_data, make_model

from flowrt.controller.storage.timeline_file import read_timeline
from flowrt.engines.options import Dtype
from flowrt.recipes.algorithms import PRESETS
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import defaults, to_toml
from flowrt.recipes.tasks.registry import task_of
from flowrt.runtime.timeline import Span, busy_fraction

TIMEOUT_S = 900.0
WINDOW, SMOOTHED = 10, 5
"""Steps of the final reward, and of the mean that has to reach the target."""
LR, WARMUP_STEPS = 1e-3, 3
FLOAT32: Dtype = "float32"
DTYPES: list[Dtype] = [FLOAT32, "bfloat16"]
FIGURES = ("samples_per_s", "reward", "seconds_to_reward")
ABOUT = ("steps", "new_tokens", "seeds", "staleness", "target", "compile", "dtypes")
BASELINE = Path(__file__).parent / "end_to_end" / "trl_baseline.py"
REWARD = Path(__file__).parent / "end_to_end" / "reward.py"
MICRO_BATCH_TOKENS, FORWARD_TOKENS = 2048, 2560
"""Four groups make a micro-batch, and go through one pass: sixteen groups of a step, two ranks."""


def config(folder: Path, arguments: argparse.Namespace, dtype: Dtype) -> RunConfig:
    base = defaults("custom")
    samples = base.prompts_per_step * base.group_size
    return dataclasses.replace(
        base,
        seed=arguments.seed,
        steps=arguments.steps,
        max_staleness=arguments.staleness,
        run_dir=str(folder / f"run-{dtype}"),
        model=str(folder / "model"),
        data=dataclasses.replace(base.data, path=str(folder / "data.jsonl"), eval_prompts=0),
        reward=dataclasses.replace(base.reward, functions=(str(REWARD),)),
        algorithm=dataclasses.replace(base.algorithm, kl=dataclasses.replace(base.algorithm.kl, coef=0.0)),
        rollout=dataclasses.replace(
            base.rollout,
            workers=1,
            max_running_requests=samples,
            max_new_tokens=arguments.new_tokens,
            compile=arguments.compile,
        ),
        trainer=dataclasses.replace(
            base.trainer,
            lr=LR,
            warmup_steps=WARMUP_STEPS,
            save=False,
            ranks=arguments.ranks,
            micro_batch_tokens=MICRO_BATCH_TOKENS,
            forward_tokens=FORWARD_TOKENS,
            compile=arguments.compile,
            # Mixed precision needs fsdp, whose optimiser keeps float32 weights.
            engine="torch" if dtype == FLOAT32 else "fsdp",
            fsdp=dataclasses.replace(base.trainer.fsdp, dtype=dtype),
        ),
        checkpoint=dataclasses.replace(base.checkpoint, every=0),
    )


def ours(folder: Path, arguments: argparse.Namespace, dtype: Dtype) -> dict[str, float]:
    """Samples/s and reward of a `flowrt run`, and the bound on samples/s that follows from its busy times."""
    run_config = config(folder, arguments, dtype)
    run_dir = Path(run_config.run_dir)
    file = folder / "run.toml"
    file.write_text(to_toml(run_config))
    lines = Job(run_dir, flowrt("run", "--config", file)).lines
    samples = sum(line["samples"] for line in lines[1:])
    rewards, ends_s = [line["reward"] for line in lines], [line["wall_s"] for line in lines]
    bound = {"bound_samples_per_s": samples / busiest_s(list(read_timeline(run_dir)))}
    return {**curve_figures(rewards, ends_s, samples, arguments.target), **bound}


def curve_figures(rewards: Sequence[float], ends_s: Sequence[float], samples: int, target: float) -> dict[str, float]:
    """Figures of one run.

    Args:
        rewards: mean reward of each step.
        ends_s: end of each step.
        samples: of all steps but the first.
        target: reward to reach.
    """
    means = {step: statistics.fmean(rewards[step - SMOOTHED : step]) for step in range(SMOOTHED, len(rewards) + 1)}
    reached_s = (ends_s[step - 1] - ends_s[0] for step, mean in means.items() if mean >= target)
    return {
        "samples_per_s": samples / (ends_s[-1] - ends_s[0]),
        "reward": statistics.fmean(rewards[-WINDOW:]),
        "seconds_to_reward": next(reached_s, math.inf),
    }


def busiest_s(timeline: Sequence[Mapping[str, Any]]) -> float:
    """Busy seconds from the end of the first step on, the mean over workers, of the busier of the two roles."""
    spans: dict[str, dict[str, list[Span]]] = {"rollout": {}, "trainer": {}}
    for line in timeline:
        if line["role"] in spans and "kind" in line:
            span = Span(line["kind"], line["start_s"], line["end_s"])
            spans[line["role"]].setdefault(line["worker"], []).append(span)
    ends_s = sorted(
        span.end_s for worker_spans in spans["trainer"].values() for span in worker_spans if span.kind == "step"
    )
    first_s, last_s = ends_s[len(spans["trainer"]) - 1], ends_s[-1]
    shares = [
        statistics.fmean(busy_fraction(worker_spans, first_s, last_s) for worker_spans in role.values())
        for role in spans.values()
    ]
    return max(shares) * (last_s - first_s)


def trl(folder: Path, arguments: argparse.Namespace, dtype: Dtype) -> dict[str, float]:
    """The same steps by TRL, in an environment of its own, with passes of this type."""
    run_config = config(folder, arguments, dtype)
    problems = task_of(run_config).training_problems()[: run_config.steps * run_config.prompts_per_step]
    orders = {
        "model": run_config.model,
        "reward": run_config.reward.functions[0],
        "out": str(folder / "trl"),
        "problems": [
            {"prompt": problem.prompt, "answer": json.loads(problem.answer)["answer"]} for problem in problems
        ],
        "threads": os.cpu_count(),
        "compile": arguments.compile,
        "dtype": dtype,
        "max_new_tokens": run_config.rollout.max_new_tokens,
        **{name: getattr(run_config, name) for name in ("steps", "prompts_per_step", "group_size", "seed")},
        **{name: getattr(run_config.trainer, name) for name in ("lr", "beta2", "warmup_steps")},
        **{name: getattr(PRESETS["dapo"].loss, name) for name in ("clip_low", "clip_high")},
    }
    path = folder / "orders.json"
    path.write_text(json.dumps(orders))
    command = [arguments.baseline_python, str(BASELINE), str(path)]
    ended = subprocess.run(command, check=False, timeout=TIMEOUT_S, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"TRL failed: {ended.stderr.strip()[-2000:]}")
    curve = json.loads(ended.stdout.strip().splitlines()[-1])
    samples = run_config.prompts_per_step * run_config.group_size * (run_config.steps - 1)
    return curve_figures(curve["rewards"], curve["ends_s"], samples, arguments.target)


def measured(arguments: argparse.Namespace) -> dict[str, float]:
    """The figures of one seed: each side in each type, one run after the other."""
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as name:
        folder = Path(name)
        make_model(folder / "model", arguments.seed)
        make_data(folder / "data.jsonl", arguments.seed)
        mine, theirs = ({dtype: run(folder, arguments, dtype) for dtype in arguments.dtypes} for run in (ours, trl))
    best, baseline = (max(side.values(), key=lambda figures: figures["samples_per_s"]) for side in (mine, theirs))
    metrics = {
        **best,
        "baseline_samples_per_s": baseline["samples_per_s"],
        "ratio": best["samples_per_s"] / baseline["samples_per_s"],
        "ratio_to_bound": best["samples_per_s"] / best["bound_samples_per_s"],
        "baseline_reward": baseline["reward"],
        "baseline_seconds_to_reward": baseline["seconds_to_reward"],
    }
    for dtype in arguments.dtypes:
        metrics[f"{dtype}_ratio"] = mine[dtype]["samples_per_s"] / theirs[dtype]["samples_per_s"]
        for side, runs in (("", mine), ("baseline_", theirs)):
            metrics |= {f"{side}{dtype}_{name}": runs[dtype][name] for name in FIGURES}
    return metrics


def summary(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Medians over the seeds, the lowest final reward, and the share of the seeds that reach the target."""
    metrics = {name: statistics.median(values) for name, values in samples.items()}
    metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
    for name, values in samples.items():
        side, _, figure = name.rpartition("reward")
        if not figure and side.endswith("seconds_to_"):
            reached = [math.isfinite(value) for value in values]
            metrics[f"{side.removesuffix('seconds_to_')}reached"] = statistics.fmean(reached)
        elif not figure:
            metrics[f"{name}_min"] = min(values)
    if {"seconds_to_reward", "baseline_seconds_to_reward"} <= metrics.keys():
        metrics["seconds_ratio"] = metrics["baseline_seconds_to_reward"] / metrics["seconds_to_reward"]
    return metrics


def seeds_of(options: Options) -> list[int]:
    return list(options.seeds[:1] if options.quick else options.seeds)


def both(options: Options) -> Figures:
    """Samples/s, final reward and the time to a reward of both sides."""
    steps = 10 if options.quick else options.steps
    seeds = seeds_of(options)
    rounds = [measured(argparse.Namespace(**{**vars(options), "steps": steps, "seed": seed})) for seed in seeds]
    return summary({name: [round_[name] for round_ in rounds] for name in rounds[0]})


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--baseline-python", required=True, help="a Python that has TRL")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2, help="of flowrt's trainer, a thread each")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile on both sides"
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="of each side's passes")
    parser.add_argument("--staleness", type=int, default=1, help="of flowrt, in weight versions; 0: synchronous")
    parser.add_argument("--target", type=float, default=0.8, help="reward whose time is measured, at most 1")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="medians over them are reported")


def machine(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ABOUT} | {"seeds": seeds_of(options)}


BENCH = Bench(about=__doc__, parts={"both": both}, add_options=add_options, machine=machine)

if __name__ == "__main__":
    sys.exit(BENCH.main())
