"""Save checkpoints and exit just before the n-th change: ``python -m tests.unit.engines.dying_saver DIRECTORY``.

Forks once for each n, and prints the state that each crash leaves, one JSON line each.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from flowrt.engines.simulated.engine import SimulatedTrainer
from flowrt.engines.simulated.time import ManualSimClock
from flowrt.engines.simulated.workload import TrainCost
from flowrt.engines.tiny_model import wrap_tokenizer
from flowrt.protocol.messages import Position
from flowrt.ranks.barrier import RankCollectives
from flowrt.recipes.config import CheckpointConfig, RunConfig
from flowrt.recipes.run_dir import checkpoint_dir, checkpoint_steps
from flowrt.recipes.tasks.arithmetic import Arithmetic
from flowrt.roles.checkpoints import Checkpoints
from flowrt.runtime.progress import Progress

CHANGES = {"os.mkdir", "os.rename", "os.rmdir", "os.remove", "shutil.rmtree"}
STEPS = 3
CRASH_CODE = 9


class StubSession:
    """The part of a session that saving needs: it confirms each checkpoint, and records its step in a file."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        self.welcome = SimpleNamespace(position=Position(step))
        self.progress = Progress()
        self.timeline = self

    @contextlib.contextmanager
    def busy(self, kind: str) -> Iterator[None]:
        yield

    async def saved(self, step: int) -> None:
        self._path.write_text(str(step))


def engine_after(steps: int) -> SimulatedTrainer:
    engine = SimulatedTrainer(TrainCost(0.0), ManualSimClock())
    engine.parameters()["weight"].fill_(float(steps))
    return engine


async def save(run_dir: Path, step: int, last: int) -> None:
    """Save after each step from ``step`` to ``last``, keeping one."""
    config = RunConfig(run_dir=str(run_dir), checkpoint=CheckpointConfig(every=1, keep=1))
    for number in range(step, last + 1):
        session: Any = StubSession(run_dir / "saved", number - 1)
        saver = Checkpoints(session, config, engine_after(number), RankCollectives())
        await saver.save(number)


def crash_before(change: int, run_dir: Path) -> None:
    """Make this process exit just before its n-th change of the run directory."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in CHANGES and str(run_dir) in str(arguments[0]):
            count += 1
            if count == change:
                os._exit(CRASH_CODE)

    sys.addaudithook(hook)


def run_in_fork(work: Any) -> int:
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def weight_of(run_dir: Path, step: int) -> float:
    engine = engine_after(0)
    engine.load(checkpoint_dir(run_dir, step))
    return float(engine.parameters()["weight"][0])


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    tokenizer = wrap_tokenizer(Arithmetic(0, 0).tokenizer())
    code, change = CRASH_CODE, 0
    while code == CRASH_CODE:
        change += 1
        run_dir = directory / f"run-{change}"
        tokenizer.save_pretrained(run_dir / "model")
        assert run_in_fork(lambda: asyncio.run(save(run_dir, 1, 1))) == 0  # noqa: B023

        def save_and_crash() -> None:
            crash_before(change, run_dir)  # noqa: B023
            asyncio.run(save(run_dir, 2, STEPS))  # noqa: B023

        code = run_in_fork(save_and_crash)
        remaining = checkpoint_steps(run_dir)
        ledger_step = int((run_dir / "saved").read_text())
        weights = [weight_of(run_dir, step) for step in remaining]
        assert run_in_fork(lambda: asyncio.run(save(run_dir, remaining[-1] + 1, remaining[-1] + 1))) == 0  # noqa: B023
        after = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
        print(json.dumps([change, code, remaining, ledger_step, weights, after]))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
