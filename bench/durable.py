"""What survives of what was generated: preemptions, kills of the whole run, kills of a rollout worker.

    python bench/durable.py [--trials 300] [--repeats 3] [--parts PART ...] [--quick] [--json PATH]

Real runs, as in bench/faults.py, with the torch engine, a tiny model and long-tailed lengths. Each decode step takes as
long as one of a large model. The data has exactly as many prompts as the run trains, so a token is lost if it was
generated and is in no sample that was trained at the end of the run; they are counted in the engine.

    preempt   SIGTERM to the run, then flowrt resume; staleness bounds 0, 1 and 4
              preempt_lost_fraction: tokens lost, of those that were generated and not trained at the signal;
              preempt_lost_fraction_without: the same at bound 1 with checkpoint.samples off
    killed    SIGKILL of all processes, rollout.journal_s 10, a checkpoint every step, then flowrt resume
              killed_lost_s: tokens lost, in seconds of generation of all workers
    worker    SIGKILL of one of two rollout workers, rollout.journal_s 10
              worker_lost_s: tokens lost, in seconds of generation of a worker
    kills     the kills of bench/faults.py at random instants, with short journals
              lost, doubled, hung, wrong: as there; over_bound: runs that trained a sample over the staleness bound
    ratio     journal_ratio: samples/s with journals every second over samples/s without, of two runs at once
    shape     the journal of a worker with 256 sequences of 32,768 tokens (bench/durability/shape.py)
              journal_bytes_per_token: on disk
              journal_engine_stopped_s: for a write of all tokens; journal_engine_stopped_later_s: of 300 more of each
              journal_written_s: until all tokens are passed to the disk; journal_write_peak_mb: memory for it
              journal_loop_blocked_s: the longest time in which the event loop did nothing else
              journal_controller_read_s, journal_worker_read_s, journal_read_peak_mb: at a resume
              journal_headers_per_s: parts of samples of which the controller learns at a resume

The worst of all repetitions counts; of the ratio the median.
"""

import argparse
import dataclasses
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from common.harness import Bench, Figures, Options
from durability.counting import Generated, TokenCounter
from fault_injection.faults import EVERYTHING, Plan, draw
from fault_injection.launcher_process import LauncherProcess
from fault_injection.runs import KEYS, WORKER_TIMEOUT_S, prepare, warm_up
from fault_injection.trial import STEPS as TRIAL_STEPS
from fault_injection.trial import Trial, side_by_side

from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import to_toml
from flowrt.recipes.run_dir import checkpoint_steps

BOUNDS = (0, 1, 4)
PROMPTS, MEMBERS = 4, 4
STEP_S = 0.02
JOURNAL_S = 10.0
DEADLINE_S = 600.0
POLL_S = 0.02
GROUPS = ("one", "two", "everything", "resume")
MOST = {
    "preempt_lost_fraction": 0.01,
    "killed_lost_s": 10.0,
    "worker_lost_s": 10.0,
    **dict.fromkeys(("lost", "doubled", "hung", "wrong", "over_bound"), 0.0),
    "journal_bytes_per_token": 8.1,
    "journal_loop_blocked_s": 0.2,
    "journal_write_peak_mb": 150.0,
}
LEAST = {"journal_ratio": 0.98}
COUNTER = TokenCounter()


