"""The child processes that call reward functions: how they are started, replaced and ended.

`flowrt.rewards.reaper` is the process of a child; `flowrt.rewards.child` documents the messages.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from flowrt.errors import ConfigError, WaitExpired
from flowrt.rewards.call_forms import CallForm
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.reward_names import RewardFunction, TaskReward
from flowrt.rewards.reward_process import BLOCKED_ON, GRACE_S, WROTE, RewardProcess
from flowrt.runtime.interpreter import RUN_MODULE
from flowrt.runtime.waits import cancel_and_wait, wait_all, wait_until

log = logging.getLogger(__name__)
MAX_CALLS = 10_000
"""Number of calls after which a child is replaced."""
MAX_SPARES = 2
"""Maximum number of spare children once one has been lost: starting a child takes as long as many calls."""
PROGRESS_AFTER_S = 3.0
"""Seconds after which a wait for loading is reported as progress."""
FIX = "correct it, and start or resume the run"
LOADING = "while the file was loaded"


class RewardChildren:
    """Starts children that load all functions, and ends them; each is used by one task at a time."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        options: RewardOptions,
        output: int | None = None,
        task: TaskReward | None = None,
        model: str = "",
    ) -> None:
        """Start no process yet. Arguments: as of `flowrt.rewards.pool.RewardPool`."""
        self._task = task
        self._model = model
        self._functions = tuple(functions)
        self._options = options
        self._output = output
        self.forms: list[CallForm] = []
        """How each function is called; empty until a child has loaded them."""
        self._loading: asyncio.Task[None] | None = None
        self._spares: deque[asyncio.Task[RewardProcess]] = deque()
        self._processes: set[RewardProcess] = set()
        self._endings: set[asyncio.Task[object]] = set()
        """Tasks that end children."""
        self.idle_ends = 0
        """Number of consecutive children that have ended outside of a call."""
        self._has_lost = False
        self._is_closed = False

    async def load(self, progress: Callable[[str], None]) -> None:
        """Start a child, and wait until it has loaded the functions, unless one has been started before.

        Raises ConfigError if a function cannot be loaded. ``progress`` receives notes on long waits.
        """
        if self._loading is None:
            self._loading = asyncio.create_task(self._load(progress))
            self._loading.add_done_callback(_retrieve_error)
        limit_s = self._options.load_timeout_s + 3 * GRACE_S
        await wait_until(asyncio.shield(self._loading), limit_s, "a child", BLOCKED_ON)

    async def _load(self, progress: Callable[[str], None]) -> None:
        self._spares.append(asyncio.create_task(self._start(progress)))
        deadline_s = self._options.load_timeout_s + 2 * GRACE_S
        await wait_until(asyncio.shield(self._spares[-1]), deadline_s, "a child", BLOCKED_ON)

    def form(self, function: int) -> CallForm:
        """How a function is called. `load` has been called."""
        return self.forms[function]

    def note_call(self, process: RewardProcess) -> bool:
        """Count a call that a child has made; returns whether it should be replaced."""
        self.idle_ends = 0
        process.calls += 1
        return process.calls >= MAX_CALLS

    async def next(self) -> RewardProcess:
        """A child that has loaded the functions: a spare one, or a new one. Raises ConfigError if it cannot."""
        if not self._spares:
            return await self._start(log.info)
        spare = self._spares.popleft()
        self._prepare()
        return await wait_until(spare, self._options.load_timeout_s + 2 * GRACE_S, "a child", BLOCKED_ON)

    def replace(self, process: RewardProcess) -> None:
        """End a child that has no call; the next call starts another child."""
        self.in_background(self.end(process))

    async def end(self, process: RewardProcess, *, hung: bool = False) -> dict[str, Any]:
        """End a child, and start a spare one; returns the report of its reaper."""
        self._processes.discard(process)
        self._has_lost = True
        self._prepare()
        return await process.end(hung=hung)

    def in_background(self, work: Coroutine[Any, Any, object]) -> None:
        """Run ``work``, which ends a child, as a task while the next child makes calls."""
        task = asyncio.create_task(work)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def close(self, users: Iterable[asyncio.Task[None]]) -> None:
        """Cancel the tasks that use children, and end all children and the processes that they have started."""
        self._is_closed = True
        loading = [] if self._loading is None else [self._loading]
        await cancel_and_wait([*users, *self._spares, *loading], GRACE_S)
        with contextlib.suppress(WaitExpired):
            await wait_all(list(self._endings), 4 * GRACE_S, "the end of reward processes", "their reapers")
        for process in list(self._processes):
            await self.end(process)

    def _prepare(self) -> None:
        """Start spare children, if a child has been lost before."""
        most = min(MAX_SPARES, self._options.workers) if self._has_lost and not self._is_closed else 0
        while len(self._spares) < most:
            spare = asyncio.create_task(self._start(log.info))
            spare.add_done_callback(_retrieve_error)
            self._spares.append(spare)

    async def _start(self, progress: Callable[[str], None]) -> RewardProcess:
        """Start a child, and wait until it has loaded the functions. Raises ConfigError if one cannot be loaded."""
        options = self._options
        process = self._spawn()
        self._processes.add(process)
        try:
            messages = await self._loaded(process, progress)
        except WaitExpired:
            messages = []
            ended = await self._drop(process, hung=True)
            what = f"it did not return in {options.load_timeout_s:g} s"
        else:
            if messages and messages[0][0] not in ("ready", "unusable"):
                process.fault, messages = WROTE, []
            ended = {} if messages else await self._drop(process)
            what = process.fault or described_end(ended)
        if messages and messages[0][0] == "unusable":
            _, index, what, line = messages[0]
            await self._drop(process)
            raise ConfigError(f"{self._functions[index].at(line)}: {what}; {FIX}")
        if not messages:
            lines: dict[str, int] = ended.get("lines", {})
            if code := max(ended.get("reaper") or 0, 0):
                raise ConfigError(
                    f"the process that loads {self._functions[0].described} could not be started: Python ended with "
                    f"exit code {code}, and the reason is in its output"
                )
            functions = [function for function in self._functions if lines.get(function.path)] or self._functions[:1]
            at = functions[0].at(lines.get(functions[0].path, 0))
            raise ConfigError(f"{at}: {what}, {LOADING}; {FIX}")
        self.forms = [CallForm(form, is_async, tuple(facts)) for form, is_async, facts in messages[0][2]]
        return process

    def _spawn(self) -> RewardProcess:
        """Start a reaper, which forks a child."""
        options = self._options
        data, of_child = socket.socketpair()
        control, of_reaper = socket.socketpair()
        with of_child, of_reaper:
            fds = (of_child.fileno(), of_reaper.fileno())
            words = [sys.executable, RUN_MODULE, "flowrt.rewards.reaper"]
            words += ["--data", str(fds[0]), "--control", str(fds[1])]
            words += ["--memory-bytes", str(options.memory_mb << 20), "--sandbox", options.code_sandbox]
            words += ["--timeout-s", str(options.timeout_s), "--model", self._model, "--device", options.model_device]
            if self._task is not None:
                words += ["--task", json.dumps([self._task.module, self._task.configuration])]
            environment = {name: value for name, value in os.environ.items() if name != options.key_variable}
            reaper = subprocess.Popen(
                [
                    *words,
                    json.dumps([[function.name, function.kind, function.argument] for function in self._functions]),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=fds,
                start_new_session=True,
                env=environment,
            )
        for connection in (data, control):
            connection.setblocking(False)
        return RewardProcess(reaper, data, control)

    async def _drop(self, process: RewardProcess, *, hung: bool = False) -> dict[str, Any]:
        """End a child that has not loaded the functions."""
        self._processes.discard(process)
        return await process.end(hung=hung)

    async def _loaded(self, process: RewardProcess, progress: Callable[[str], None]) -> list[list[Any]]:
        limit_s = self._options.load_timeout_s
        first_s = min(PROGRESS_AFTER_S, limit_s)
        try:
            return await process.receive(first_s, "reward functions to be loaded")
        except WaitExpired:
            if first_s == limit_s:
                raise
        where = self._functions[0].described
        progress(f"waiting for {where}, {LOADING}: at most {limit_s:g} s (reward.load_timeout_s)")
        return await process.receive(limit_s - first_s, "reward functions to be loaded")


def _retrieve_error(task: asyncio.Task[Any]) -> None:
    """Mark the error of a task as retrieved, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def described_end(ended: dict[str, Any]) -> str:
    """How a child has ended, as the end of a sentence, from the report of its reaper."""
    code = ended.get("ended")
    if code is None:
        return "it closed the file descriptors of its process, or killed it"
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"it ended its process with exit code {code}"
