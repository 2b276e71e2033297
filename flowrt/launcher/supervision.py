"""Supervision of the processes of a run: which are restarted, which are killed, and when the run is ended.

- A worker that dies is restarted under its name (`Supervisor`), unless it failed twice for the same reason.
- A process that is alive but no longer part of the run is killed, so that it can be replaced (`HungProcessReaper`).
- A run that loses its trainer restarts from its newest checkpoint (`RestartPolicy`).
- Restarts are limited within a sliding window (`RestartWindow`): a run of a month may have many.
- A process that has no connection counts as alive while it uses CPU time (`cpu_time_watchdog`).
"""

import asyncio
import json
import os
import re
import signal
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any

from flowrt.controller.storage.event_log import END_TEXT, EVENTS
from flowrt.errors import EXIT_BAD_INPUT, EXIT_DISMISSED, EXIT_OK, VIOLATION, WaitExpired
from flowrt.launcher.processes import Child, Children
from flowrt.observability.tails import parse_line
from flowrt.recipes.config import SupervisorConfig
from flowrt.recipes.run_dir import checkpoint_steps
from flowrt.runtime.waits import BoundedElsewhere, LivenessTimeout, cancel_and_wait, pause, wait_until

SUMMARY = {"exit_code": int, "reason": str, "steps": int}
"""Keys and types that every summary.json has."""
FIRST_BACK_OFF_S = 1.0
MAX_BACK_OFF_S = 60.0
BACK_OFF_FACTOR = 4
WORKER_BACK_OFF_FACTOR = 2


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """The summary that the controller wrote at its end; None if it is running or was killed.

    A damaged file counts as missing: all of its content is in the ledger, and the next end of the run rewrites it.
    """
    try:
        summary: object = json.loads((run_dir / "summary.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(summary, dict) or not SUMMARY.keys() <= summary.keys():
        return None
    return summary if all(isinstance(summary[name], kind) for name, kind in SUMMARY.items()) else None


def recorded_end(run_dir: Path) -> dict[str, Any] | None:
    """How the run ended, with the keys `SUMMARY`: from its summary, or the event of a controller killed before it."""
    summary = read_summary(run_dir)
    if summary is not None:
        return summary
    end = None
    for line in _events(run_dir):
        if line.get("kind") in ("started", "resumed", "controller_restarted"):
            end = None
        elif line.get("kind") == "ended":
            end = line
    if end is None or not all(isinstance(end.get(name), int) for name in ("code", "step")):
        return None
    return {"exit_code": end["code"], "reason": str(end.get("text")).removeprefix(END_TEXT), "steps": end["step"]}


def _events(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of events.jsonl that can be read."""
    try:
        lines = (run_dir / EVENTS).read_bytes().splitlines()
    except OSError:
        return []
    return [line for line in map(parse_line, lines) if line]


class RestartWindow:
    """Counts restarts within a sliding window: one that is older than the window no longer counts."""

    def __init__(self, most: int, window_s: float, clock: Callable[[], float] = monotonic) -> None:
        """Allow ``most`` restarts within ``window_s`` seconds of the clock."""
        self.most = most
        self._window_s = window_s
        self._clock = clock
        self._starts: deque[float] = deque()

    def count(self) -> int:
        """Restarts in the window that ends now."""
        while self._starts and self._clock() - self._starts[0] > self._window_s:
            self._starts.popleft()
        return len(self._starts)

    def take(self, first_s: float, factor: float) -> float | None:
        """Count a restart; returns the delay before it, or None, without counting it, if the window has ``most``.

        Args:
            first_s: delay of the only restart in a window, in seconds.
            factor: of each further delay to the one before, up to `MAX_BACK_OFF_S`: a process that cannot start must
                not use up the CPU time of others.
        """
        before = self.count()
        if before >= self.most:
            return None
        self._starts.append(self._clock())
        delay_s = first_s
        for _ in range(before):
            delay_s = min(delay_s * factor, max(first_s, MAX_BACK_OFF_S))
        return delay_s


class RestartPolicy:
    """Decides whether a run that lost its trainer, and with it its optimiser state, restarts as a whole."""

    def __init__(
        self, run_dir: Path, max_restarts: int, window_s: float, clock: Callable[[], float] = monotonic
    ) -> None:
        """Allow ``max_restarts`` restarts within ``window_s`` seconds of the clock."""
        self._run_dir = run_dir
        self._restarts = RestartWindow(max_restarts, window_s, clock)
        self._has_lacked_summary = False
        self._first_step = 0

    def begin(self) -> None:
        """Note a start of the run from its newest checkpoint; not to be called when a controller recovers the run."""
        self._first_step = max(checkpoint_steps(self._run_dir), default=0)

    def back_off_s(self, trainer_code: int | None) -> float | None:
        """Delay in seconds before the restart of a run that has ended; None: it is not restarted. Counts the restart.

        ``trainer_code`` is the trainer's exit code, None if it has not ended: it is stopped, or disconnected. A run
        whose trainer exited with an error before it completed a step is not restarted: it would fail again.
        """
        end = recorded_end(self._run_dir)
        if end is None or end["exit_code"] == 0 or not end["reason"].startswith("trainer"):
            return None
        killed = trainer_code is None or trainer_code < 0
        if not (killed or end["steps"] > self._first_step):
            return None
        return self._restarts.take(FIRST_BACK_OFF_S, BACK_OFF_FACTOR)

    def lacks_only_summary(self, steps: int) -> bool:
        """Whether only the summary is missing and all ``steps`` are saved, in the first call of which this is true."""
        saved = max(checkpoint_steps(self._run_dir), default=0)
        if read_summary(self._run_dir) is not None or saved < steps:
            return False
        is_first, self._has_lacked_summary = not self._has_lacked_summary, True
        return is_first

    def reason(self) -> str:
        """Why the run ended, as its controller recorded it."""
        end = recorded_end(self._run_dir)
        return "the controller was killed" if end is None else str(end["reason"])

    def describe(self, back_off_s: float) -> str:
        """A description of the restart for the terminal."""
        step = max(checkpoint_steps(self._run_dir), default=0)
        count = f"restart {self._restarts.count()} of {self._restarts.most}"
        return f"{count if self._restarts.count() else 'restart'} in {back_off_s:.0f} s, from step {step}"


COMPUTATION = BoundedElsewhere("the end of the computation, which waits for no other process")
POLL_S = 0.5
CANCEL_S = 1.0


async def cpu_time_watchdog(child: Child, timeout_s: float) -> int:
    """Wait for a process that has no connection to the controller; returns its exit code.

    Raises WaitExpired if it used no CPU time for ``timeout_s`` seconds. Without /proc there is no timeout.
    """
    if _cpu_ticks(child.process.pid) is None:
        return await child.wait_exit(COMPUTATION)
    liveness = LivenessTimeout(timeout_s)
    poll = asyncio.create_task(_renew_while_busy(child.process.pid, liveness))
    try:
        return await child.wait_exit(liveness)
    except WaitExpired as expired:
        raise WaitExpired(
            f"{child.name} has used no CPU time for {timeout_s:.0f} s: it is stopped, or waits for a disk that does "
            f"not answer; see its log {child.log}"
        ) from expired
    finally:
        await cancel_and_wait({poll}, CANCEL_S)


async def _renew_while_busy(pid: int, liveness: LivenessTimeout) -> None:
    before = _cpu_ticks(pid)
    while True:
        await pause(POLL_S)
        now = _cpu_ticks(pid)
        if now != before:
            liveness.renew()
        before = now


def _cpu_ticks(pid: int) -> int | None:
    """CPU time of a process so far, in clock ticks; None without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])


class HungProcessReaper:
    """Kills processes that are alive, stopped or hung, although their workers have left the run or never joined it."""

    def __init__(
        self, children: Children, timeout_s: float, connect_timeout_s: float, report: Callable[[str], None]
    ) -> None:
        """Set the time limits.

        Args:
            children: the processes.
            timeout_s: seconds that a process may be alive while its workers are not in the run.
            connect_timeout_s: additional seconds before its workers join for the first time.
            report: prints a line for each process that is killed.
        """
        self._children = children
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._report = report
        self._deadline_s: dict[tuple[str, int], float] = {}  # by name and pid
        self._joined: set[tuple[str, int]] = set()

    def extend(self, for_s: float) -> None:
        """Set every deadline to ``for_s`` plus the timeout from now: workers have to find a restarted controller."""
        self._deadline_s = dict.fromkeys(self._deadline_s, monotonic() + for_s + self._timeout_s)

    def postpone(self, seconds: float) -> None:
        """Postpone every deadline by a time in which no status could come or be read."""
        self._deadline_s = {key: deadline_s + seconds for key, deadline_s in self._deadline_s.items()}

    def check(
        self, workers: Collection[str], local: Mapping[str, Collection[str]], critical: Collection[str] = ()
    ) -> None:
        """Kill the processes whose workers have been absent for too long.

        Args:
            workers: names of the workers in the run now.
            local: names of the workers of each process, by the name of the process; a torchrun has several, and is
                absent while any of them is.
            critical: processes that are only killed before they join; when they leave, the run restarts as a whole.
        """
        now = monotonic()
        deadline_s = {}
        for child in self._children.running():
            key = (child.name, child.process.pid)
            absent = [name for name in local.get(child.name, ()) if name not in workers]
            if child.name in local and not absent:
                deadline_s[key] = now + self._timeout_s
                self._joined.add(key)
            elif absent and not (child.name in critical and key in self._joined):
                deadline_s[key] = self._deadline_s.get(key, now + self._connect_timeout_s + self._timeout_s)
                if now > deadline_s[key]:
                    event = "left the run" if key in self._joined else "never joined the run"
                    self._report(f"{', '.join(absent)} {event}, but its process is alive: killing it")
                    self._children.signal_group(child, signal.SIGKILL)
        self._deadline_s = deadline_s
        self._joined &= deadline_s.keys()


RUN = BoundedElsewhere("the end of the run")
LATE_STATUSES = 20
"""The controller sends two statuses a second, and notices within seconds that a connection has closed."""
NUMBER = re.compile(r"0x[0-9a-f]+|[0-9]+")


def present(status: Mapping[str, Any]) -> Collection[str]:
    """The workers in the run, of those that this launcher follows; those listed, in a status without "followed"."""
    workers: Collection[str] = status.get("followed", {"present": status["workers"]})["present"]
    return workers


class Vacancies:
    """Decides from the statuses of a run which workers to replace after they left, and which had results."""

    def __init__(
        self,
        roles: Mapping[str, str],
        is_preempted: Callable[[], bool],
        workers: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> None:
        """Make it without a status.

        Args:
            roles: by name of the process.
            is_preempted: whether the launcher was told to end the run.
            workers: names of the workers of a process, by its name; by default its only worker has its name.
        """
        self._workers = workers
        self._roles = roles
        self._is_preempted = is_preempted
        self._has_ended = False
        self._with_results: set[str] = set()
        self._next: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()

    def update(self, status: Mapping[str, Any]) -> None:
        """Process a new status of the run."""
        self._has_ended = status["ended"] is not None
        self._with_results.update(status.get("followed", status)["with_results"])
        waiting = self._next
        self._next = asyncio.get_running_loop().create_future()
        waiting.set_result(status)

    async def wait_left(self, name: str, on_late: Callable[[], None]) -> None:
        """Wait for a status without the workers of this process, which has ended.

        They may live on: an ssh that breaks leaves the process that it has started. A replacement would find their
        names taken, and they do their work. ``on_late`` is called when they have been present for `LATE_STATUSES`.
        """
        statuses = 0
        while not (self._has_ended or self._is_preempted()):
            next_status = asyncio.shield(self._next)
            status = await wait_until(next_status, RUN, "the next status of the run", "the controller")
            if not any(worker in present(status) for worker in self._workers.get(name, (name,))):
                return
            statuses += 1
            if statuses == LATE_STATUSES:
                on_late()

    async def is_missed(self, name: str) -> bool:
        """Whether a worker that left in order has to be replaced; waits for the next status.

        True if the run is active, and no operator drained this worker or its role is vacant now.
        """
        if self._has_ended or self._is_preempted():
            return False
        next_status = asyncio.shield(self._next)
        status = await wait_until(next_status, RUN, "the next status of the run", "the controller")
        if self._has_ended or self._is_preempted():
            return False
        return name not in status.get("followed", status)["drained"] or self._roles[name] in status["vacancies"]

    def take_results(self, name: str) -> bool:
        """Whether the worker has had results (opened prompts, committed samples) since the last call."""
        had_results = name in self._with_results
        self._with_results.discard(name)
        return had_results


def has_joined(run_dir: Path, role: str) -> bool:
    """Whether a worker of this role has joined since the run was started or resumed, by events.jsonl.

    Also True if a step was closed since then, or if the file cannot be read.
    """
    first, joined = None, False
    if not os.access(run_dir / EVENTS, os.R_OK):
        return True
    for line in _events(run_dir):
        if line.get("kind") in ("started", "resumed"):
            first, joined = line.get("step"), False
        joined = joined or line.get("role") == role or line.get("step") != first
    return joined


class Supervisor:
    """Restarts replaceable workers that failed or left."""

    def __init__(
        self,
        children: Children,
        config: SupervisorConfig,
        report: Callable[[str], None],
        *,
        is_missed: Callable[[str], Awaitable[bool]],
        take_results: Callable[[str], bool],
        wait_left: Callable[[str, Callable[[], None]], Awaitable[None]],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Set the limits of restarts.

        Args:
            children: the processes.
            config: limits and delays.
            report: prints a line for each restart.
            is_missed: whether the run needs a replacement of the worker of this name, which left in order.
            take_results: whether the worker of this name had results since the last call.
            wait_left: waits until the worker of this name is not in the run, and makes the call if that takes long.
            clock: for the window of restarts, in seconds.
        """
        self._wait_left = wait_left
        self._is_missed = is_missed
        self._take_results = take_results
        self._children = children
        self._config = config
        self._report = report
        self._restarts = defaultdict[str, RestartWindow](
            lambda: RestartWindow(config.max_worker_restarts, config.window_s, clock)
        )

    async def supervise(self, child: Child, words: Sequence[str]) -> Child:
        """Restart a worker whenever it fails, or leaves in order while the run needs it; returns the last process.

        The worker is not restarted after bad input, after the same failure twice without a result in between (both
        would happen again), or after too many restarts.
        """
        failure = ""
        while True:
            code = await child.wait_exit(RUN)
            before = failure
            failure = _failure(child, code)
            if code == EXIT_BAD_INPUT or (code == EXIT_OK and not await self._is_missed(child.name)):
                return child
            had_results = self._take_results(child.name)
            if failure and failure == before and not had_results:
                self._report(f"{child.exit_description()} for the same reason as before: not restarting it")
                return child
            await self._wait_left(child.name, partial(self._report_remaining, child))
            if not await self.may_restart(child):
                return child
            child = await self._children.start(child.name, words)

    def _report_remaining(self, child: Child) -> None:
        self._report(
            f"{child.exit_description()}, but its worker is in the run: perhaps ssh or srun has ended and the worker "
            "has not; it works on, and is replaced when it leaves"
        )

    async def may_restart(self, child: Child) -> bool:
        """Wait for the back-off delay and return True; return False at once after too many restarts of this process."""
        delay_s = self._restarts[child.name].take(self._config.backoff_s, WORKER_BACK_OFF_FACTOR)
        if delay_s is None:
            return False
        self._report(f"{child.exit_description()}: restarting in {delay_s:.1f} s")
        await pause(delay_s)
        return True


def _failure(child: Child, code: int) -> str:
    """Exit code and last error of a failed worker, with all numbers as 0, to compare failures.

    Empty if the worker succeeded, was killed, or was dismissed without a protocol violation.
    """
    error = child.last_error() if code > EXIT_OK else ""
    if code == EXIT_DISMISSED and VIOLATION not in error:
        return ""
    return f"{code} {re.sub(NUMBER, '0', error)}" if error else ""