class Run:
    """A run with a journal, and the tokens that its processes generate."""

    def __init__(self, base: RunConfig, folder: Path, *, steps: int, **rollout: Any) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        (folder / "tmp").mkdir(parents=True)
        data = folder / "data.jsonl"
        rows = [
            {"question": f"What is {n} and {n + 3}?", "answer": f"#### {2 * n + 3}"} for n in range(steps * PROMPTS)
        ]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.config = dataclasses.replace(
            base,
            steps=steps,
            run_dir=str(self.run_dir),
            prompts_per_step=PROMPTS,
            group_size=MEMBERS,
            data=dataclasses.replace(base.data, path=str(data), eval_prompts=0),
            rollout=dataclasses.replace(
                base.rollout, **{"max_running_requests": 8, "max_new_tokens": 1000, "journal_s": JOURNAL_S, **rollout}
            ),
            trainer=dataclasses.replace(base.trainer, micro_batch_tokens=20_000),
            algorithm=dataclasses.replace(base.algorithm, kl=dataclasses.replace(base.algorithm.kl, coef=0.0)),
            max_run_restarts=0,
        )

    def start(self, **changes: Any) -> LauncherProcess:
        """Start the run, with these changes of its configuration."""
        COUNTER.folder = self.folder / "tokens"
        self.config = dataclasses.replace(self.config, **changes)
        path = self.folder / "config.toml"
        path.write_text(to_toml(self.config))
        return LauncherProcess(self.folder, ["run", "--config", str(path)], [])

    def resume(self) -> None:
        """Resume the run, and wait for its end."""
        self.finish(LauncherProcess(self.folder, ["resume", str(self.run_dir)], []))

    def finish(self, launcher: LauncherProcess, code: int = 0) -> None:
        """Wait for the end of the launcher. Raises RuntimeError for another exit code."""
        self.wait(launcher, launcher.is_over)
        if launcher.code != code:
            raise RuntimeError(f"the run ended with {launcher.code}, not {code}: {launcher.read_output()[-2000:]}")

    def wait(self, launcher: LauncherProcess, condition: Callable[[], bool]) -> None:
        """Wait for a condition, or the end of the launcher. Raises RuntimeError at the deadline."""
        end_s = time.monotonic() + DEADLINE_S
        while not condition() and not launcher.is_over():
            if time.monotonic() > end_s:
                launcher.kill()
                raise RuntimeError(f"no end after {DEADLINE_S:.0f} s: {launcher.read_output()[-2000:]}")
            time.sleep(POLL_S)

    def generated(self) -> dict[int, Generated]:
        """What each process has generated, by process id."""
        return COUNTER.read(self.folder / "tokens")

    def tokens(self) -> int:
        """All tokens that were generated."""
        return sum(generated.tokens for generated in self.generated().values())

    def trained(self) -> int:
        """Response tokens of the steps that were trained."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        return sum(round(line["length_mean"] * line["samples"]) for line in map(json.loads, lines))

    def steps(self) -> int:
        """Number of steps that were trained."""
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    def lost(self) -> int:
        """Tokens that were generated and not trained, of a run that has trained all its prompts."""
        return max(self.tokens() - self.trained(), 0)


def preempted(base: RunConfig, folder: Path, bound: int, rng: random.Random, *, samples: bool = True) -> float:
    """The fraction of the tokens in progress that a preemption loses; ``samples``: of `checkpoint.samples`."""
    run = Run(base, folder, steps=5, journal_s=0.0)
    checkpoint = dataclasses.replace(base.checkpoint, every=1000, samples=samples)
    launcher = run.start(max_staleness=bound, checkpoint=checkpoint)
    run.wait(launcher, lambda: run.steps() >= 1)
    time.sleep(rng.uniform(0.5, 3.0))
    launcher.inject("launcher", "SIGTERM", launcher.find("launcher"))
    run.finish(launcher, 130)
    at_signal = run.tokens() - run.trained()
    run.resume()
    return run.lost() / max(at_signal, 1)


def killed(base: RunConfig, folder: Path, rng: random.Random) -> float:
    """Seconds of generation that a kill of all processes loses."""
    run = Run(base, folder, steps=8)
    launcher = run.start(max_staleness=1, checkpoint=dataclasses.replace(base.checkpoint, every=1))
    run.wait(launcher, lambda: run.steps() >= 1 and _worked_s(run) > JOURNAL_S)
    time.sleep(rng.uniform(0.0, JOURNAL_S / 2))
    launcher.inject(EVERYTHING, "kill", launcher.find(EVERYTHING))
    run.wait(launcher, launcher.is_over)
    per_s = sum(generated.per_s for generated in run.generated().values())
    if not checkpoint_steps(run.run_dir):
        raise RuntimeError("the run was killed before its first checkpoint")
    run.resume()
    return run.lost() / per_s


def worker_killed(base: RunConfig, folder: Path, rng: random.Random) -> float:
    """Seconds of its generation that the kill of a rollout worker loses."""
    run = Run(base, folder, steps=6)
    launcher = run.start(max_staleness=1)
    run.wait(launcher, lambda: run.steps() >= 1 and _worked_s(run) > JOURNAL_S)
    time.sleep(rng.uniform(0.0, JOURNAL_S / 2))
    [victim] = launcher.find("rollout-1")
    launcher.inject("rollout-1", "kill", [victim])
    per_s = run.generated()[victim.pid].per_s
    run.finish(launcher)
    return run.lost() / per_s


def _worked_s(run: Run) -> float:
    """Seconds for which the worker that began last has generated."""
    spans = [generated.last_s - generated.first_s for generated in run.generated().values()]
    return min(spans) if len(spans) > 1 else 0.0


@cache
def _prepared() -> tuple[RunConfig, Path]:
    folder = Path(tempfile.mkdtemp(prefix="flowrt-durable-"))
    COUNTER.install()
    warm_up()
    return prepare(folder, max_length=2048), folder


def prepared(step_s: float) -> tuple[RunConfig, Path]:
    """The configuration of all runs and their folder; ``step_s``: time that a decode step takes in addition."""
    COUNTER.step_s = step_s
    return _prepared()


def worst(values: Iterator[float]) -> float:
    return max(round(value, 4) for value in values)


def repeats_of(options: Options) -> range:
    return range(1 if options.quick else options.repeats)


def preempt(options: Options) -> Figures:
    """Tokens lost by a preemption with notice."""
    (base, folder), rng = prepared(STEP_S), random.Random(options.first_seed)
    metrics = {
        f"preempt_lost_fraction_bound_{bound}": worst(
            preempted(base, folder / f"preempt-{bound}-{number}", bound, rng) for number in repeats_of(options)
        )
        for bound in (BOUNDS[1:2] if options.quick else BOUNDS)
    }
    without = preempted(base, folder / "preempt-without", 1, rng, samples=False)
    lost = {"preempt_lost_fraction": max(metrics.values()), "preempt_lost_fraction_without": round(without, 4)}
    return metrics | lost


def killed_runs(options: Options) -> Figures:
    """Seconds of generation lost by a kill of all processes."""
    (base, folder), rng = prepared(STEP_S), random.Random(options.first_seed)
    return {"killed_lost_s": worst(killed(base, folder / f"killed-{n}", rng) for n in repeats_of(options))}


def killed_workers(options: Options) -> Figures:
    """Seconds of its generation lost by a kill of a rollout worker."""
    (base, folder), rng = prepared(STEP_S), random.Random(options.first_seed)
    return {"worker_lost_s": worst(worker_killed(base, folder / f"worker-{n}", rng) for n in repeats_of(options))}


def kills(options: Options) -> Figures:
    """Counts of trials with kills at random instants."""
    base, folder = prepared(0.0)
    COUNTER.folder = folder / "tokens"
    base = dataclasses.replace(
        base, rollout=dataclasses.replace(base.rollout, journal_s=0.1, max_new_tokens=40), max_staleness=1
    )
    trials = 3 if options.quick else options.trials
    counts = dict.fromkeys(("trials", "lost", "doubled", "hung", "wrong", "over_bound", "taken_over"), 0.0)
    plans = _kill_plans(options.first_seed)

    def next_trial(running: int) -> Trial | None:
        if counts["trials"] + running >= trials:
            return None
        plan = next(plans)
        return Trial(
            plan=plan, base=base, folder=folder / f"trial-{plan.seed}", deadline_s=DEADLINE_S, keys=folder / KEYS
        )

    for outcome in side_by_side(next_trial, options.at_once):
        if outcome.injected or outcome.is_bad:  # else the run ended before its fault
            counts["trials"] += 1
            print(outcome.line(int(counts["trials"])), flush=True)
            counts["lost"] += outcome.lost
            counts["doubled"] += outcome.doubled
            counts["hung"] += outcome.hung
            counts["wrong"] += bool(outcome.wrong)
            path = outcome.folder / "place" / "run" / "summary.json"
            summary = json.loads(path.read_text()) if path.is_file() else {}
            counts["over_bound"] += summary.get("staleness_max", 0) > base.max_staleness
            counts["taken_over"] += summary.get("kept", {}).get("tokens", 0) > 0
        if not outcome.is_bad:
            shutil.rmtree(outcome.folder)
    return counts


def _kill_plans(first_seed: int) -> Iterator[Plan]:
    seed = first_seed
    while True:
        plan = draw(seed, TRIAL_STEPS, WORKER_TIMEOUT_S, GROUPS)
        seed += 1
        if all(fault.kind == "kill" for fault in (*plan.faults, *plan.resume_faults)):
            yield plan


def ratio(options: Options) -> Figures:
    """Samples/s with a journal over samples/s without, of two runs at the same time; the median of the pairs.

    At the same time, because the speed of a shared machine changes by a tenth from one run to the next. Both are
    measured up to the end of the first.
    """
    base, folder = prepared(0.0)
    steps, rounds = (6, 1) if options.quick else (40, options.repeats)
    ratios: list[float] = []
    for number in range(rounds):
        runs: dict[bool, tuple[Run, LauncherProcess]] = {}
        for journals in (True, False) if number % 2 else (False, True):
            run = Run(base, folder / f"ratio-{number}-{journals}", steps=steps, journal_s=float(journals))
            samples = dataclasses.replace(base.checkpoint, samples=journals, every=1000)
            runs[journals] = run, run.start(max_staleness=1, checkpoint=samples)
        for run, launcher in runs.values():
            run.finish(launcher)
        closed_s = {journals: closed_steps(run.run_dir) for journals, (run, _) in runs.items()}
        until_s = min(times[-1] for times in closed_s.values())
        ratios.append(steps_per_s(closed_s[True], until_s) / steps_per_s(closed_s[False], until_s))
    return {"journal_ratio": statistics.median(ratios)}


def closed_steps(run_dir: Path) -> list[float]:
    """Seconds from the beginning of a run to the end of each of its steps, which have equally many samples."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [float(json.loads(line)["wall_s"]) for line in lines]


