"""The supervisor: which processes it restarts, its back-off, and its restart limit."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrt.launcher import supervision as module
from flowrt.launcher.processes import Children
from flowrt.launcher.supervision import LATE_STATUSES, RestartWindow, Supervisor, Vacancies
from flowrt.recipes.config import SupervisorConfig


async def never_missed(name: str) -> bool:
    return False


def no_results(name: str) -> bool:
    return False


async def has_left(name: str, on_late: Callable[[], None]) -> None:
    pass


async def test_the_back_off_doubles_up_to_the_restart_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def record_pause(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(module, "pause", record_pause)
    children, messages = Children(tmp_path, {}), list[str]()
    child = await children.start("reward", [sys.executable, "-c", "raise SystemExit(3)"])
    supervisor = Supervisor(
        children,
        SupervisorConfig(max_worker_restarts=3, backoff_s=0.25, window_s=300.0),
        messages.append,
        is_missed=never_missed,
        take_results=no_results,
        wait_left=has_left,
    )
    assert await asyncio.wait_for(child.process.wait(), 30) == 3
    assert [await supervisor.may_restart(child) for _ in range(4)] == [True, True, True, False]
    assert waits == [0.25, 0.5, 1.0]
    assert all("reward exited with exit code 3: restarting in" in line for line in messages)
    without_window = Supervisor(
        children,
        SupervisorConfig(max_worker_restarts=1, backoff_s=0.25, window_s=0.0),
        messages.append,
        is_missed=never_missed,
        take_results=no_results,
        wait_left=has_left,
    )
    assert [await without_window.may_restart(child) for _ in range(3)] == [True, True, True], (
        "no exit lies within the window"
    )


async def test_a_worker_gets_its_restarts_back_after_a_healthy_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def record_pause(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(module, "pause", record_pause)
    children, now = Children(tmp_path, {}), [0.0]
    child = await children.start("reward", [sys.executable, "-c", "raise SystemExit(3)"])
    assert await asyncio.wait_for(child.process.wait(), 30) == 3
    supervisor = Supervisor(
        children,
        SupervisorConfig(max_worker_restarts=2, backoff_s=0.25, window_s=300.0),
        lambda _: None,
        is_missed=never_missed,
        take_results=no_results,
        wait_left=has_left,
        clock=lambda: now[0],
    )
    for _ in range(20):
        assert [await supervisor.may_restart(child) for _ in range(3)] == [True, True, False]
        now[0] += 301.0
    assert waits == [0.25, 0.5] * 20


def test_the_delay_of_many_restarts_is_bounded() -> None:
    restarts = RestartWindow(10_000, 300.0, lambda: 0.0)
    delays = [restarts.take(0.5, 2) for _ in range(10_000)]
    assert delays[:9] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert delays[-1] == 60.0
    assert restarts.take(0.5, 2) is None
    assert [RestartWindow(2, 1.0, lambda: 0.0).take(90.0, 2) for _ in range(1)] == [90.0]


COUNT_STARTS = (
    "import pathlib, sys; p = pathlib.Path(sys.argv[1]); n = len(p.read_text()); p.write_text('x' * (n + 1)); "
)


async def supervised(
    tmp_path: Path, code: str, missed: bool = False, results: bool = False
) -> tuple[int, int, list[str]]:
    """Exit code of the last process that ran this code, the number of starts, and the messages."""
    count, messages = tmp_path / "count", list[str]()
    count.write_text("")
    children = Children(tmp_path, {})

    async def is_missed(name: str) -> bool:
        return missed

    config = SupervisorConfig(max_worker_restarts=3, backoff_s=0.01)
    supervisor = Supervisor(
        children,
        config,
        messages.append,
        is_missed=is_missed,
        take_results=lambda name: results,
        wait_left=has_left,
    )
    words = [sys.executable, "-c", COUNT_STARTS + code, str(count)]
    child = await asyncio.wait_for(supervisor.supervise(await children.start("reward", words), words), 30)
    assert child.process.returncode is not None
    return child.process.returncode, len(count.read_text()), messages


async def test_the_same_failure_twice_ends_the_restarts(tmp_path: Path) -> None:
    code, starts, messages = await supervised(tmp_path, "sys.exit(f'no compiler for process {n}')")
    assert (code, starts) == (1, 2)
    assert messages[-1] == "reward exited with exit code 1 for the same reason as before: not restarting it"


async def test_the_same_failure_after_results_is_restarted_up_to_the_limit(tmp_path: Path) -> None:
    assert (await supervised(tmp_path, "sys.exit('the server is gone')", results=True))[:2] == (1, 4)


@pytest.mark.parametrize(
    ("reason", "starts"),
    [("protocol violation: it says OfferAccepted {n}", 2), ("not heard of for {n} s", 4)],
)
async def test_the_same_protocol_violation_twice_ends_the_restarts(tmp_path: Path, reason: str, starts: int) -> None:
    code = f"print(f'2026-11-23 10:00:0{{n}} INFO stopped: you were dismissed: {reason}'); sys.exit(4)"
    assert (await supervised(tmp_path, code))[:2] == (4, starts)


async def test_failures_that_differ_in_a_memory_address_are_the_same(tmp_path: Path) -> None:
    assert (await supervised(tmp_path, "sys.exit(f'no attribute of <object at 0x7f{n}a{\"bcde\"[n]}>')"))[:2] == (1, 2)


async def test_different_failures_are_restarted_up_to_the_limit(tmp_path: Path) -> None:
    assert (await supervised(tmp_path, "sys.exit('abcd'[n])"))[:2] == (1, 4)


async def test_a_usage_error_is_not_restarted(tmp_path: Path) -> None:
    assert (await supervised(tmp_path, "sys.exit(2)"))[:2] == (2, 1)


async def test_killed_processes_are_restarted_up_to_the_limit(tmp_path: Path) -> None:
    assert (await supervised(tmp_path, "import os; os.kill(os.getpid(), 9)"))[:2] == (-9, 4)


@pytest.mark.parametrize(("missed", "starts"), [(False, 1), (True, 4)])
async def test_a_worker_that_exits_normally_is_replaced_only_if_missed(
    tmp_path: Path, missed: bool, starts: int
) -> None:
    assert (await supervised(tmp_path, "sys.exit(0)", missed))[:2] == (0, starts)


RUNNING: dict[str, Any] = {"ended": None, "drained": [], "vacancies": {}, "with_results": []}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (RUNNING, True),
        (RUNNING | {"drained": ["rollout-0"]}, False),
        (RUNNING | {"drained": ["rollout-0"], "vacancies": {"rollout": [1.0, "left"]}}, True),
        (RUNNING | {"ended": ["complete", 0]}, False),
    ],
)
async def test_the_next_status_decides_whether_a_worker_is_missed(status: dict[str, Any], expected: bool) -> None:
    vacancies = Vacancies({"rollout-0": "rollout"}, lambda: False)
    pending = asyncio.create_task(vacancies.is_missed("rollout-0"))
    await asyncio.sleep(0)
    vacancies.update(status)
    assert await asyncio.wait_for(pending, 60) is expected


async def test_no_worker_is_missed_once_the_run_ends() -> None:
    vacancies = Vacancies({"rollout-0": "rollout"}, lambda: True)
    assert not await asyncio.wait_for(vacancies.is_missed("rollout-0"), 60)


async def test_results_count_once_for_the_process_that_had_them() -> None:
    vacancies = Vacancies({"reward": "reward"}, lambda: False)
    vacancies.update(RUNNING | {"with_results": ["reward"]})
    vacancies.update(RUNNING)  # the worker has left
    assert vacancies.take_results("reward")
    assert not vacancies.take_results("reward")


async def test_a_worker_that_outlives_its_launch_command_is_replaced_only_when_it_has_left(tmp_path: Path) -> None:
    """A broken ssh: the process of this host has ended, and the worker of the other host is in the run."""
    children, messages = Children(tmp_path, {}), list[str]()
    vacancies = Vacancies({"reward-1": "reward"}, lambda: False)
    supervisor = Supervisor(
        children,
        SupervisorConfig(max_worker_restarts=1, backoff_s=0.01),
        messages.append,
        is_missed=vacancies.is_missed,
        take_results=vacancies.take_results,
        wait_left=vacancies.wait_left,
    )
    words = [sys.executable, "-c", "raise SystemExit(255)"]
    ssh = await children.start("reward-1", words)
    supervised = asyncio.create_task(supervisor.supervise(ssh, words))
    assert await asyncio.wait_for(ssh.process.wait(), 30) == 255
    async with asyncio.timeout(30):
        while not messages:
            vacancies.update(RUNNING | {"workers": ["reward-1"]})
            await asyncio.sleep(0)
        assert messages == [
            "reward-1 exited with exit code 255, but its worker is in the run: perhaps ssh or srun has ended and the "
            "worker has not; it works on, and is replaced when it leaves"
        ]
        while not supervised.done():
            vacancies.update(RUNNING | {"workers": []})
            await asyncio.sleep(0.01)
    assert "restarting" in messages[1]
    assert LATE_STATUSES > 1
