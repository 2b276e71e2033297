"""Real runs for tests: started, watched, stopped, and checked to leave no process and no shared memory behind."""

import dataclasses
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from flowrt.recipes.config_io import defaults, to_toml
from tests.integration.helpers import forked_flowrt
from tests.integration.helpers.forked import run_flowrt, start_fork_server
from tests.integration.helpers.forked_flowrt import ForkedFlowrt, run_module

FLOWRT = forked_flowrt.FLOWRT
LONGEST_SENTENCE = 450
TOKEN = "TOKEN_OF_TEST"  # not FLOWRT_…: those variables are not passed on to servers
POLL_INTERVAL_S = 0.05
BUSY_FACTOR = 6.0
"""The deadlines of tests are for a quiet machine; on a busy one everything may take this many times longer."""


def wait_until(condition: Callable[[], object], deadline_s: float, what: Callable[[], str]) -> None:
    """Return as soon as ``condition`` holds; fail the test with ``what()`` if it does not by the deadline."""
    end_s = time.monotonic() + deadline_s * BUSY_FACTOR
    while not condition():
        assert time.monotonic() < end_s, f"after {deadline_s:.0f} s: {what()}"
        time.sleep(POLL_INTERVAL_S)


class Launch:
    """One `flowrt` command. Every process it starts carries a token in its environment, or is in the directory."""

    def __init__(
        self, arguments: Sequence[str], directory: Path, resume: Path | None = None, new_interpreter: bool = False
    ) -> None:
        """``flowrt run``, or ``flowrt resume`` of a run directory.

        The command is forked from a process with all imports, unless it is to have a ``new_interpreter``.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.run_dir = resume or directory / "run"
        self._token = f"{directory.name}-{os.getpid()}-{time.monotonic_ns()}"
        self._output = directory / "output.txt"
        self._segments_before = _segments()
        self._directory = str(directory.resolve())
        words = [*(("resume",) if resume else ("run", "--run-dir")), str(self.run_dir), *arguments]
        environment = {**os.environ, TOKEN: self._token}
        self._popen: ForkedFlowrt | subprocess.Popen[bytes]
        with self._output.open("wb") as output:
            if not new_interpreter:
                self._popen = ForkedFlowrt(words, directory, environment, output.fileno())
                return
            self._popen = subprocess.Popen(
                [str(FLOWRT), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=directory,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def output(self) -> str:
        """stdout and stderr of the command so far."""
        return self._output.read_text(errors="replace")

    @property
    def words(self) -> str:
        """The output with each run of white space replaced by one space: lines may be folded anywhere."""
        return " ".join(self.output.split())

    def log(self, worker: str) -> str:
        path = self.run_dir / "logs" / f"{worker}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def processes(self) -> list[psutil.Process]:
        """Every running process that descends from this command."""
        members = []
        for process in psutil.process_iter():
            try:
                # A forked process shows the environment of the one that it was forked from.
                is_own = process.environ().get(TOKEN) == self._token or process.cwd() == self._directory
                if is_own and process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue
        return members

    def find(self, *words: str) -> list[psutil.Process]:
        """The running processes whose command line has all these words."""
        matches = []
        for process in self.processes():
            try:
                line = " ".join(process.cmdline()).split()  # a forked process has it as one string
            except psutil.NoSuchProcess:
                continue
            if all(word in line for word in words):
                matches.append(process)
        return matches

    def wait_for(self, condition: Callable[[], object], what: str, deadline_s: float = 60.0) -> None:
        """Wait for something to happen in the run; an end of the command before that fails the test."""
        happened = False

        def is_over() -> bool:
            nonlocal happened
            has_ended = self._popen.poll() is not None  # before the condition, which may become true at the end
            happened = bool(condition())
            return happened or has_ended

        wait_until(is_over, deadline_s, lambda: f"no {what}\n{self.output}")
        assert happened, f"the command ended with {self._popen.returncode} before {what}\n{self.output}"

    def wait_for_training(self) -> None:
        """Wait until an optimiser step is in metrics.jsonl."""
        metrics = self.run_dir / "metrics.jsonl"
        self.wait_for(lambda: metrics.is_file() and metrics.stat().st_size, "first step")

    def signal(self, number: signal.Signals, process: psutil.Process | None = None) -> None:
        """Send a signal to a process of the run, by default to the command itself."""
        os.kill(self.pid if process is None else process.pid, number)

    def wait(self, deadline_s: float) -> int:
        """The exit code of the command."""
        try:
            code = self._popen.wait(deadline_s * BUSY_FACTOR)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {deadline_s:.0f} s\n{self.output}")
        return code

    def assert_gone(self, within_s: float) -> None:
        """Every process of the run ends, and no shared memory is left."""
        wait_until(lambda: not self.processes(), within_s, lambda: f"still there: {_names(self.processes())}")
        wait_until(lambda: not self._leaked(), 5.0, lambda: f"shared memory left: {self._leaked()}")

    def kill_all(self, processes: Sequence[psutil.Process] | None = None) -> None:
        """Send SIGKILL to every process of the run, or to those in ``processes``, which saves the time of a search."""
        for process in self.processes() if processes is None else processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._popen.wait(10.0 * BUSY_FACTOR)
        wait_until(lambda: not self.processes(), 10.0, lambda: f"still there: {_names(self.processes())}")

    def close(self) -> None:
        """Kill the remaining processes, whatever the result of the test."""
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._popen.wait(10.0 * BUSY_FACTOR)

    def _leaked(self) -> set[str]:
        """New shared-memory segments that no running process uses (other runs share this machine)."""
        new = _segments() - self._segments_before
        return {name for name in new if not _used(f"/dev/shm/{name}")}


def _segments() -> set[str]:
    """Shared memory; without the semaphores of multiprocessing, which flowrt does not use and other programs leave."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def _used(path: str) -> bool:
    for process in psutil.process_iter():
        try:
            if path in Path(f"/proc/{process.pid}/maps").read_text():
                return True
        except OSError:
            continue
    return False


