"""Local run: starts the controller and the workers, shows the live view, restarts what dies, ends every process.

- Input is checked before anything is written: bad input leaves the run directory unchanged.
- A controller that dies is restarted and recovers its workers; after the loss of the trainer the whole run restarts
  from its newest checkpoint.
- The exit code is that of the controller, or, if the controller was killed after the run's end, that in summary.json.
"""

import asyncio
import contextlib
import datetime
import functools
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console

from flowrt.controller.storage.integrity import ledger_bytes
from flowrt.controller.storage.journals import journal_bytes
from flowrt.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK, EXIT_STALLED, ConfigError, FlowError, WaitExpired
from flowrt.ids import OBSERVER, TRAINER
from flowrt.launcher.absolute_paths import with_absolute_paths
from flowrt.launcher.accelerators import DEV, environments, visible
from flowrt.launcher.device_check import check_devices_here, unused
from flowrt.launcher.exporters import ExporterProcesses
from flowrt.launcher.memory_check import check_memory
from flowrt.launcher.observer import Observer
from flowrt.launcher.page_process import WatchProcess, check_page_port, write_page
from flowrt.launcher.processes import Child, Children
from flowrt.launcher.run_checks import check_files
from flowrt.launcher.signals import Signals
from flowrt.launcher.supervision import (
    RUN,
    HungProcessReaper,
    RestartPolicy,
    Supervisor,
    Vacancies,
    cpu_time_watchdog,
    has_joined,
    present,
    read_summary,
    recorded_end,
)
from flowrt.launcher.unjoined import UnjoinedWorkers
from flowrt.launcher.views.live import LiveView, results_text, summary_table
from flowrt.launcher.worker_commands import check_machine, check_programs, worker_commands
from flowrt.net.curve_keys import KEYS_VARIABLE, controller_keys, worker_keys
from flowrt.net.link import check_free
from flowrt.observability.tails import LineTail
from flowrt.recipes.algorithms import name_and_changes
from flowrt.recipes.config import RunConfig, changed
from flowrt.recipes.config_io import OWN_DATA, to_toml
from flowrt.recipes.devices import named_accelerators
from flowrt.recipes.input_digests import changed_inputs, input_digests
from flowrt.recipes.run_dir import CONFIG, address_file, checkpoint_steps, has_adapters_to_merge, model_dir, ranks_dir
from flowrt.recipes.tasks.custom import check_given
from flowrt.recipes.tasks.task_file import is_task_file, split
from flowrt.runtime.addresses import parse_address
from flowrt.runtime.clock import OwnAbsence
from flowrt.runtime.files import atomic_write, os_error_text, private_directory
from flowrt.runtime.interpreter import RUN_MODULE
from flowrt.runtime.resource_limits import total_bytes
from flowrt.runtime.time_limits import controller_start_s
from flowrt.runtime.waits import pause

READY_S = 30.0
STATUS_S = 1.0
"""A controller that runs sends its status more often than this."""
WORKERS_EXIT_S = 3.0
CONTROLLER_EXIT_S = 15.0
PROGRESS_S = 1.0
LOG_PREFIX = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ ")
"""Time and level of a line of a log."""


def place(config: RunConfig) -> RunConfig:
    """The configuration with absolute paths and a run directory.

    Raises ConfigError if that directory is in use or cannot be created, or if trainer.final_dir exists or contains it.
    """
    try:
        return _place(config)
    except OSError as error:  # a name that is too long, a loop of links
        if error.filename is None:
            raise ConfigError(os_error_text(error)) from error
        raise ConfigError(f"{str(error.filename)[:200]} cannot be used: {error.strerror}; name another") from error


