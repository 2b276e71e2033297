"""A synthetic run directory in a controller's format: metrics, events, timeline and attribution."""

import gzip
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

START_UNIX_S = 1_700_000_000.0


def metrics(steps: Iterable[int], seed: int = 0) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; another seed gives other numbers for the same steps."""
    lines = []
    for step in steps:
        draw = random.Random(f"{seed} {step}")
        lines.append(
            {
                "step": step,
                "wall_s": round(1.0 + step + 0.001 * seed, 4),
                "reward": round(draw.random(), 6),
                "reward/exact": round(draw.random(), 6),
                "samples": 128,
                "tokens": draw.randrange(1000, 9000),
                "samples_per_s": round(draw.uniform(100, 500), 3),
                "staleness_mean": round(draw.random(), 4),
                "staleness_max": draw.randrange(3),
                "grad_norm": float(f"{draw.expovariate(1):.6g}"),
                "lr": 2e-4,
                **({"eval/held_out/avg@1": round(draw.random(), 6)} if step % 5 == 0 else {}),
            }
        )
    return lines


def spans(steps: int) -> list[dict[str, Any]]:
    """Spans and waits of three workers; a swap of rollout-0 overlaps its generation."""
    lines: list[dict[str, Any]] = []
    for step in range(steps):
        for number in range(2):
            worker, at = {"worker": f"rollout-{number}", "role": "rollout"}, step + 0.1 * number
            lines.append({**worker, "kind": "generate", "start_s": at, "end_s": at + 0.613512345, "rows": 3.5})
            if number == 0:
                lines.append({**worker, "kind": "swap", "start_s": at + 0.5, "end_s": at + 0.55})
            lines.append({**worker, "wait": "gate", "root": "trainer", "start_s": at + 0.613512345, "end_s": at + 0.9})
        trainer = {"worker": "trainer", "role": "trainer"}
        lines.append({**trainer, "kind": "train", "start_s": step + 0.3, "end_s": step + 0.8, "worked_s": 0.45})
        lines.append({**trainer, "kind": "step", "start_s": step + 0.8, "end_s": step + 0.95})
    return lines


def event(at_s: float, kind: str, text: str, step: int = 0, **more: Any) -> dict[str, Any]:
    return {"wall_s": at_s, "unix_s": START_UNIX_S + at_s, "term": 1, "step": step, "kind": kind, "text": text, **more}


def events(steps: int) -> list[dict[str, Any]]:
    joined = [
        event(0.0, "joined", f"{worker} has joined", worker=worker, role=worker.partition("-")[0], host="h1")
        for worker in ("rollout-0", "rollout-1", "trainer")
    ]
    published = [
        event(step + 0.96, "published", f"version {step + 1}", step + 1, worker="trainer", version=step + 1)
        for step in range(steps)
    ]
    guard = event(steps + 0.1, "guard", 'a guard fires: "</script>"', steps)
    return [event(0.0, "started", "a run has started"), *joined, *published, guard]


def shares(steps: Iterable[int]) -> list[dict[str, Any]]:
    """Lines of attribution.jsonl."""
    seconds = {"busy": 1.2, "samples": 0.1, "gate": 0.6, "weights": 0.0, "update": 0.1}
    rollout = {"workers": 2, **seconds, "save": 0.0, "away": 0.0, "other": 0.0}
    return [
        {
            "step": step,
            "from_s": float(step),
            "to_s": step + 1.0,
            "roles": {"rollout": rollout},
            "roots": [["rollout", "gate", "trainer", 0.6]],
            "worst": {"gate": [["rollout-0", 0.4], ["rollout-1", 0.2]]},
        }
        for step in steps
    ]


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(run_dir: Path, steps: int = 12) -> Path:
    """Write the directory of a run that has ended."""
    (run_dir / "timeline").mkdir(parents=True)
    write_lines(run_dir / "metrics.jsonl", metrics(range(steps)))
    write_lines(run_dir / "events.jsonl", events(steps))
    write_lines(run_dir / "attribution.jsonl", shares(range(steps)))
    with gzip.open(run_dir / "timeline" / "0000.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in spans(steps))
    (run_dir / "summary.json").write_text('{"exit_code": 0, "reason": "the run is complete"}')
    return run_dir
