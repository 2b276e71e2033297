"""Workers that are forked are as good as those that are started; and their nursery may die, hang, or never come."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from flowrt.launch import nursery as launch_nursery
from flowrt.launch.nursery import Nursery, Nursling

from tests.integration.conftest import Launch, wait_until

MODULE = "tests.integration.nursling"
NURSE = "import socket, sys; from flowrt.workers.nursery import nurse; nurse(socket.socket(fileno=int(sys.argv[1])))"
TINY = [
    *("--prompts-per-step", "4", "--group-size", "2", "--rollout.max-new-tokens", "4", "--warm-start.steps", "0"),
    *("--build.hidden-size", "32", "--build.layers", "1", "--build.heads", "2", "--build.intermediate-size", "64"),
    *("--data.eval-prompts", "0"),
]
SHARED = "1"


@contextlib.asynccontextmanager
async def begun(program: str = NURSE) -> AsyncIterator[Nursery]:
    """A real nursery of nothing but what it needs itself."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "SHARED": SHARED} | launch_nursery.ONE_THREAD
    nursery = Nursery(ours, environment, "tests.")
    with theirs:
        nursery.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, str(theirs.fileno()), launch_nursery.ROOM),
            env=environment,
            pass_fds=(theirs.fileno(),),
        )
    try:
        yield nursery
    finally:
        await nursery.close()


async def forked(nursery: Nursery, folder: Path, *arguments: str, fds: list[int] | None = None) -> Nursling | None:
    words = [sys.executable, "-m", MODULE, *arguments]
    assert nursery.suits(words)
    with (folder / "log").open("ab") as output:
        return await nursery.fork(words, {**os.environ, "SHARED": SHARED, "OWN": "2"}, output.fileno(), fds or [])


def told(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "log").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


async def ended(nursling: Nursling | None) -> int:
    assert nursling is not None
    async with asyncio.timeout(20.0):
        return await nursling.wait()


async def test_a_fork_is_what_python_would_have_started(tmp_path: Path) -> None:
    async with begun() as nursery:
        for code in (0, 3):
            assert await ended(await forked(nursery, tmp_path, "leave", str(code))) == code
    first, second = told(tmp_path)
    assert first["name"] == "__main__"
    assert first["arguments"] == ["leave", "0"]
    assert second["arguments"] == ["leave", "3"]
    assert (first["own"], first["shared"], first["started_with"]) == ("2", SHARED, SHARED)
    assert first["line"] == f"{sys.executable} -m {MODULE} leave 0"
    assert first["open"] == [0, 1, 2]
    assert first["leads"]
    for mine, other in zip(first["chances"], second["chances"], strict=True):
        assert mine != other


async def test_it_ends_as_python_would(tmp_path: Path) -> None:
    async with begun() as nursery:
        assert await ended(await forked(nursery, tmp_path, "fail", "of itself")) == 1
        assert "ValueError: of itself" in (tmp_path / "log").read_text()
        staying = await forked(nursery, tmp_path, "stay")
        assert staying is not None
        assert staying.returncode is None
        staying.kill()
        assert await ended(staying) == -signal.SIGKILL == staying.returncode