def _names(processes: list[psutil.Process]) -> list[str]:
    names = []
    for process in processes:
        try:
            names.append(f"{process.pid} {' '.join(process.cmdline())}")
        except psutil.NoSuchProcess:
            continue
    return names


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Launch]]:
    """Start ``flowrt run --run-dir FRESH ARGUMENTS``, or ``flowrt resume RUN ARGUMENTS``.

    Processes that remain after the module's tests are killed.
    """
    launched: list[Launch] = []

    def start(*arguments: str, resume: Path | None = None, new_interpreter: bool = False) -> Launch:
        # At most one run at a time: these machines have few cores.
        for earlier in launched:
            earlier.close()
        launched.append(Launch(arguments, tmp_path_factory.mktemp("launch"), resume, new_interpreter))
        return launched[-1]

    yield start
    for run in launched:
        run.close()


def prepare(run_dir: Path, **sft: int) -> Path:
    """A tiny model with its tokenizer, as the launcher builds it."""
    base = defaults("arithmetic")
    config = dataclasses.replace(
        base,
        run_dir=str(run_dir),
        build=dataclasses.replace(base.build, hidden_size=64, layers=1, heads=2, intermediate_size=128),
        sft=dataclasses.replace(base.sft, answer_only_steps=0, **sft),
    )
    path = run_dir / "config.toml"
    path.write_text(to_toml(config))
    built = run_module("flowrt.launcher.build_model", "--config", str(path), timeout_s=300.0)
    assert built.returncode == 0, built.stdout
    return run_dir / "model"


@pytest.fixture(scope="session")
def untrained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without supervised fine-tuning."""
    return prepare(tmp_path_factory.mktemp("prepared"), steps=0)


@pytest.fixture(scope="session")
def sft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model after a short SFT: some of its answers are right, so that rewards differ."""
    return prepare(tmp_path_factory.mktemp("fine_tuned"), steps=60, eval_prompts=8)


class Refusal:
    """The result of a command with bad input."""

    def __init__(self, completed: subprocess.CompletedProcess[str]) -> None:
        self.code = completed.returncode
        self.stdout = completed.stdout
        self.stderr = completed.stderr

    def sentence(self) -> str:
        """The one line on stderr."""
        assert self.code == 2, self.stderr
        lines = self.stderr.splitlines()
        assert len(lines) == 1, self.stderr
        assert lines[0].startswith("flowrt: ")
        assert len(lines[0]) < LONGEST_SENTENCE
        return lines[0]


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Start the fork server before any test changes the environment, by which its own processes are found."""
    start_fork_server()


@pytest.fixture
def refused(fork_server: None, tmp_path: Path) -> Callable[..., Refusal]:
    """Run ``flowrt run ARGUMENTS --run-dir FRESH``; it must leave no file behind."""

    def run(*arguments: str, run_dir: Path | None = None, loads_model: bool = False) -> Refusal:
        before = tree(tmp_path)
        words = ["run", *arguments, "--run-dir", str(run_dir or tmp_path / "run")]
        completed = run_flowrt(words, tmp_path, loads_model=loads_model)
        assert "Traceback" not in completed.stderr, completed.stderr
        assert tree(tmp_path) == before
        return Refusal(completed)

    return run


def tree(path: Path) -> list[str]:
    """The files below a directory, without what Python keeps of modules that it has compiled."""
    return sorted(str(item.relative_to(path)) for item in path.rglob("*") if "__pycache__" not in item.parts)


@pytest.fixture
def model_shell(tmp_path: Path) -> str:
    """A directory with the file names of a model, for runs that end before the model is loaded."""
    path = tmp_path / "shell"
    path.mkdir()
    (path / "config.json").write_text("{}")
    header = b'{"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    (path / "tokenizer.json").write_text("{}")
    return str(path)


@pytest.fixture
def held_port() -> Iterator[int]:
    """A local port with a listener that sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        yield holder.getsockname()[1]
