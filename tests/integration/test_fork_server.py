"""The fork server: forked processes equal started ones, and a fork server may die, hang, or never be ready."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowrt.launcher.fork_server import parent
from flowrt.launcher.fork_server.parent import ForkedProcess, ForkServer
from flowrt.runtime.interpreter import RUN_MODULE
from tests.integration.conftest import Launch, wait_until

MODULE = "tests.integration.helpers.forked_worker"
COMMAND = [sys.executable, RUN_MODULE, MODULE]
SERVE = (
    "import socket, sys; from flowrt.launcher.fork_server.child import serve; "
    "serve(socket.socket(fileno=int(sys.argv[1])))"
)
SERVE_WITHOUT_TORCH = (
    "import sys, types; devices = types.ModuleType('flowrt.transport.devices'); "
    "devices.cuda_is_here = devices.npu_is_here = lambda: False; sys.modules[devices.__name__] = devices; "
) + SERVE
"""The search for accelerators imports torch, which takes longer than most of these tests."""
TINY = [
    *("--prompts-per-step", "4", "--group-size", "2", "--rollout.max-new-tokens", "4", "--sft.steps", "0"),
    *("--build.hidden-size", "32", "--build.layers", "1", "--build.heads", "2", "--build.intermediate-size", "64"),
    *("--data.eval-prompts", "0"),
]
SHARED = "1"


@contextlib.asynccontextmanager
async def started(folder: Path, program: str = SERVE_WITHOUT_TORCH) -> AsyncIterator[ForkServer]:
    """A real fork server without further imports."""
    command = [sys.executable, "-c", program]
    server = ForkServer(folder / "fork_server.log", {**os.environ, "SHARED": SHARED}, command, ("tests.",))
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def forked(
    server: ForkServer, folder: Path, *arguments: str, fds: list[int] | None = None
) -> ForkedProcess | None:
    command = [*COMMAND, *arguments]
    assert server.can_fork(command)
    with (folder / "log").open("ab") as output:
        return await server.fork(command, {**os.environ, "SHARED": SHARED, "OWN": "2"}, output.fileno(), fds or [])


def reports(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "log").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


async def ended(process: ForkedProcess | None) -> int:
    assert process is not None
    async with asyncio.timeout(20.0):
        return await process.wait()


async def test_forked_process_equals_one_started_by_python(tmp_path: Path) -> None:
    async with started(tmp_path, SERVE) as server:
        for code in (0, 3):
            assert await ended(await forked(server, tmp_path, "exit", str(code))) == code
    first, second = reports(tmp_path)
    assert first["name"] == "__main__"
    assert first["arguments"] == ["exit", "0"]
    assert second["arguments"] == ["exit", "3"]
    assert (first["own"], first["shared"], first["started_with"]) == ("2", SHARED, SHARED)
    assert first["command_line"] == f"{sys.executable} {RUN_MODULE} {MODULE} exit 0"
    assert first["open_fds"] == [0, 1, 2]
    assert first["is_session_leader"]
    for mine, other in zip(first["random"], second["random"], strict=True):
        assert mine != other


async def test_forked_process_ends_like_one_started_by_python(tmp_path: Path) -> None:
    async with started(tmp_path) as server:
        assert await ended(await forked(server, tmp_path, "fail", "own error")) == 1
        assert "ValueError: own error" in (tmp_path / "log").read_text()
        waiting = await forked(server, tmp_path, "wait")
        assert waiting is not None
        assert waiting.returncode is None
        waiting.kill()
        assert await ended(waiting) == -signal.SIGKILL == waiting.returncode


async def test_passed_descriptors_are_open(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    async with started(tmp_path) as server:
        assert await ended(await forked(server, tmp_path, "write", str(write_fd), fds=[write_fd])) == 0
    os.close(write_fd)
    with os.fdopen(read_fd) as reader:
        assert reader.read() == "written\n"


async def test_signals_to_the_whole_job_do_not_end_the_fork_server(tmp_path: Path) -> None:
    """As when a job is preempted: each process gets the signal, and the workers have state to save."""
    async with started(tmp_path) as server:
        waiting = await forked(server, tmp_path, "wait")
        assert waiting is not None
        assert server.process is not None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            server.process.send_signal(number)
        assert await ended(await forked(server, tmp_path, "exit", "0")) == 0
        assert waiting.returncode is None
        for number in (signal.SIGTERM, signal.SIGUSR1):
            process = await forked(server, tmp_path, "wait")
            assert process is not None
            process.send_signal(number)
            assert await ended(process) == -number
        interrupted = await forked(server, tmp_path, "wait")
        assert interrupted is not None
        interrupted.send_signal(signal.SIGINT)
        assert await ended(interrupted) == -signal.SIGINT


EXITED_FIRST = """
import json, socket, subprocess, sys
orders = socket.socket(fileno=int(sys.argv[1]))
orders.send(json.dumps({"unsafe": ""}).encode())
orders.recv(65536)
gone = subprocess.Popen([sys.executable, "-c", ""])
gone.wait()
orders.send(json.dumps({"forked": gone.pid}).encode())
orders.send(json.dumps({"pid": gone.pid, "code": 7}).encode())
orders.recv(1)
"""


async def test_exit_before_the_report_of_the_fork_keeps_the_exit_code(tmp_path: Path) -> None:
    async with started(tmp_path, EXITED_FIRST) as server:
        assert await ended(await forked(server, tmp_path, "exit", "7")) == 7


async def test_concurrent_forks(tmp_path: Path) -> None:
    async with started(tmp_path) as server:
        processes = await asyncio.gather(*(forked(server, tmp_path, "exit", str(code)) for code in range(20)))
        assert [await ended(process) for process in processes] == list(range(20))


async def test_forked_processes_die_with_their_fork_server_which_is_replaced(tmp_path: Path) -> None:
    async with started(tmp_path) as server:
        waiting = await forked(server, tmp_path, "wait")
        first = server.process
        assert first is not None
        assert waiting is not None
        first.kill()
        assert await ended(waiting) == -signal.SIGKILL
        wait_until(lambda: not psutil.pid_exists(waiting.pid), 5.0, lambda: f"{waiting.pid} is alive")
        codes = await asyncio.gather(*(forked(server, tmp_path, "exit", str(code)) for code in (5, 6)))
        assert [await ended(process) for process in codes] == [5, 6]
        assert server.process is not None
        assert server.process.pid != first.pid


async def test_stopped_fork_server_is_replaced_and_deaths_are_still_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(tmp_path) as server:
        first, second = [await forked(server, tmp_path, "wait") for _ in range(2)]
        assert server.process is not None
        assert first is not None
        server.process.send_signal(signal.SIGSTOP)
        first.kill()
        assert await ended(first) == await ended(second) == -signal.SIGKILL
        assert await ended(await forked(server, tmp_path, "exit", "4")) == 4
    async with started(tmp_path) as server:
        assert await ended(await forked(server, tmp_path, "exit", "0")) == 0
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(parent, "FORK_S", 1.0)
            assert await forked(server, tmp_path, "exit", "0") is None, "it answers too late: started with python"
        assert await ended(await forked(server, tmp_path, "exit", "0")) == 0


async def test_a_fork_that_fails_affects_no_other_process(tmp_path: Path) -> None:
    async with started(tmp_path) as server:
        waiting = await forked(server, tmp_path, "wait")
        assert waiting is not None
        assert server.process is not None
        process = psutil.Process(server.process.pid)
        for spare in (0, 1):  # too few for the passed descriptors; then enough, but none to watch the exit
            taken = {int(fd) for fd in os.listdir(f"/proc/{process.pid}/fd")}
            limit = next(limit for limit in itertools.count() if len({*range(limit)} - taken) > spare) - 1
            process.rlimit(psutil.RLIMIT_NOFILE, (limit, 4096))
            assert await forked(server, tmp_path, "exit", "0") is None
        process.rlimit(psutil.RLIMIT_NOFILE, (4096, 4096))
        assert await ended(await forked(server, tmp_path, "exit", "0")) == 0
        assert waiting.returncode is None


async def test_a_process_with_threads_does_not_fork(tmp_path: Path) -> None:
    program = f"import threading; threading.Thread(target=threading.Event().wait, daemon=True).start(); {SERVE}"
    async with started(tmp_path, program) as server:
        assert await forked(server, tmp_path, "exit", "0") is None
        assert not server.can_fork(COMMAND)


async def test_a_fork_server_that_dies_during_its_imports_is_not_used_again(tmp_path: Path) -> None:
    async with started(tmp_path, "raise SystemExit('no torch')") as server:
        assert await forked(server, tmp_path, "exit", "0") is None
        assert not server.can_fork(COMMAND)


@pytest.mark.slow
@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.long)])
def test_workers_are_forked_unless_disabled(launch: Callable[..., Launch], forks: bool) -> None:
    fewest = ("--rollout.workers", "1", "--algorithm.kl.coef", "0")
    run = launch("--steps", "4", *TINY, *fewest, "--launch.use-fork-server", str(forks))
    run.wait_for(lambda: run.find("flowrt.roles.trainer"), "trainer")
    workers = [process for role in ("trainer", "source") for process in run.find(f"flowrt.roles.{role}")]
    parents = {worker.ppid() for worker in workers}
    assert parents == (
        {process.pid for process in run.find("flowrt.launcher.fork_server.child")} if forks else {run.pid}
    )
    assert run.wait(120.0) == 0
    run.assert_gone(5.0)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("moment", ["before the first fork", "while it trains"])
def test_a_run_survives_the_death_of_its_fork_server(launch: Callable[..., Launch], moment: str) -> None:
    run = launch("--steps", "30", "--checkpoint.every", "2", *TINY)
    run.wait_for(lambda: run.find("flowrt.launcher.fork_server.child"), "fork server")
    if moment == "while it trains":
        run.wait_for_training()
    [server] = run.find("flowrt.launcher.fork_server.child")
    run.signal(signal.SIGKILL, server)
    if moment == "while it trains":  # its workers died with it, and are forked again instead of started
        psutil.wait_procs([server], timeout=10.0)
        run.wait_for(lambda: run.find("flowrt.launcher.fork_server.child"), "another fork server")
        run.wait_for(lambda: run.find("flowrt.roles.trainer"), "trainer")
        [other] = run.find("flowrt.launcher.fork_server.child")
        assert {process.ppid() for process in run.find("flowrt.roles.trainer")} == {other.pid}
    assert run.wait(200.0) == 0, run.output
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["prompts_lost"]) == (30, 0)
    assert not run.find("flowrt.")
