"""Real runs with evaluations: throughput relative to runs without, repeatability, the best weights after kills."""

import itertools
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from common.harness import by_turns
from common.jobs import FLOWRT, Job, flowrt, run_job

from flowrt.algorithms.evaluation import pass_at_k
from flowrt.engines.hf import load_model, named_parameters
from flowrt.engines.training.saved_state import read_tensors
from flowrt.recipes.run_dir import best_dir, checkpoint_dir, checkpoint_steps
from flowrt.roles.best_weights import read_list
from flowrt.transport.weights.snapshot import Snapshot

RUN_TIMEOUT_S = 400.0
POLL_S = 0.05
LARGEST_ENUMERATION = 8
MIXED = "RemoteProtocolError: answers to "
"""Text in the source's log when an evaluation has answers of another version; this error ends the run."""
SMALL = (
    *("--sft.steps", "20", "--sft.answer-only-steps", "0", "--data.eval-prompts", "16"),
    *("--prompts-per-step", "4", "--group-size", "4", "--rollout.max-new-tokens", "8", "--eval.overlap", "wait"),
    *("--eval.interval", "2", "--eval.samples", "4", "--eval.temperature", "1.0"),
)


def run(directory: Path, *flags: str) -> dict[str, Any]:
    """Run the recipe arithmetic; returns its summary. Raises RuntimeError if it fails, unless `is_mixed`."""
    try:
        return run_job(directory, *flags).summary
    except RuntimeError:
        if not is_mixed(directory):
            raise
        return Job(directory, 0.0).summary


def is_mixed(directory: Path) -> bool:
    """Whether the source of a run was sent answers of another version than the one that it evaluated."""
    return MIXED in (directory / "logs" / "source.log").read_text()


def results(directory: Path) -> list[dict[str, Any]]:
    """The lines of evaluations.jsonl, without readings of the clock."""
    lines = [json.loads(line) for line in (directory / "evaluations.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("wall_s", "seconds")} for line in lines]


def pass_error() -> float:
    """Largest error of `pass_at_k`, compared with the share of all choices of k answers that have a right one."""
    worst = 0.0
    for answers in range(1, LARGEST_ENUMERATION + 1):
        for solved, k in itertools.product(range(answers + 1), range(1, answers + 1)):
            choices = [
                any(combination)
                for combination in itertools.combinations([True] * solved + [False] * (answers - solved), k)
            ]
            worst = max(worst, abs(pass_at_k(answers, solved, k) - sum(choices) / len(choices)))
    return worst


def evaluation(quick: bool) -> dict[str, float]:
    """Throughput with evaluations every 10 steps (64 prompts, 4 samples) over that without, by turns; repeatability."""
    steps, turns = ("20", 1) if quick else ("100", 5)
    with tempfile.TemporaryDirectory() as place:

        def summary(flags: tuple[str, ...], turn: int) -> dict[str, Any]:
            words = ("--steps", steps, "--seed", str(turn), "--data.eval-prompts", "64", *flags)
            return run(Path(place) / f"{turn}-{len(flags)}", *words)

        evaluations = ("--eval.interval", "10", "--eval.samples", "4", "--eval.temperature", "1.0")
        sides = by_turns({"without": partial(summary, ()), "with": partial(summary, evaluations)}, turns)
        rates = {side: [figures["samples_per_s"] for figures in summaries] for side, summaries in sides.items()}
        evaluated = sum(figures["evaluations"]["held_out"]["evaluations"] for figures in sides["with"])
        same = [Path(place) / name for name in ("first", "second")]
        for directory in same:
            run(directory, *SMALL, "--steps", "4", "--deterministic", "True", "--max-staleness", "0")
        first, second = map(results, same)
        mixed = sum(is_mixed(directory) for directory in Path(place).iterdir())
        out = Path(place) / "results.json"
        flowrt("eval", same[0], "--json", out)
        again = json.loads(out.read_text())["results"]["held_out"]
        last = {key: value for key, value in first[-1].items() if key != "name"}
    return {
        "eval_samples_per_s": sum(rates["with"]) / turns,
        "eval_ratio": sum(rates["with"]) / sum(rates["without"]),
        "eval_count": float(evaluated),
        "eval_mixed": float(mixed),
        "eval_pass_error": pass_error(),
        "eval_differs": float(first != second),
        "eval_of_checkpoint_differs": float({key: again[key] for key in last} != last),
    }


def best(quick: bool) -> dict[str, float]:
    """Runs that are killed at a random moment after their first checkpoint and resumed: wrong best weights."""
    runs, wrong, written = (1 if quick else 50), 0, 0
    for seed in range(runs):
        with tempfile.TemporaryDirectory() as place:
            directory = Path(place) / "run"
            _killed_and_resumed(directory, seed)
            for listed in read_list(directory):
                written += 1
                weights = named_parameters(load_model(best_dir(directory, listed.version)))
                checksum = Snapshot.take(listed.version, weights).checksum()
                trained = _of_checkpoint(directory, listed.version, list(weights))
                wrong += not (checksum == listed.checksum and trained in (None, checksum))
            wrong += not read_list(directory)
    return {"best_runs": float(runs), "best_written": float(written), "best_wrong": float(wrong)}


def _killed_and_resumed(directory: Path, seed: int) -> None:
    flags = ["--steps", "8", "--seed", str(seed), "--checkpoint.every", "2", "--checkpoint.keep", "9"]
    flags += ["--checkpoint.best", "held_out/avg@4"]
    words = [*FLOWRT, "run", "arithmetic", "--run-dir", str(directory), *SMALL, *flags]
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline_s = time.monotonic() + RUN_TIMEOUT_S
    while child.poll() is None and not checkpoint_steps(directory):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no checkpoint of {directory} within {RUN_TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)
    time.sleep(random.Random(seed).random())
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        # Workers in sessions of their own get no signal; they end with their controller.
        flowrt("resume", directory)


def _of_checkpoint(directory: Path, version: int, names: list[str]) -> int | None:
    """The checksum of the weights in the checkpoint after ``version`` steps; None without such a checkpoint."""
    if version not in checkpoint_steps(directory):
        return None
    state = read_tensors(checkpoint_dir(directory, version))
    return Snapshot.take(version, {name: state[f"model.{name}"] for name in names}).checksum()
