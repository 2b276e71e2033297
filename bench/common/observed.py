"""Statuses that an observer of a run was sent, compared with the states of the run's replay."""

import asyncio
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flowrt.controller.events import Tick, WorkerConnected
from flowrt.ids import OBSERVER
from flowrt.launcher.observer import address_of, fetch_status
from flowrt.observability.recording_reader import Recordings
from flowrt.observability.replay import Replay

COMPARED_KEYS = ("step", "live_groups", "workers", "versions", "latest_version", "dropped", "drained", "ended")
OBSERVER_SUFFIX = f"-{os.getpid()}"
"""Suffix of the names of this process's observers."""
STATUS_S = 5.0
Status = dict[str, Any]


def observe(run_dir: Path) -> Status:
    """The next status of a run. Raises FlowError or OSError if its controller does not answer."""
    return asyncio.run(fetch_status(address_of(run_dir), None, STATUS_S, "the run"))


def timeless(status: Status) -> Status:
    """A status without ages and without numbers that are not the core's."""
    graph = status["graph"]
    return {
        **{key: status[key] for key in COMPARED_KEYS},
        "waits": sorted((who, what) for who, what, _ in status["waits"]),
        "workers at": [
            (worker[0], worker[2], re.sub(r" \(a lease ends in .*\)", "", worker[4])) for worker in graph["workers"]
        ],
        "blocked": sorted((wait["who"], wait["what"], wait["blocked_on"]) for wait in graph["waits"]),
    }


def replayed(run_dir: Path) -> Iterator[Status]:
    """The status at each instant at which an observer of this process was sent one."""
    for recording in Recordings.of(run_dir).terms.values():
        replay, is_awaited = Replay(recording), False
        for done in replay.run():
            match done.event:
                case WorkerConnected(worker, role) if role == OBSERVER and worker.endswith(OBSERVER_SUFFIX):
                    is_awaited = True
                case Tick() if is_awaited:
                    is_awaited = False
                    yield replay.status()
                case _ if is_awaited and replay.core.ended is not None:  # all observers are notified at once
                    is_awaited = False
                    yield replay.status()


def not_replayed(run_dir: Path, statuses: Sequence[Status]) -> list[str]:
    """For each observed status that is no replayed state after the one before it, in what the closest state differs."""
    states = [timeless(json.loads(json.dumps(state))) for state in replayed(run_dir)]
    missing, position = [], 0
    for status in statuses:
        expected = timeless(status)
        index = next((at for at in range(position, len(states)) if states[at] == expected), None)
        if index is not None:
            position = index + 1
            continue
        keys = [[key for key in state if state[key] != expected[key]] for state in states[position:]]
        closest = min(keys, key=len, default=["no state is left"])
        missing.append(f"step {status['step']}: {', '.join(closest)}")
    return missing
