"""The supervisor: what it starts again, how long it waits before that, and when it gives up."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrt.launcher import supervision as module
from flowrt.launcher.processes import Children
from flowrt.launcher.supervision import Supervisor, Vacancies
from flowrt.recipes.config import SupervisorConfig


async def never_missed(name: str) -> bool:
    return False


def no_results(name: str) -> bool:
    return False


async def test_each_start_waits_twice_as_long_until_there_were_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def noted(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(module, "pause", noted)
    children, said = Children(tmp_path, {}), list[str]()
    child = await children.start("reward", [sys.executable, "-c", "raise SystemExit(3)"])
    supervisor = Supervisor(
        children,
        SupervisorConfig(max_worker_restarts=3, backoff_s=0.25, window_s=300.0),
        said.append,
        is_missed=never_missed,
        take_results=no_results,
    )
    assert await asyncio.wait_for(child.process.wait(), 30) == 3
    assert [await supervisor.may_restart(child) for _ in range(4)] == [True, True, True, False]
    assert waits == [0.25, 0.5, 1.0]
    assert all("reward exited with exit code 3: restarting in" in line for line in said)
    forgetful = Supervisor(
        children,
        SupervisorConfig(max_worker_restarts=1, backoff_s=0.25, window_s=0.0),
        said.append,
        is_missed=never_missed,
        take_results=no_results,
    )
    assert [await forgetful.may_restart(child) for _ in range(3)] == [True, True, True], (
        "no death is young enough to count"
    )


ONCE_A_LIFE = (
    "import pathlib, sys; p = pathlib.Path(sys.argv[1]); n = len(p.read_text()); p.write_text('x' * (n + 1)); "
)


async def kept(tmp_path: Path, code: str, missed: bool = False, results: bool = False) -> tuple[int, int, list[str]]:
    """Exit code of the last process that ran this code, the number of processes, and what was said."""
    count, said = tmp_path / "count", list[str]()
    count.write_text("")
    children = Children(tmp_path, {})

    async def is_missed(name: str) -> bool:
        return missed

    config = SupervisorConfig(max_worker_restarts=3, backoff_s=0.01)
    supervisor = Supervisor(children, config, said.append, is_missed=is_missed, take_results=lambda name: results)
    words = [sys.executable, "-c", ONCE_A_LIFE + code, str(count)]
    child = await asyncio.wait_for(supervisor.supervise(await children.start("reward", words), words), 30)
    assert child.process.returncode is not None
    return child.process.returncode, len(count.read_text()), said


async def test_the_same_failure_twice_is_not_tried_a_third_time(tmp_path: Path) -> None:
    code, starts, said = await kept(tmp_path, "sys.exit(f'no compiler for process {n}')")
    assert (code, starts) == (1, 2)
    assert said[-1] == "reward exited with exit code 1 for the same reason as before: not restarting it"


async def test_the_same_failure_after_results_is_tried_until_there_were_too_many(tmp_path: Path) -> None:
    assert (await kept(tmp_path, "sys.exit('the server is gone')", results=True))[:2] == (1, 4)


@pytest.mark.parametrize(
    ("reason", "starts"),
    [("protocol violation: it says OfferAccepted {n}", 2), ("not heard of for {n} s", 4)],
)
async def test_a_worker_dismissed_twice_for_the_same_violation_is_not_started_again(
    tmp_path: Path, reason: str, starts: int
) -> None:
    code = f"print(f'2026-11-23 10:00:0{{n}} INFO stopped: you were dismissed: {reason}'); sys.exit(4)"
    assert (await kept(tmp_path, code))[:2] == (4, starts)


async def test_an_address_in_memory_makes_no_other_failure(tmp_path: Path) -> None:
    assert (await kept(tmp_path, "sys.exit(f'no attribute of <object at 0x7f{n}a{\"bcde\"[n]}>')"))[:2] == (1, 2)


async def test_different_failures_are_tried_until_there_were_too_many(tmp_path: Path) -> None:
    assert (await kept(tmp_path, "sys.exit('abcd'[n])"))[:2] == (1, 4)


async def test_bad_input_is_not_tried_again(tmp_path: Path) -> None:
    assert (await kept(tmp_path, "sys.exit(2)"))[:2] == (2, 1)


async def test_a_kill_is_no_reason(tmp_path: Path) -> None:
    assert (await kept(tmp_path, "import os; os.kill(os.getpid(), 9)"))[:2] == (-9, 4)


@pytest.mark.parametrize(("missed", "starts"), [(False, 1), (True, 4)])
async def test_a_worker_that_leaves_in_order_is_replaced_if_it_is_missed(
    tmp_path: Path, missed: bool, starts: int
) -> None:
    assert (await kept(tmp_path, "sys.exit(0)", missed))[:2] == (0, starts)


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
async def test_the_next_status_says_whether_a_worker_is_missed(status: dict[str, Any], expected: bool) -> None:
    vacancies = Vacancies({"rollout-0": "rollout"}, lambda: False)
    asked = asyncio.create_task(vacancies.is_missed("rollout-0"))
    await asyncio.sleep(0)
    vacancies.update(status)
    assert await asyncio.wait_for(asked, 5) is expected


async def test_no_worker_is_missed_once_the_run_ends() -> None:
    vacancies = Vacancies({"rollout-0": "rollout"}, lambda: True)
    assert not await asyncio.wait_for(vacancies.is_missed("rollout-0"), 5)


async def test_results_count_for_the_life_that_had_them() -> None:
    vacancies = Vacancies({"reward": "reward"}, lambda: False)
    vacancies.update(RUNNING | {"with_results": ["reward"]})
    vacancies.update(RUNNING)  # it has left
    assert vacancies.take_results("reward")
    assert not vacancies.take_results("reward")