def _place(config: RunConfig) -> RunConfig:
    recipe = Path(split(config.recipe)[0]).stem if is_task_file(config.recipe) else config.recipe
    name = f"{recipe}-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
    run_dir = Path(config.run_dir or Path("runs") / name).absolute()
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise ConfigError(f"run directory {run_dir} is not empty; name a new one with --run-dir")
    parent = next(path for path in run_dir.parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(f"run directory {run_dir} cannot be created in {parent}; name another with --run-dir")
    final_dir = config.trainer.final_dir
    if final_dir and Path(final_dir).exists():
        raise ConfigError(f"trainer.final_dir {final_dir} exists; name a directory that does not")
    if final_dir and Path(final_dir).absolute() in (run_dir, *run_dir.parents):
        raise ConfigError(
            f"trainer.final_dir {final_dir} contains the run directory {run_dir} and would replace it; name another"
        )
    keys = config.controller.keys or os.environ.get(KEYS_VARIABLE, "")
    return with_absolute_paths(changed(config, {"run_dir": str(run_dir), "controller.keys": keys}))


def run(config: RunConfig, console: Console, page_port: int | None = None) -> int:
    """Run to the end; returns the exit code. Raises ConfigError, with nothing written, on bad input."""
    return check_and_run(place(config), console, page_port=page_port)


def check_and_run(
    config: RunConfig, console: Console, prepare: Sequence[str] = (), page_port: int | None = None
) -> int:
    """Check keys, port, programs, threads and data; then run. Returns the exit code.

    Raises ConfigError for bad input, with the run directory unchanged.


    Args:
        config: of the run.
        console: receives the live view.
        prepare: a module of `flowrt.launcher` that is run first, followed by its arguments; empty: none.
        page_port: port of the page of the run; None: it is not served.
    """
    check_page_port(page_port)
    if config.controller.keys:
        controller_keys(Path(config.controller.keys))
    check_free(config.controller.bind, bool(config.controller.keys))
    check_programs(config)
    check_machine(config, os.cpu_count() or 1)
    check_devices_here(config)
    check_memory(config, total_bytes(), bool(visible(os.environ, DEV)[1]))
    environments(config, os.environ)  # refuses devices whose memory cannot be divided
    progress = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    if unused_devices := unused(config, os.environ):
        progress(unused_devices)
    if config.recipe == OWN_DATA:
        check_given(config)
    config = _with_input_digests(check_files(config, progress), progress)
    return asyncio.run(_run(config, console, prepare, page_port))


def _with_input_digests(config: RunConfig, progress: Callable[[str], None]) -> RunConfig:
    """The configuration, of a new run with ``input_digests``; notes on files that have changed since the start."""
    if not (Path(config.run_dir) / CONFIG).exists():
        return changed(config, {"input_digests": input_digests(config)})
    for text in changed_inputs(config):
        progress(text)
    return config


async def _show_log(path: Path, view: LiveView) -> None:
    """Show the last log line of a process that prepares the run, until cancelled."""
    tail = LineTail(path)
    while True:
        lines = [line for line in tail.read_new().lines if line.strip()]
        if lines:
            view.prepare(LOG_PREFIX.sub("", lines[-1].decode(errors="replace")))
        await pause(PROGRESS_S)


async def _run(config: RunConfig, console: Console, prepare: Sequence[str], page_port: int | None) -> int:
    signals = Signals(bool(config.checkpoint.every and config.checkpoint.preemption_save_timeout_s))
    signals.install()  # before anything is written or started
    try:
        return await LocalRun(config, console, signals, prepare, page_port).run()
    finally:
        signals.close()


class LocalRun:
    """One run, its processes and their restarts."""

    def __init__(
        self,
        config: RunConfig,
        console: Console,
        signals: Signals,
        prepare: Sequence[str] = (),
        page_port: int | None = None,
    ) -> None:
        """Write the configuration; start nothing yet. Arguments as of `check_and_run`; ``signals``: of this process."""
        self._config = config
        self._begun_s = monotonic()
        self._prepared_s: float | None = None
        self._prepare = prepare
        self._console = console
        self._signals = signals
        self._run_dir = Path(config.run_dir)
        self._created_dir = not self._run_dir.exists()
        private_directory(self._run_dir)
        (self._run_dir / "logs").mkdir(mode=0o700, exist_ok=True)
        self._is_new = not (self._run_dir / CONFIG).exists()
        # The controller copies it to config.toml once it holds the run's lock: a refused start changes nothing.
        self._config_path = self._run_dir / (CONFIG if self._is_new else f".{CONFIG}.{os.getpid()}")
        atomic_write(self._config_path, to_toml(config))
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
        self._watch_process = WatchProcess(self._run_dir, page_port)
        self._failure = ""
        self._end_reason = ""  # from the controller
        self._controller: Child | None = None
        self._has_started_controller = False  # one that held the lock of the run directory
        self._rendezvous: Child | None = None
        self._restarts = RestartPolicy(self._run_dir, config.max_run_restarts, config.run_restart_window_s)

    async def run(self) -> int:
        """Run to the end; returns the exit code. Raises ConfigError for bad input that a process of the run found."""
        code: int
        try:
            with LiveView(self._console) as view:
                view.report(f"run directory {self._run_dir}")
                view.report(f"algorithm {name_and_changes(self._config.algorithm)}")
                await self._watch_process.start(view.report)
                work = asyncio.create_task(self._run_with_restarts(view))
                code = await self._signals.run(work, self._signal_controller, view.report)
        except ConfigError:
            await self._children.end(0.0)
            await self._watch_process.close()
            if self._is_new:
                self._restore_run_dir()
            raise
        finally:
            await self._children.close()
            if self._config_path.name != CONFIG:
                self._config_path.unlink(missing_ok=True)
            if self._has_started_controller:
                self._remove_ranks_dir()
        await self._print_summary(code)
        await self._watch_process.close()
        return code

    def _signal_controller(self, number: signal.Signals) -> bool:
        """Signal the controller; False if there is none."""
        if self._controller is not None and self._controller.process.returncode is None:
            self._controller.process.send_signal(number)
        return self._controller is not None

    async def _run_with_restarts(self, view: LiveView) -> int:
        launch = self._config.launch
        here = [command for command in worker_commands(self._config, "") if not command.prefix]
        # With accelerators the fork server forks nothing, and would import torch in vain.
        if launch.use_fork_server and here and not named_accelerators(self._config):
            await self._children.start_fork_server()
        code = await self._run_first(view, *self._prepare) if self._prepare else EXIT_OK
        if code != EXIT_OK:
            return code
        if not self._config.model and not model_dir(self._config).is_dir():
            view.report("building and warm-starting the model")
            code = await self._run_first(view, "build_model")
        if code == EXIT_OK and (self._config.model or self._config.reference.model):
            if has_adapters_to_merge(self._config):
                view.report("merging the adapter into its base model")
            code = await self._run_first(view, "start_models")  # it compares the vocabulary of an embedded model
        if code != EXIT_OK:
            return code
        self._prepared_s = monotonic() - self._begun_s
        while True:
            code, trainer_code = await self._run_once(view)
            killed = self._controller is not None and (self._controller.process.returncode or 0) < 0
            self._controller = None
            if self._signals.preempted:
                return code
            back_off_s = self._restarts.back_off_s(trainer_code)
            if killed and self._restarts.lacks_only_summary(self._config.steps):
                back_off_s = 0.0  # all steps are saved: a restarted controller only writes the summary
            if back_off_s is None:
                return code
            view.report(f"{self._failure or self._restarts.reason()}: {self._restarts.describe(back_off_s)}")
            await self._children.end(0.0)
            await pause(back_off_s)
            self._failure = ""

    async def _run_first(self, view: LiveView, module: str, *arguments: str) -> int:
        """Run a module of `flowrt.launcher` to its end before the run starts; returns an exit code.

        Raises ConfigError for bad input that it found.
        """
        words = [sys.executable, RUN_MODULE, f"flowrt.launcher.{module}", "--config", str(self._config_path)]
        child = await self._children.start(module, [*words, *arguments])
        progress = asyncio.create_task(_show_log(child.log, view))
        try:
            code = await cpu_time_watchdog(child, self._config.supervisor.role_vacancy_timeout_s)
        except WaitExpired as idle:
            self._failure = str(idle)
            return EXIT_STALLED
        finally:
            progress.cancel()
        if code == EXIT_BAD_INPUT:
            raise ConfigError(child.last_error())
        if code != EXIT_OK:
            self._failure = child.log_tail()
            return EXIT_FAILED
        for warning in child.warnings():
            view.report(warning)
        return EXIT_OK

    async def _run_once(self, view: LiveView) -> tuple[int, int | None]:
        """Run from the newest checkpoint; returns the run's exit code and that of the trainer, if it has ended."""
        self._restarts.begin()
        controller, address = await self._start_controller(0.0, "--from-checkpoint")
        self._controller = controller
        self._is_new = False
        self._has_started_controller = True
        self._remove_ranks_dir()
        commands = worker_commands(self._config, address, await self._start_rendezvous(address))
        reaper = HungProcessReaper(
            self._children,
            self._config.supervisor.hung_process_timeout_s,
            self._config.controller.connect_timeout_s,
            view.report,
        )
        local = {command.name: command.workers for command in commands if not command.prefix}
        unjoined = UnjoinedWorkers(
            self._children,
            {command.name: command.workers for command in commands},
            self._config.supervisor.join_report_s,
            view.report,
        )
        vacancies = Vacancies(
            {command.name: command.role for command in commands},
            lambda: self._signals.preempted,
            {command.name: command.workers for command in commands},
        )

        absence = OwnAbsence(STATUS_S)

        def on_status(status: dict[str, Any]) -> None:
            reaper.postpone(absence.take(monotonic()))
            view.show(status)
            vacancies.update(status)
            if status["ended"] is None:
                observer.show_unjoined(unjoined.check(present(status)))
                reaper.check(present(status), local, {TRAINER})

        observer = Observer(
            address,
            on_status,
            self._keys,
            self._config.controller.worker_timeout_s,
            follow=[name for command in commands for name in command.workers],
        )
        view.report(f"controller at {address}")
        exporters = ExporterProcesses(
            self._children, self._run_dir, self._config.exporters, view.report, observer.log_event
        )
        exporters.start()
        supervisor = Supervisor(
            self._children,
            self._config.supervisor,
            view.report,
            is_missed=vacancies.is_missed,
            take_results=vacancies.take_results,
            wait_left=vacancies.wait_left,
        )
        watchers = []
        trainer: Child | None = None
        for command in commands:
            worker = await self._children.start(command.name, command.words)
            trainer = worker if command.name == TRAINER else trainer
            restarts = None if command.name == TRAINER else supervisor
            watchers.append(asyncio.create_task(self._watch(worker, command.words, restarts, observer, vacancies)))
        code, hang = await self._await_controller(controller, observer)
        # Asked again after the delay: what a dead fork server started may live on for a moment, and end the run.
        while self._can_recover() and await supervisor.may_restart(self._controller) and self._can_recover():
            reaper.extend(self._config.controller.reconnect_timeout_s)
            self._controller = await self._restart_controller()
            if self._signals.preempted:
                self._signal_controller(signal.SIGTERM)  # the signal may have reached only its predecessor
            code, hang = await self._await_controller(self._controller, observer)
        self._end_reason = observer.end_reason
        exporters.stop()
        if self._rendezvous is not None and self._rendezvous.process.returncode is None:
            self._rendezvous.process.terminate()
        if code >= 0:  # a controller that was killed has stopped no worker
            await self._children.wait_all(WORKERS_EXIT_S)
        await exporters.finish()
        for watcher in watchers:
            watcher.cancel()
        observer.close()
        code = self._judge(code, hang or controller.log_tail(), self._controller)
        return code, None if trainer is None else trainer.process.returncode

    def _can_recover(self) -> bool:
        """Whether the controller died during the run: one that ended it removes its address, after recording the end.

        A run that ended with an error is not recovered: it lacks the worker that failed.
        """
        end = recorded_end(self._run_dir)
        return address_file(self._run_dir).exists() and (end is None or end["exit_code"] == EXIT_OK)

    def _judge(self, code: int, death: str, controller: Child) -> int:
        """The exit code of the run, from that of its controller; records the reason of a failure.

        Args:
            code: exit code of the last controller.
            death: the failure to record if a signal killed the controller during the run.
            controller: the last controller.
        """
        summary = read_summary(self._run_dir)
        if code < 0:
            if summary is not None:
                code = int(summary["exit_code"])  # killed after the end of the run
            else:
                recorded = recorded_end(self._run_dir)
                self._failure = death if recorded is None or recorded["exit_code"] == EXIT_OK else recorded["reason"]
                code = EXIT_FAILED
        elif code != EXIT_OK and not self._failure and summary is None:
            end = self._end_reason or "the run has ended"
            self._failure = f"{end}, but without a summary: {controller.log_tail()}"
            self._failure += f"; fix this, then flowrt resume {self._run_dir}"
        return code

    async def _restart_controller(self) -> Child:
        """Start a controller that recovers the run with its workers. Raises FlowError if none can be started."""
        try:
            child, _ = await self._start_controller(self._config.controller.reconnect_timeout_s)
        except FlowError as error:
            raise FlowError(f"{error}; fix this, then flowrt resume {self._run_dir}") from error
        return child

    async def _start_controller(self, bind_s: float, *flags: str) -> tuple[Child, str]:
        """Start a controller, which may try for ``bind_s`` seconds to get its port."""
        ready_s = bind_s + controller_start_s(ledger_bytes(self._run_dir) + journal_bytes(self._run_dir))
        command = [sys.executable, RUN_MODULE, "flowrt.launcher.controller_main"]
        command += ["--config", str(self._config_path), *flags]
        for left in reversed(range(self._config.supervisor.max_worker_restarts + 1)):
            child, address = await self._children.start_ready("controller", command, ready_s)
            if address:
                return child, address
            code = await child.wait_exit(READY_S)
            if code >= 0 or not left:  # only a controller that was killed before it listened is tried again
                break
            await pause(self._config.supervisor.backoff_s)
        if code == EXIT_BAD_INPUT:
            raise ConfigError(child.last_error())
        raise FlowError(child.log_tail())

    async def _await_controller(self, controller: Child, observer: Observer) -> tuple[int, str]:
        """Wait for a controller's end, and kill it if it hangs; returns its exit code and a description of the hang."""
        try:
            return await controller.wait_exit(observer.liveness), ""
        except WaitExpired as expired:
            if observer.end_reason:  # the run has ended; the controller waits a limited time for workers to leave
                with contextlib.suppress(WaitExpired):
                    return await controller.wait_exit(CONTROLLER_EXIT_S), ""
            controller.process.kill()
            hang = f"the controller does not respond: {expired}; its log: {controller.log}"
            return await controller.wait_exit(READY_S), hang

    async def _watch(
        self,
        worker: Child,
        words: list[str],
        supervisor: Supervisor | None,
        observer: Observer,
        vacancies: Vacancies,
    ) -> None:
        """Supervise a worker until it is not restarted any more; end the run, with the worker's error, if it failed.

        A trainer that exits with 0 without having joined the run has failed, too: its launch command starts nothing.
        """
        if supervisor is not None:
            try:
                worker = await supervisor.supervise(worker, words)
            except FlowError as error:
                observer.end_run(str(error), EXIT_FAILED)
                return
        code = await worker.wait_exit(RUN)
        if self._signals.preempted and supervisor is not None:
            return  # terminated with the whole job; the run ends when the trainer has saved
        if code < 0 and not self._failure and not self._signals.preempted:
            # Other workers fail as a consequence and may report first; only the launcher knows which one was killed.
            self._failure = worker.log_tail()
        if code == EXIT_BAD_INPUT:
            observer.end_run(worker.last_error(), EXIT_BAD_INPUT)
        elif code != 0:
            observer.end_run(worker.log_tail(), EXIT_FAILED)
        elif supervisor is None and await vacancies.is_missed(worker.name) and not has_joined(self._run_dir, TRAINER):
            observer.end_run(
                f"{worker.name} ended with exit code 0 and has not joined the run; its command was "
                f"`{shlex.join(words)}`; see its log {worker.log}",
                EXIT_FAILED,
            )

    async def _start_rendezvous(self, address: str) -> str:
        """Start the rendezvous store for torchruns of several hosts; returns HOST:PORT, empty for one host."""
        if self._config.trainer.nodes == 1:
            return ""
        host = parse_address(address).host
        command = [sys.executable, RUN_MODULE, "flowrt.ranks.rendezvous", "--host", host]
        self._rendezvous, store_address = await self._children.start_ready("rendezvous", command, READY_S)
        if not store_address:
            await self._rendezvous.wait_exit(READY_S)
            raise FlowError(self._rendezvous.log_tail())
        return store_address

    def _remove_ranks_dir(self) -> None:
        """Delete the files of killed torchruns; to be called while no torchrun of this run is alive."""
        shutil.rmtree(ranks_dir(self._run_dir), ignore_errors=True)

    def _restore_run_dir(self) -> None:
        """Restore the state of the run directory before this run: empty or missing."""
        shutil.rmtree(self._run_dir)
        if not self._created_dir:
            self._run_dir.mkdir(mode=0o700)

    async def _print_summary(self, code: int) -> None:
        """Print the summary, the path of the run's page, and the reason of a failure."""
        summary = read_summary(self._run_dir)
        if summary is not None:
            if self._config.eval.only:
                for name, results in summary["evaluations"].items():
                    self._console.print(results_text(name, results), highlight=False, soft_wrap=True)
            elif summary["steps"]:
                self._console.print(summary_table(summary, self._prepared_s))
                self._console.print(await write_page(self._run_dir), highlight=False, markup=False, soft_wrap=True)
            self._end_reason = summary["reason"]
        self._failure = self._failure or (self._end_reason if code != EXIT_OK else "")
        if self._failure:
            text = f"flowrt: {self._failure}{continuation(self._failure, self._run_dir, self._config.steps)}"
            self._console.print(text, style="red", highlight=False, markup=False, soft_wrap=True)


def continuation(failure: str, run_dir: Path, steps: int) -> str:
    """The end of the last line of a run that did not complete its ``steps``: the command that continues it.

    Empty without a checkpoint, and if the text of the failure has the command.
    """
    saved = max(checkpoint_steps(run_dir), default=0)
    if not saved or "flowrt resume" in failure:
        return ""
    return f"; continue from step {saved} of {steps}: flowrt resume {shlex.quote(str(run_dir))}"
