"""Recordings of the controller's core: whether they replay, and what they cost.

- replays_wrong: of 200 simulated runs with all kinds of faults, each replayed in three processes of other hash seeds
  (10 runs with --quick), those whose commands or states differ; replayed_states: number of states that were compared;
- observed_wrong: of at least 1,000 statuses that observers of real runs were sent (5 with --quick), those that the
  replay of the run lacks; a rollout worker and the controller of each of the observed_runs are killed at random steps;
- recorder_bytes, recorder_bytes_simulated: bytes of recording an event, of the default job and of those runs;
- recorder_ratio: samples/s of the default job over that without recording, by turns (median of 5; one with --quick);
- core_events_per_s, core_recorded_ratio: events of the default job that the core handles in a second of processor time,
  messages decoded and encoded as by the server, and the same with a recording, its thread included, over that without
  (median of 9, by turns).
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
from common.harness import ROOT, by_turns, median_ratio
from common.jobs import FLOWRT, Job, run_job
from common.observed import Status, not_replayed, observe

from flowrt.controller.events import MessageReceived, Send
from flowrt.controller.storage.recording_format import read_event
from flowrt.controller.storage.recording_writer import EventRecording
from flowrt.errors import FlowError
from flowrt.observability.recording_reader import Recordings, TermRecording
from flowrt.protocol.codec import encode
from flowrt.recipes import grpo
from flowrt.recipes.config_io import from_toml

BOUNDS: Mapping[str, float] = {
    "replays_wrong": 0.0,
    "observed_wrong": 0.0,
    "recorder_bytes": 20.0,
    "recorder_bytes_simulated": 20.0,
}
FLOORS: Mapping[str, float] = {"recorder_ratio": 0.99, "core_recorded_ratio": 0.97}
HASH_SEEDS = ("0", "1", "2")
RUNS, QUICK_RUNS = 200, 10
RUNS_TIMEOUT_S = 3600.0
TURNS, CORE_TURNS = 5, 9
LIMIT_BYTES = 1 << 30
INSTANTS, AT_A_TIME, STEPS, POLL_S, UNWRITTEN = 1000, 3, 300, 0.1, 3
"""Observed statuses, runs at a time, their steps, seconds between tries, last statuses before a kill that are left out.
"""
SMALL = (
    *("--steps", str(STEPS), "--prompts-per-step", "4", "--group-size", "4", "--rollout.max-running-requests", "8"),
    *("--rollout.max-new-tokens", "8", "--sft.steps", "20", "--sft.answer-only-steps", "0"),
    *("--data.eval-prompts", "0", "--supervisor.backoff-s", "0.1"),
)


def measure(quick: bool) -> dict[str, float]:
    """All figures of this row."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        return {
            **_simulated(place, QUICK_RUNS if quick else RUNS),
            **_observed(place, 5 if quick else INSTANTS),
            **_job(place, quick),
        }


def _bytes_and_events(run_dirs: Iterator[Path]) -> tuple[int, int]:
    size, events = 0, 0
    for run_dir in run_dirs:
        for recording in Recordings.of(run_dir).terms.values():
            size += sum(path.stat().st_size for path in recording.paths)
            events += recording.extent().events
    return size, events


# ---- simulated runs


def _simulated(place: Path, runs: int) -> dict[str, float]:
    lines = [json.loads(line) for line in _child("record_child", [str(runs), str(place / "simulated")]).splitlines()]
    wrong, states = 0, 0
    questions = "".join(f"{line['run_dir']}\n" for line in lines)
    for seed in HASH_SEEDS:
        answers = [json.loads(line) for line in _child("replay_child", [], questions, seed).splitlines()]
        for line, answer in zip(lines, answers, strict=True):
            wrong += answer != line["states"]
            states += len(answer)
    size, events = _bytes_and_events(Path(line["run_dir"]) for line in lines)
    return {
        "replays_wrong": float(wrong),
        "replayed_states": float(states),
        "recorder_bytes_simulated": size / events,
    }


# ---- real runs with kills


def _observed(place: Path, instants: int) -> dict[str, float]:
    """Statuses of real runs, of which a worker and the controller are killed, that their replays lack."""
    seen, lacking, runs = 0, 0, 0
    at_a_time = 1 if instants < INSTANTS else AT_A_TIME
    with ThreadPoolExecutor(at_a_time) as threads:
        while seen < instants:
            folders = [place / f"real-{runs + index}" for index in range(at_a_time)]
            for run_dir, statuses in zip(folders, threads.map(_watched_run, folders), strict=True):
                missing = not_replayed(run_dir, statuses)
                sys.stderr.write("".join(f"{run_dir.name}: not in its replay: {status}\n" for status in missing))
                seen, lacking, runs = seen + len(statuses), lacking + len(missing), runs + 1
    return {"observed_runs": float(runs), "observed_instants": float(seen), "observed_wrong": float(lacking)}