def steps_per_s(closed_s: Sequence[float], until_s: float) -> float:
    """Steps a second from the end of the first to that of the last before this time."""
    last = bisect(closed_s, until_s) - 1
    return last / (closed_s[last] - closed_s[0])


def shape(options: Options) -> Figures:
    """Size, times and memory of the journal of one worker."""
    words = [sys.executable, "-m", "durability.shape", "--rows", "16" if options.quick else "256"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parent, check=True)
    return {f"journal_{name}": round(value, 4) for name, value in json.loads(done.stdout).items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trials", type=int, default=300, help="runs with kills at random instants")
    parser.add_argument("--repeats", type=int, default=3, help="of every other measurement")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2, help="runs with kills side by side")


BENCH = Bench(
    about=__doc__,
    parts={
        "preempt": preempt,
        "killed": killed_runs,
        "worker": killed_workers,
        "ratio": ratio,
        "shape": shape,
        "kills": kills,
    },
    most=MOST,
    least=LEAST,
    add_options=add_options,
    machine=lambda options: {
        "repeats": len(repeats_of(options)),
        "first_seed": options.first_seed,
        "journal_s": JOURNAL_S,
    },
)


def main() -> int:
    code = BENCH.main()
    if not code and _prepared.cache_info().currsize:
        shutil.rmtree(_prepared()[1])
    return code


if __name__ == "__main__":
    sys.exit(main())
