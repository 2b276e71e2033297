"""The processes of a simulated cluster, started once for many runs."""

import dataclasses
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from common.children import Child, cpu_s, start_all
from end_to_end.simulated.modes import RunSpec

RUN_S = 300.0


class Cluster:
    """A controller and workers, each a process of its own; none of them outlives the ``with`` block.

    Args:
        script: `end_to_end/simulated/process.py`, or one that adds to it.
        workers: by name, the workers that share a process.
        variables: more variables of their environment.
    """

    def __init__(self, script: str, workers: Mapping[str, Iterable[str]], variables: Mapping[str, str]) -> None:
        self._controller = Child(script, "controller", variables=variables)
        self._workers = {name: Child(script, *of, variables=variables) for name, of in workers.items()}
        self._joined: list[Child] = []
        self._address = ""
        self._began = (0.0, 0.0)

    def __enter__(self) -> Self:
        start_all([self._controller, *self._workers.values()])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for child in (self._controller, *self._workers.values()):
            child.kill()

    def begin(self, spec: RunSpec, run_dir: Path) -> None:
        """Begin a run, which no worker has joined."""
        self._joined, self._began = [], (time.monotonic(), self._cpu_s())
        self._controller.tell("play", run_dir=str(run_dir), spec=dataclasses.asdict(spec))
        self._address = self._controller.answer()

    def join(self, *names: str) -> None:
        """Let these workers join the run; without names, all."""
        for name in names or self._workers:
            self._workers[name].tell("work", address=self._address)
            self._joined.append(self._workers[name])

    def pid(self, name: str) -> int:
        """The process id of a worker."""
        return self._workers[name].pid

    def finish(self) -> tuple[dict[str, Any], float]:
        """The summary of the run at its end, and the share of the machine's cores that it used.

        Raises RuntimeError if it fails, TimeoutError after RUN_S seconds.
        """
        summary: dict[str, Any] = self._controller.answer(RUN_S)
        errors = [error for child in self._joined if (error := child.answer())]
        if summary["exit_code"] or errors:
            raise RuntimeError(f"{summary['reason']}; {'; '.join(errors)}")
        began_s, began_cpu_s = self._began
        cpu = (self._cpu_s() - began_cpu_s) / (time.monotonic() - began_s) / (os.cpu_count() or 1)
        return summary, cpu

    def _cpu_s(self) -> float:
        return sum(cpu_s(child.pid) for child in (self._controller, *self._workers.values()))