async def test_it_is_handed_what_is_open(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    async with begun() as nursery:
        assert await ended(await forked(nursery, tmp_path, "say", str(write_fd), fds=[write_fd])) == 0
    os.close(write_fd)
    with os.fdopen(read_fd) as reader:
        assert reader.read() == "said\n"


async def test_what_a_whole_job_is_sent_does_not_take_the_workers_along(tmp_path: Path) -> None:
    """A job that is preempted: each process is terminated, and the workers have something to save."""
    async with begun() as nursery:
        staying = await forked(nursery, tmp_path, "stay")
        assert staying is not None
        assert nursery.process is not None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            nursery.process.send_signal(number)
        assert await ended(await forked(nursery, tmp_path, "leave", "0")) == 0
        assert staying.returncode is None
        for number in (signal.SIGTERM, signal.SIGUSR1):
            mortal = await forked(nursery, tmp_path, "stay")
            assert mortal is not None
            mortal.send_signal(number)
            assert await ended(mortal) == -number
        interrupted = await forked(nursery, tmp_path, "stay")
        assert interrupted is not None
        interrupted.send_signal(signal.SIGINT)
        assert await ended(interrupted) == 1
    assert "KeyboardInterrupt" in (tmp_path / "log").read_text()


GONE = """
import json, socket, subprocess, sys
orders = socket.socket(fileno=int(sys.argv[1]))
orders.send(json.dumps({"unfit": ""}).encode())
orders.recv(65536)
gone = subprocess.Popen([sys.executable, "-c", ""])
gone.wait()
orders.send(json.dumps({"born": gone.pid}).encode())
orders.send(json.dumps({"pid": gone.pid, "code": 7}).encode())
orders.recv(1)
"""


async def test_who_has_ended_before_its_birth_is_heard_of_has_its_code(tmp_path: Path) -> None:
    async with begun(GONE) as nursery:
        assert await ended(await forked(nursery, tmp_path, "leave", "7")) == 7


async def test_many_at_once(tmp_path: Path) -> None:
    async with begun() as nursery:
        born = await asyncio.gather(*(forked(nursery, tmp_path, "leave", str(code)) for code in range(20)))
        assert [await ended(one) for one in born] == list(range(20))


async def test_whoever_it_forked_dies_with_it_and_it_forks_no_more(tmp_path: Path) -> None:
    async with begun() as nursery:
        staying = await forked(nursery, tmp_path, "stay")
        assert nursery.process is not None
        assert staying is not None
        nursery.process.kill()
        assert await ended(staying) == -signal.SIGKILL
        wait_until(lambda: not psutil.pid_exists(staying.pid), 5.0, lambda: f"{staying.pid} lives on")
        assert not nursery.suits([sys.executable, "-m", MODULE])


async def test_one_that_is_stopped_hides_no_death_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_nursery, "BIRTH_S", 1.0)
    async with begun() as nursery:
        one, two = [await forked(nursery, tmp_path, "stay") for _ in range(2)]
        assert nursery.process is not None
        assert one is not None
        nursery.process.send_signal(signal.SIGSTOP)
        one.kill()
        assert await ended(one) == await ended(two) == -signal.SIGKILL
        assert not nursery.suits([sys.executable, "-m", MODULE])
    async with begun() as nursery:
        assert await ended(await forked(nursery, tmp_path, "leave", "0")) == 0
        assert nursery.process is not None
        nursery.process.send_signal(signal.SIGSTOP)
        assert await forked(nursery, tmp_path, "leave", "0") is None


async def test_what_it_cannot_fork_costs_nobody_else(tmp_path: Path) -> None:
    async with begun() as nursery:
        staying = await forked(nursery, tmp_path, "stay")
        assert staying is not None
        assert nursery.process is not None
        process = psutil.Process(nursery.process.pid)
        for spare in (0, 1):  # what it is handed does not come; then it comes, and no end could be watched
            taken = {int(fd) for fd in os.listdir(f"/proc/{process.pid}/fd")}
            limit = next(limit for limit in itertools.count() if len({*range(limit)} - taken) > spare) - 1
            process.rlimit(psutil.RLIMIT_NOFILE, (limit, 4096))
            assert await forked(nursery, tmp_path, "leave", "0") is None
        process.rlimit(psutil.RLIMIT_NOFILE, (4096, 4096))
        assert await ended(await forked(nursery, tmp_path, "leave", "0")) == 0
        assert staying.returncode is None


async def test_nothing_is_forked_beside_other_threads(tmp_path: Path) -> None:
    program = f"import threading; threading.Thread(target=threading.Event().wait, daemon=True).start(); {NURSE}"
    async with begun(program) as nursery:
        assert await forked(nursery, tmp_path, "leave", "0") is None
        assert not nursery.suits([sys.executable, "-m", MODULE])


async def test_one_that_cannot_begin_is_done_without(tmp_path: Path) -> None:
    async with begun("raise SystemExit('no torch')") as nursery:
        assert await forked(nursery, tmp_path, "leave", "0") is None


@pytest.mark.slow
@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.long)])
def test_workers_of_a_run_are_forked_unless_they_shall_not(launch: Callable[..., Launch], forks: bool) -> None:
    run = launch("--steps", "10", *TINY, "--launch.forked", str(forks))
    run.wait_for(lambda: run.find("flowrt.workers.trainer"), "trainer")
    workers = [one for role in ("trainer", "source") for one in run.find(f"flowrt.workers.{role}")]
    parents = {one.ppid() for one in workers}
    assert parents == ({one.pid for one in run.find("flowrt.workers.nursery")} if forks else {run.pid})
    assert run.wait(120.0) == 0
    run.assert_gone(5.0)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("moment", ["before anybody is forked", "while it trains"])
def test_a_run_outlives_its_nursery(launch: Callable[..., Launch], moment: str) -> None:
    run = launch("--steps", "30", "--checkpoint.every", "2", *TINY)
    run.wait_for(lambda: run.find("flowrt.workers.nursery"), "nursery")
    if moment == "while it trains":
        run.wait_for_training()
    [nursery] = run.find("flowrt.workers.nursery")
    run.signal(signal.SIGKILL, nursery)
    assert run.wait(200.0) == 0, run.output
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["prompts_lost"]) == (30, 0)
    assert not run.find("flowrt.")
