"""States of the controller at instants of a run, for the page: replayed by a child of the watcher, never by the run.

    python -m flowrt.observability.page.replayer RUN

answers each line of its input, a time of the run's clock, with a line of JSON: the state, or after two seconds how far
the replay is, which goes on when it is asked again. The child has a deadline for each answer and a bound on its memory;
one that exceeds them is killed, and the page says so.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from flowrt.errors import FlowError, WaitExpired
from flowrt.observability.json_text import to_json
from flowrt.runtime.waits import BoundedElsewhere, blocking, locked, wait_until

SLICE_S = 2.0
"""A replay that takes longer is answered with how far it is."""
DEADLINE_S = 20.0
"""For an answer; the first needs the start of the child, too."""
IDLE_S = 60
"""A child that is not asked for this time ends: its replay may be large."""
KILL_S = 5.0
MAX_MEMORY_BYTES = 4 << 30
MAX_ANSWER_BYTES = 4 << 20
MAX_WORKERS = 256
"""Workers, waits and leases of an answer."""
NICENESS = 10


class Replayer:
    """The child of one run, started when it is asked. Of several instants that are asked for, the last is answered."""

    def __init__(self, run_dir: Path, deadline_s: float = DEADLINE_S) -> None:
        self._run_dir = run_dir
        self.deadline_s = deadline_s
        """Of each answer."""
        self._child: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._asked = 0

    async def status_at(self, at_s: float) -> dict[str, Any]:
        """The state at a time of the run's clock, as `observability.replay.status_at` has it, with bounded lists.

        A long replay answers ``{"reached_s": …}``, and goes on when it is asked for the same instant again.

        Raises FlowError if there is none, if it needs too long, or if a later request has taken the place of this one.
        """
        self._asked += 1
        number = self._asked
        async with locked(self._lock, BoundedElsewhere("the deadline of each answer"), "an earlier replay", "a replay"):
            if number != self._asked:
                raise FlowError("another instant was asked for since")
            is_answered = False
            try:
                found: dict[str, Any] = json.loads(await self._line(at_s))
                is_answered = True
            finally:
                if not is_answered:
                    await self.close()  # what it says later is the answer to nothing
        if "error" in found:
            raise FlowError(found["error"])
        return found

    async def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None
        child.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await wait_until(child.wait(), KILL_S, "the end of a replay", "the kernel")

    async def _line(self, at_s: float) -> bytes:
        more = f"flowrt replay {self._run_dir} --at {at_s:.3f} has no limit"
        try:
            line = await self._answer(at_s)
        except WaitExpired as error:
            raise FlowError(f"the replay has not answered within {self.deadline_s:g} s; {more}") from error
        except ValueError as error:
            raise FlowError(f"the state has more than {MAX_ANSWER_BYTES >> 20} MB; {more}") from error
        if not line.endswith(b"\n"):
            raise FlowError(f"the replay has failed, or needs more than {MAX_MEMORY_BYTES >> 30} GB of memory; {more}")
        return line

    async def _answer(self, at_s: float) -> bytes:
        """A line; not a whole one if the child dies."""
        was_there = self._child is not None
        child = self._child or await self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(ConnectionError):
            child.stdin.write(f"{at_s!r}\n".encode())
            await child.stdin.drain()
        line = await wait_until(child.stdout.readline(), self.deadline_s, "the state of an instant", "a replay")
        if line or not was_there:
            return line
        await self.close()  # it had ended, as it was not asked for long
        return await self._answer(at_s)

    async def _start(self) -> asyncio.subprocess.Process:
        words = ("-m", "flowrt.runtime.parent_death", __name__, str(self._run_dir))
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=MAX_ANSWER_BYTES,
            start_new_session=True,
        )
        return self._child


def bounded(status: dict[str, Any]) -> dict[str, Any]:
    """The status with at most 256 workers, waits, causes and leases, and how many of each are left out."""
    graph = status["graph"]
    cut = {name: status[name][:MAX_WORKERS] for name in ("causes", "leases")}
    listed = {name: dict(list(status[name].items())[:MAX_WORKERS]) for name in ("workers", "versions")}
    return {
        **{name: status[name] for name in _KEPT},
        **cut,
        **listed,
        "graph": {**graph, **{name: graph[name][:MAX_WORKERS] for name in ("workers", "waits")}},
        "more_waits": max(len(graph["waits"]) - MAX_WORKERS, 0),
        "more_causes": len(status["causes"]) - len(cut["causes"]),
        "more_leases": status["more_leases"] + len(status["leases"]) - len(cut["leases"]),
        "more_workers": len(status["workers"]) - len(listed["workers"]),
    }


_KEPT = (
    *("term", "events", "at_s", "step", "steps", "live_groups", "latest_version", "dropped", "cut_off", "vacancies"),
    *("guards", "ended", "counts", "slots"),
)


def _question() -> str:
    """The next line; this process is ended by the alarm if there is none for long."""
    signal.alarm(IDLE_S)
    line: str = blocking(sys.stdin.readline, float(IDLE_S), "a question", "flowrt watch")
    signal.alarm(0)
    return line


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    os.nice(NICENESS)
    from flowrt.observability.replay import Instants

    instants = Instants(Path(sys.argv[1]))
    while line := _question():
        try:
            answer = instants.status_at(float(line), SLICE_S)
            answer = answer if "reached_s" in answer else bounded(answer)
        except (FlowError, OSError) as error:
            answer = {"error": str(error)}
        sys.stdout.write(f"{to_json(answer)}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
