"""Child processes of a bench: a line of JSON in for each command, one out for its result. Needs no packages."""

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
    """A process that runs a script of bench/ and executes commands; ``ready`` is its first answer."""

    def __init__(
        self, script: str, *arguments: str, python: str = sys.executable, variables: Mapping[str, str] | None = None
    ) -> None:
        self.name = " ".join((script, *arguments))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{BENCH}{os.pathsep}{ROOT}"}
        self._process = subprocess.Popen(
            [python, str(BENCH / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment | dict(variables or {}),
        )
        self.ready: Any = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> Any:
        self.ready = self.answer()
        return self.ready

    def ask(self, order: str, **values: Any) -> Any:
        """Send a command and wait for its result."""
        self.tell(order, **values)
        return self.answer()

    def tell(self, order: str, **values: Any) -> None:
        """Send a command; `answer` returns its result, so that several children can work at once."""
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
        """Close its stdin, so that the process ends; kill it if it has not after LEAVE_S seconds."""
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
    """Send the same command to all children; returns their results in the order of ``children``."""
    for child in children:
        child.tell(order, **values)
    return [child.answer() for child in children]


def cpu_s(pid: int) -> float:
    """Processor time of all threads of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def reply(value: Any) -> None:
    """In the child: write the result of a command."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def serve_commands(orders: Mapping[str, Order], ready: Any = None) -> None:
    """In the child: execute commands until stdin ends."""
    reply(ready)
    for line in sys.stdin:
        values = json.loads(line)
        reply(orders[values.pop("order")](**values))


async def serve_commands_on_loop(orders: Mapping[str, Order], ready: Any = None) -> None:
    """As `serve_commands`, on an event loop that keeps running between commands."""
    reply(ready)
    while line := await asyncio.to_thread(sys.stdin.readline):
        values = json.loads(line)
        result = orders[values.pop("order")](**values)
        reply(await result if inspect.isawaitable(result) else result)
