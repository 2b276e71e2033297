"""Processes that a bench starts and orders about: a line of JSON in, a line of JSON out, the same with every Python."""

import asyncio
import contextlib
import inspect
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from select import select
from typing import Any

BENCH = Path(__file__).parents[1]
ROOT = BENCH.parent
DEADLINE_S = 180.0
LEAVE_S = 10.0
Order = Callable[..., Any]


def raise_open_files() -> int:
    """Let this process and its children open as many files as the hard limit allows; returns that number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class Child:
    """A script of bench, by its path below it, in a process that executes orders. ``ready`` is its first answer."""

    def __init__(self, script: str, *arguments: str, python: str = sys.executable) -> None:
        self.name = " ".join((script, *arguments))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{BENCH}{os.pathsep}{ROOT}"}
        self._process = subprocess.Popen(
            [python, str(BENCH / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
        )
        self.ready: Any = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> Any:
        self.ready = self.answer()
        return self.ready

    def ask(self, order: str, **values: Any) -> Any:
        """Give an order and wait for its result."""
        self.tell(order, **values)
        return self.answer()

    def tell(self, order: str, **values: Any) -> None:
        """Give an order; its result is fetched with `answer`, so that several children work at once."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"order": order, **values}) + "\n")
        self._process.stdin.flush()

    def answer(self, deadline_s: float = DEADLINE_S) -> Any:
        output = self._process.stdout
        assert output is not None
        if not select([output], [], [], deadline_s)[0]:
            raise TimeoutError(f"{self.name} did not answer within {deadline_s:.0f} s")
        line = output.readline()
        if not line:
            raise RuntimeError(f"{self.name} left with exit code {self._process.wait(LEAVE_S)}; see its error above")
        return json.loads(line)

    def leave(self) -> None:
        """No more orders: the process leaves by itself, or is killed when it does not."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._gone()

    def kill(self) -> None:
        self._process.kill()
        self._gone()

    def _gone(self) -> None:
        self._process.wait(LEAVE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def start_all(children: list[Child]) -> list[Child]:
    """Wait until children that were started side by side are ready."""
    for child in children:
        child.wait_ready()
    return children


def ask_all(children: list[Child], order: str, **values: Any) -> list[Any]:
    """The same order to several at once; their results in the same order."""
    for child in children:
        child.tell(order, **values)
    return [child.answer() for child in children]


def cpu_s(pid: int) -> float:
    """Processor time of all threads of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def reply(value: Any) -> None:
    """In the child: the result of an order."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def serve_commands(orders: Mapping[str, Order], ready: Any = None) -> None:
    """In the child: carry out orders until the parent has no more."""
    reply(ready)
    for line in sys.stdin:
        values = json.loads(line)
        reply(orders[values.pop("order")](**values))


async def serve_commands_on_loop(orders: Mapping[str, Order], ready: Any = None) -> None:
    """Like `obey`, on an event loop that goes on running between orders."""
    reply(ready)
    while line := await asyncio.to_thread(sys.stdin.readline):
        values = json.loads(line)
        result = orders[values.pop("order")](**values)
        reply(await result if inspect.isawaitable(result) else result)
