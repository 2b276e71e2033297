"""Trials as processes of their own: begun, watched to their end, judged."""

import asyncio
import contextlib
import dataclasses
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil
from flowrt.workers.nursery import SHARED
from flowrt.workers.prepare import prepare as build
from rich.console import Console

from faulty.faults import Fault
from faulty.nursery import PIDS, Forked
from faulty.trial import Trial
from faulty.verdict import account
from flowrt.lifeline import die_with_parent
from flowrt.recipes.config import RunConfig
from flowrt.recipes.load import defaults
from flowrt.wire.keys import write_keys
from flowrt.wire.sockets import new_pair

STEPS, PROMPTS, MEMBERS = 8, 4, 2
HELD_OUT = 3
"""Problems on which a run is evaluated before its first step and after its last."""
SILENCE_S = 3.0
NOTES = "notes.json"
KEYS = "keys"
OUTPUT = "output.txt"
LEAVE_S = 3.0


def warm_up() -> None:
    """Import what the processes of a run import, without starting a thread."""
    import torch

    torch.set_num_threads(1)
    for module in (*SHARED, "flowrt.launch.controller"):
        importlib.import_module(module)
    # Whoever is forked shares these pages for as long as no collector writes to them.
    gc.collect()
    gc.freeze()


def prepare(folder: Path) -> RunConfig:
    """The data, a tiny model without any warm start, and the configuration of all trials."""
    data = folder / "data.jsonl"
    rows = [
        {"question": f"What is {n} and {n + 3}?", "answer": f"#### {2 * n + 3}"}
        for n in range(STEPS * PROMPTS + HELD_OUT)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = defaults("gsm8k")
    config = dataclasses.replace(
        base,
        steps=STEPS,
        prompts_per_step=PROMPTS,
        group_size=MEMBERS,
        run_dir=str(folder / "base"),
        restarts=4,
        data=dataclasses.replace(base.data, path=str(data), epochs=1, eval_prompts=HELD_OUT),
        build=dataclasses.replace(
            base.build, hidden_size=32, layers=1, heads=2, intermediate_size=64, vocab_size=300, max_length=128
        ),
        warm_start=dataclasses.replace(base.warm_start, steps=0, bare_steps=0, probes=1),
        rollout=dataclasses.replace(base.rollout, workers=2, rows=4, max_new_tokens=8),
        trainer=dataclasses.replace(base.trainer, micro_batch_tokens=64, save=False),
        controller=dataclasses.replace(
            base.controller,
            heartbeat_s=0.2,
            silence_s=SILENCE_S,
            return_s=60.0,
            lane_s=SILENCE_S,
            stall_s=60.0,
            join_s=20.0,
            wait_s=600.0,
        ),
        supervisor=dataclasses.replace(base.supervisor, backoff_s=0.05, hung_s=1.0, absence_s=10.0),
        checkpoint=dataclasses.replace(base.checkpoint, every=2, keep=2),
    )
    write_keys(folder / KEYS, [], new_pair)
    pid = os.fork()
    if pid == 0:
        Path(config.run_dir).mkdir()
        build(config)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError("the model could not be built; see above")
    return dataclasses.replace(config, model=str(Path(config.run_dir) / "model"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """One trial, judged."""

    seed: int
    fault: Fault
    struck: bool
    lost: int
    doubled: int
    hung: bool
    wrong: str
    resumed: bool
    noticed_s: float
    recovered_s: float
    wall_s: float
    folder: Path

    @property
    def is_bad(self) -> bool:
        return bool(self.lost or self.doubled or self.hung or self.wrong)

    def line(self, number: int) -> str:
        times = f"noticed {self.noticed_s:.2f} s, recovered {self.recovered_s:.2f} s"
        head = f"{number:4} seed {self.seed}: {self.fault}: {times}"
        tail = (
            f", resumed after its end in {self.wall_s:.1f} s" if self.resumed else f", over after {self.wall_s:.1f} s"
        )
        if not self.is_bad:
            return head + tail
        what = f"lost {self.lost}, doubled {self.doubled}, {'hung, ' if self.hung else ''}{self.wrong}"
        return f"{head}{tail}: FAILED: {what}; see {self.folder}"


class Pending:
    """A trial that goes on; a run that had to end is resumed within it."""

    def __init__(self, config: RunConfig, folder: Path, seed: int, fault: Fault, deadline_s: float) -> None:
        self.folder = folder
        self._config = config
        self._seed = seed
        self._fault = fault
        self._began_s = time.monotonic()
        self._deadline_s = deadline_s
        self._hung = self._resumed = False
        self._wrong: list[str] = []
        self._notes: dict[str, object] = {}
        self._pid = _start(config, folder, fault)

    def is_over(self) -> bool:
        """Look after it; True when there is nothing left to wait for."""
        if time.monotonic() > self._began_s + self._deadline_s:
            self._hung = True
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._wrong += _left(self.folder)
            return True
        pid, _ = os.waitpid(self._pid, os.WNOHANG)
        if pid == 0:
            return False
        self._wrong += _left(self.folder)
        notes = json.loads((self.folder / NOTES).read_text()) if (self.folder / NOTES).exists() else {}
        self._notes = self._notes or notes
        code = notes.get("code", -1)
        if code == 0:
            return True
        names_it = self._fault.victim.split("-")[0] in str(notes.get("reason", ""))
        if self._resumed or not self._fault.may_end_the_run or not names_it:
            self._wrong.append(f"exit code {code}: {notes.get('reason') or 'the launcher has died'}")
            return True
        self._resumed = True
        broken = account(self.folder / "run", STEPS * PROMPTS, STEPS, complete=False)
        self._wrong += ["trained twice before it was resumed"] if broken.doubled else []
        (self.folder / NOTES).unlink()
        self._pid = _start(self._config, self.folder, None)
        return False

    def outcome(self) -> Outcome:
        ended = not self._hung and not self._wrong
        judged = account(self.folder / "run", STEPS * PROMPTS, STEPS, complete=ended)
        wrong = "; ".join([*self._wrong, *([judged.fault] if judged.fault else [])])
        seen = self._notes
        return Outcome(
            self._seed,
            self._fault,
            bool(seen.get("struck")),
            judged.lost,
            judged.doubled,
            self._hung,
            wrong,
            self._resumed,
            float(str(seen.get("noticed_s", -1.0))),
            float(str(seen.get("recovered_s", -1.0))),
            time.monotonic() - self._began_s,
            self.folder,
        )


def begin(config: RunConfig, folder: Path, seed: int, fault: Fault, deadline_s: float) -> Pending:
    folder.mkdir()
    # Every second run keeps strangers out: whoever comes back has to prove who it is.
    keys = str(Path(config.run_dir).with_name(KEYS)) if seed % 2 else ""
    controller = dataclasses.replace(config.controller, keys=keys)
    config = dataclasses.replace(config, seed=seed, run_dir=str(folder / "run"), controller=controller)
    return Pending(config, folder, seed, fault, deadline_s)


def _start(config: RunConfig, folder: Path, fault: Fault | None) -> int:
    pid = os.fork()
    if pid == 0:
        _live(config, folder, fault)
    return pid


def _live(config: RunConfig, folder: Path, fault: Fault | None) -> NoReturn:
    die_with_parent()
    os.setsid()
    output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        run_dir = folder / "run"
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        forked = Forked(run_dir / "logs")
        trial = Trial(config, Console(width=200), forked, fault, folder / OUTPUT)
        code = asyncio.run(trial.run())
        notes = trial.notes.to_table() | {"code": code}
        (folder / NOTES).write_text(json.dumps(notes))
    except Exception:  # noqa: BLE001 (whatever it is, this process ends with it)
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(0)


def _left(folder: Path) -> list[str]:
    """Processes of this run that are still there a while after its launcher."""
    path = folder / "run" / "logs" / PIDS
    pids = [int(line) for line in path.read_text().split()] if path.exists() else []
    until_s = time.monotonic() + LEAVE_S
    while (left := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < until_s:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"processes {left} were left behind"] if left else []
