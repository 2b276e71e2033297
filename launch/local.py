"""A whole run on this machine: controller, workers, live view; every process ends with it."""

import asyncio
import contextlib
import dataclasses
import datetime
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from flowrt.launch.commands import check_programs, worker_commands
from flowrt.launch.devices import environments
from flowrt.launch.missing import Missing
from flowrt.launch.observer import Observer
from flowrt.launch.picture import draw
from flowrt.launch.processes import Child, Children
from flowrt.launch.progress import LiveView, summary_table
from flowrt.launch.restarts import Restarts, read_summary
from flowrt.launch.signals import Signals
from flowrt.launch.still import computed
from flowrt.launch.supervisor import RUN, Supervisor
from rich.console import Console

from flowrt.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK, EXIT_STALLED, ConfigError, FlowError, WaitExpired
from flowrt.recipes.config import RunConfig
from flowrt.recipes.load import to_toml
from flowrt.recipes.paths import address_file, model_dir, private, write_whole
from flowrt.recipes.subjects import subject
from flowrt.waiting import pause
from flowrt.wire.keys import KEYS_VARIABLE, controller_keys, worker_keys
from flowrt.wire.sockets import check_free

OBSERVER = "observer"
TRAINER = "trainer"
READY_S = 30.0
FAREWELL_S = 3.0
GOODBYES_S = 15.0


