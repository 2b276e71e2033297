"""States of the controller at times of a run, for the page: replayed by a child process of ``flowrt watch``.

    python -m flowrt.observability.page.replayer RUN

The child reads lines with a time in seconds of the run clock. It answers each with a line of JSON: the state, or after
two seconds the time that the replay has reached; the same request then continues the replay. Each answer has a
deadline, and the child a memory limit. A child that exceeds either of them is killed, and the page reports it.
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
from flowrt.runtime.interpreter import RUN_MODULE
from flowrt.runtime.waits import BoundedElsewhere, blocking, locked, wait_until

SLICE_S = 2.0
"""Seconds of replay for each request; a longer replay is answered with the time that it has reached."""
DEADLINE_S = 20.0
"""Deadline of an answer, in seconds; that of the first one includes the start of the child."""
IDLE_S = 60
"""Seconds without a request after which the child ends, because its replay may be large."""
KILL_S = 5.0
MAX_MEMORY_BYTES = 4 << 30
MAX_ANSWER_BYTES = 4 << 20
MAX_WORKERS = 256
"""Maximum number of workers, of versions, of waits, of causes and of leases in an answer."""
NICENESS = 10


class Replayer:
    """The child process of one run, started by the first request.

    Of the requests that arrive while another one is being answered, only the last is answered.
    """

    def __init__(self, run_dir: Path, deadline_s: float = DEADLINE_S) -> None:
        self._run_dir = run_dir
        self.deadline_s = deadline_s
        """Deadline of each answer, in seconds."""
        self._child: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._asked = 0

    async def status_at(self, at_s: float) -> dict[str, Any]:
        """The state at a time of the run clock (seconds), as `observability.replay.status_at`, with bounded lists.

        If the replay takes longer than `SLICE_S`, returns ``{"reached_s": SECONDS}``; a call with the same time
        continues it.

        Raises FlowError if there is no state of that time, if the answer exceeds its deadline or its size, if the child
        dies, or if a later call supersedes this one.
        """
        self._asked += 1
        number = self._asked
        async with locked(self._lock, BoundedElsewhere("the deadline of each answer"), "an earlier replay", "a replay"):
            if number != self._asked:
                raise FlowError("another instant was asked for since")
            is_answered = False
            try:
                status: dict[str, Any] = json.loads(await self._line(at_s))
                is_answered = True
            finally:
                if not is_answered:
                    await self.close()  # a late answer would be read as that of the next request
        if "error" in status:
            raise FlowError(status["error"])
        return status

    async def close(self) -> None:
        """Kill the child, if there is one."""
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
        """A line of the child's output; incomplete if the child dies."""
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
        await self.close()  # the child had ended after `IDLE_S` without a request
        return await self._answer(at_s)

    async def _start(self) -> asyncio.subprocess.Process:
        words = (RUN_MODULE, "flowrt.runtime.parent_death", __name__, str(self._run_dir))
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
    """The status with lists of at most `MAX_WORKERS` entries.

    ``more_waits``, ``more_causes``, ``more_leases`` and ``more_workers`` are the numbers of entries left out.
    """
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
    """The next line of the input; without one for `IDLE_S`, SIGALRM ends this process."""
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