def _watched_run(run_dir: Path) -> list[Status]:
    """Statuses of a run until its end; a rollout worker is killed, then the controller.

    Raises RuntimeError if the run fails, or a process that is to be killed is not there.
    """
    draw = random.Random(run_dir.name)
    kills = sorted(draw.sample(range(STEPS // 20, STEPS // 2), 2))
    victims = ["flowrt.roles.rollout", "flowrt.launcher.controller_main"]
    words = [*FLOWRT, "run", "--run-dir", str(run_dir), *SMALL]
    statuses: list[Status] = []
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            try:
                statuses.append(observe(run_dir))
            except (FlowError, OSError):  # it starts, its controller restarts, or it has ended
                time.sleep(POLL_S)
                continue
            if victims and statuses[-1]["step"] >= kills[0]:
                del kills[0]
                victim = victims.pop(0)
                if not victims:
                    del statuses[-UNWRITTEN:]  # a killed controller has not written the events since its last tick
                running = psutil.Process(process.pid).children(recursive=True)
                worker = next((child for child in running if victim in " ".join(child.cmdline())), None)
                if worker is None:
                    raise RuntimeError(f"{run_dir.name} has no process {victim} in step {statuses[-1]['step']}")
                worker.kill()
    if process.returncode or victims:
        raise RuntimeError(f"`{' '.join(words)}` ended with {process.returncode}; not killed: {victims}")
    return statuses


def _child(module: str, words: list[str], questions: str = "", hash_seed: str = "random") -> str:
    """The standard output of a script of the property tests."""
    return subprocess.run(
        [sys.executable, "-m", f"tests.property.{module}", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        input=questions,
        stdout=subprocess.PIPE,
        text=True,
        timeout=RUNS_TIMEOUT_S,
        check=True,
    ).stdout


# ---- the default job


def _job(place: Path, quick: bool) -> dict[str, float]:
    steps, turns = (20, 1) if quick else (120, TURNS)

    def job(limit_mb: int, turn: int) -> Job:
        words = ("--recorder.mb", limit_mb, "--seed", turn, "--steps", steps)
        return run_job(place / f"{turn}-{limit_mb}", *words)

    jobs = by_turns({"off": partial(job, 0), "on": partial(job, 1024)}, turns)
    off, on = ([run.samples_per_s for run in jobs[side]] for side in ("off", "on"))
    size, events = _bytes_and_events(run.run_dir for run in jobs["on"])
    return {
        "recorder_bytes": size / events,
        "recorder_ratio": median_ratio(on, off),
        **_core(place, Recordings.of(jobs["on"][0].run_dir).of_term(1)),
    }


Recorded = tuple[int, str, bytes, float]
"""Kind, sender, bytes and time of an event."""


def _core(place: Path, recording: TermRecording) -> dict[str, float]:
    events: list[Recorded] = []
    names: list[str] = []
    for block in recording.blocks():
        names += block.names
        senders = [names[worker] if names else "" for worker in block.workers]
        events += zip(block.kinds, senders, block.data, block.times, strict=True)
    sides = {
        "off": lambda _: _events_per_s(recording, events, None),
        "on": lambda turn: _events_per_s(recording, events, place / f"core-{turn}"),
    }
    rates = by_turns(sides, CORE_TURNS)
    ratio = median_ratio(rates["on"], rates["off"])
    return {"core_events_per_s": statistics.median(rates["off"]), "core_recorded_ratio": ratio}


def _events_per_s(recording: TermRecording, events: list[Recorded], run_dir: Path | None) -> float:
    """Events a second of this process, with a recording in ``run_dir`` or without one."""
    inputs = recording.header.inputs
    core = grpo.core(from_toml(inputs.config), inputs)
    recorder = None
    if run_dir is not None:
        run_dir.mkdir()
        recorder = EventRecording(run_dir, inputs, LIMIT_BYTES)
        recorder.begin(recording.header.start_s)
    start_s = time.process_time()
    for kind, worker, data, now in events:
        event = read_event(kind, worker, data)
        commands = core.handle(event, now)
        encoded = [encode(command.message) if type(command) is Send else b"" for command in commands]
        if recorder is not None:
            recorder.add(event, now, commands, encoded, data if type(event) is MessageReceived else b"")
    if recorder is not None:
        recorder.close()
    return len(events) / (time.process_time() - start_s)