def place(config: RunConfig) -> RunConfig:
    """The configuration with absolute paths and a run directory. Raises ConfigError when that is in use."""
    name = f"{config.recipe}-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
    run_dir = Path(config.run_dir or Path("runs") / name).absolute()
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise ConfigError(f"run directory {run_dir} already holds something; name a new one with --run-dir")
    parent = next(path for path in run_dir.parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(f"run directory {run_dir} cannot be made below {parent}; name another with --run-dir")
    data = config.data
    if data.path:
        data = dataclasses.replace(data, path=str(Path(data.path).absolute()))
    if data.reward:
        data = dataclasses.replace(data, reward=str(Path(data.reward).absolute()))
    model = str(Path(config.model).absolute()) if config.model else ""
    keys = config.controller.keys or os.environ.get(KEYS_VARIABLE, "")
    controller = dataclasses.replace(config.controller, keys=str(Path(keys).absolute()) if keys else "")
    trainer = config.trainer
    if trainer.final_dir:
        if Path(trainer.final_dir).exists():
            raise ConfigError(f"trainer.final_dir {trainer.final_dir} is there already; name a directory that is not")
        trainer = dataclasses.replace(trainer, final_dir=str(Path(trainer.final_dir).absolute()))
    return dataclasses.replace(
        config, run_dir=str(run_dir), data=data, model=model, controller=controller, trainer=trainer
    )


def run(config: RunConfig, console: Console) -> int:
    """Run to the end; returns the exit code. Raises ConfigError, with nothing written, on bad input."""
    config = place(config)
    if config.controller.keys:
        controller_keys(Path(config.controller.keys))
    check_free(config.controller.bind, bool(config.controller.keys))
    check_programs(config)
    subject(config)  # reads and checks the data before anything is written
    return asyncio.run(LocalRun(config, console).run())


class LocalRun:
    """One run and its processes."""

    def __init__(self, config: RunConfig, console: Console) -> None:
        self._config = config
        self._console = console
        self._run_dir = Path(config.run_dir)
        self._made_dir = not self._run_dir.exists()
        private(self._run_dir)
        (self._run_dir / "logs").mkdir(exist_ok=True)
        self._is_new = not (self._run_dir / "config.toml").exists()
        write_whole(self._run_dir / "config.toml", to_toml(config))
        threads = str(config.threads)
        self._children = Children(
            self._run_dir / "logs",
            {
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                "HF_HUB_OFFLINE": "1",
                KEYS_VARIABLE: config.controller.keys,
            },
            environments(config, os.environ),
        )
        keys = config.controller.keys
        self._keys = worker_keys(Path(keys), OBSERVER) if keys else None
        self._signals = Signals(config.checkpoint.drain_s if config.checkpoint.every else 0.0)
        self._failure = ""
        self._ended = ""  # what the controller said of it
        self._controller: Child | None = None
        self._meeting: Child | None = None
        self._restarts = Restarts(self._run_dir, config.restarts)

    async def run(self) -> int:
        code: int
        self._signals.listen()
        try:
            with LiveView(self._console) as view:
                view.say(f"run directory {self._run_dir}")
                code = await self._signals.guard(asyncio.create_task(self._work(view)), self._tell, view.say)
        except ConfigError:
            await self._children.end(0.0)
            if self._is_new:
                self._leave_nothing()
            raise
        finally:
            await self._children.close()
        self._farewell(code)
        return code

    def _tell(self, number: signal.Signals) -> bool:
        """Pass a signal on to the controller, if there is one."""
        if self._controller is not None and self._controller.process.returncode is None:
            self._controller.process.send_signal(number)
        return self._controller is not None

    async def _work(self, view: LiveView) -> int:
        if self._config.launch.forked and not all(one.behind for one in worker_commands(self._config, "")):
            await self._children.begin_nursery()
        if not self._config.model and not model_dir(self._config).is_dir():
            command = [sys.executable, "-m", "flowrt.workers.prepare", "--config", self._toml]
            prepare = await self._children.start("prepare", command)
            view.say("building the model and warming it up")
            try:
                if await computed(prepare, self._config.supervisor.absence_s) != 0:
                    self._failure = prepare.last_words()
                    return EXIT_FAILED
            except WaitExpired as still:
                self._failure = str(still)
                return EXIT_STALLED
        while True:
            code, trainer_code = await self._live(view)
            died = self._controller is not None and (self._controller.process.returncode or 0) < 0
            self._controller = None
            if self._signals.is_leaving:
                return code
            back_off_s = self._restarts.back_off_s(trainer_code)
            if died and self._restarts.is_untold(self._config.steps):
                back_off_s = 0.0  # it was complete, and its controller died before it had said so: nothing is trained
            if back_off_s is None:
                return code
            view.say(f"{self._failure or self._restarts.reason()}: {self._restarts.tell(back_off_s)}")
            await self._children.end(0.0)
            await pause(back_off_s)
            self._failure = ""

    async def _live(self, view: LiveView) -> tuple[int, int | None]:
        """One life of the run; returns its exit code and that of the trainer, if it has left."""
        (self._run_dir / "summary.json").unlink(missing_ok=True)
        self._restarts.begin()
        controller, address = await self._start_controller(READY_S, "--anew")
        self._controller, self._is_new = controller, False
        commands = worker_commands(self._config, address, await self._start_meeting(address))
        missing = Missing(self._children, self._config.supervisor.hung_s, self._config.controller.join_s, view.say)
        ours = {command.name: command.workers for command in commands if not command.behind}

        def show(status: dict[str, Any]) -> None:
            view.show(status)
            if status["ended"] is None:
                missing.look(status["workers"], ours, {TRAINER})

        observer = Observer(address, show, self._keys, self._config.controller.silence_s)
        view.say(f"controller at {address}")
        supervisor = Supervisor(self._children, self._config.supervisor, view.say)
        watchers = []
        for command in commands:
            kept = None if command.name == TRAINER else supervisor
            worker = await self._children.start(command.name, command.words)
            watchers.append(asyncio.create_task(self._watch(worker, command.words, kept, observer)))
        code, hung = await self._reign(controller, observer)
        # One that ended the run has taken its address away; one that died is missed by all who are left.
        while address_file(self._run_dir).exists() and await supervisor.is_due(self._controller):
            missing.excuse(self._config.controller.return_s)
            self._controller = await self._restart_controller()
            if self._signals.is_leaving:
                self._tell(signal.SIGTERM)  # the one before it may have heard of that, and is no more
            code, hung = await self._reign(self._controller, observer)
        self._ended = observer.ended
        if self._meeting is not None and self._meeting.process.returncode is None:
            self._meeting.process.terminate()
        if code >= 0:  # a controller that was killed has told nobody to leave
            await self._children.wait_all(FAREWELL_S)
        for watcher in watchers:
            watcher.cancel()
        observer.close()
        if code < 0 and (told := read_summary(self._run_dir)) is not None:
            code = told["exit_code"]  # it had come to its end, and only then was killed
        elif code < 0:
            self._failure = hung or controller.last_words()
            code = EXIT_FAILED
        return code, worker.process.returncode

    async def _restart_controller(self) -> Child:
        """One that comes back to its workers, for whom they wait that long. Raises FlowError when none can."""
        try:
            child, _ = await self._start_controller(READY_S + self._config.controller.return_s)
        except FlowError as error:
            raise FlowError(f"{error}; then go on with flowrt resume {self._run_dir}") from error
        return child

    async def _start_controller(self, ready_s: float, *more: str) -> tuple[Child, str]:
        command = [sys.executable, "-m", "flowrt.launch.controller", "--config", self._toml, *more]
        for left in reversed(range(self._config.supervisor.restarts + 1)):
            child, address = await self._children.start_ready("controller", command, ready_s)
            if address:
                return child, address
            code = await child.ended(READY_S)
            if code >= 0 or not left:  # it said why; one that was killed before it could listen is started again
                break
            await pause(self._config.supervisor.backoff_s)
        words = child.log.read_text().strip().splitlines()
        reason = words[-1].split(" ERROR ")[-1] if code >= 0 and words else child.last_words()
        raise (ConfigError if code == EXIT_BAD_INPUT else FlowError)(reason)

    async def _reign(self, controller: Child, observer: Observer) -> tuple[int, str]:
        """The exit code of a controller, and what was wrong with it if it hung."""
        try:
            return await controller.ended(observer.heard), ""
        except WaitExpired as silent:
            if observer.ended:  # it waits for the goodbyes of all, and for nobody longer than it takes to give them up
                with contextlib.suppress(WaitExpired):
                    return await controller.ended(GOODBYES_S), ""
            controller.process.kill()
            hung = f"the controller says nothing any more: {silent}; its log: {controller.log}"
            return await controller.ended(READY_S), hung

    async def _watch(self, worker: Child, words: list[str], supervisor: Supervisor | None, observer: Observer) -> None:
        """A worker that dies for good, even without a word of its own, ends the run with its last words."""
        if supervisor is not None:
            try:
                worker = await supervisor.keep(worker, words)
            except FlowError as error:
                observer.cancel(str(error), EXIT_FAILED)
                return
        code = await worker.ended(RUN)
        if self._signals.is_leaving and supervisor is not None:
            return  # terminated with the whole job, which ends when the trainer has saved
        if code < 0 and not self._failure and not self._signals.is_leaving:
            # Whoever spoke with it fails too, and may be heard first; only we know who was killed.
            self._failure = worker.last_words()
        if code != 0:
            observer.cancel(worker.last_words(), EXIT_FAILED)

    async def _start_meeting(self, address: str) -> str:
        """Where torchruns on several hosts find each other; nothing for one host, whose torchrun needs nobody."""
        if self._config.trainer.nodes == 1:
            return ""
        host = address.removeprefix("tcp://").rpartition(":")[0]
        command = [sys.executable, "-m", "flowrt.workers.meeting", "--host", host]
        meeting: str
        self._meeting, meeting = await self._children.start_ready("meeting", command, READY_S)
        if not meeting:
            await self._meeting.ended(READY_S)
            raise FlowError(self._meeting.last_words())
        return meeting

    def _leave_nothing(self) -> None:
        """Bad input: the directory is as it was before."""
        shutil.rmtree(self._run_dir)
        if not self._made_dir:
            self._run_dir.mkdir(mode=0o700)

    @property
    def _toml(self) -> str:
        return str(self._run_dir / "config.toml")

    def _farewell(self, code: int) -> None:
        """The summary and the picture, whatever there is of them."""
        summary = read_summary(self._run_dir)
        if summary is not None:
            if summary["steps"]:
                self._console.print(summary_table(summary))
                self._console.print(f"picture {draw(self._run_dir)}", highlight=False, soft_wrap=True)
            self._ended = summary["reason"]
        self._failure = self._failure or (self._ended if code != EXIT_OK else "")
        if self._failure:
            self._console.print(f"flowrt: {self._failure}", style="red", highlight=False, markup=False, soft_wrap=True)
