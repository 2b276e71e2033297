"""Many deadlines and one timer: each that is not dropped comes due once, in its time, whatever becomes of others."""

import asyncio

from flowrt.client.requests import Deadlines
from flowrt.runtime.waits import wait_until

LIMIT_S = 20.0


def due_of(seconds: dict[int, float], dropped: set[int]) -> list[int]:
    """Add these deadlines, drop some of them, and wait until the last of the others has come due."""

    async def wait() -> list[int]:
        came: list[int] = []
        last = asyncio.Event()

        def due(number: int) -> None:
            came.append(number)
            if len(came) == len(seconds) - len(dropped):
                last.set()
            if number == 0:
                raise ValueError("a mistake of whoever is called")

        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        deadlines = Deadlines(due)
        for number, limit_s in seconds.items():
            deadlines.add(number, limit_s)
        for number in dropped:
            deadlines.remove(number)
        await wait_until(last.wait(), LIMIT_S, "the last deadline", "its timer")
        deadlines.close()
        return came

    return asyncio.run(wait())


def test_each_comes_due_once_and_in_its_time() -> None:
    assert due_of({1: 0.15, 2: 0.05, 3: 0.1}, set()) == [2, 3, 1]


def test_what_was_dropped_never_comes_due_and_holds_up_nobody() -> None:
    assert due_of({1: 0.05, 2: 0.1, 3: 0.02}, {3}) == [1, 2]


def test_a_mistake_about_one_does_not_keep_another_waiting() -> None:
    assert due_of({0: 0.05, 1: 0.05, 2: 0.05}, set()) == [0, 1, 2]


def test_nothing_comes_due_after_the_end() -> None:
    async def wait() -> list[int]:
        came: list[int] = []
        deadlines, other = Deadlines(came.append), asyncio.Event()
        deadlines.add(1, 0.01)
        deadlines.close()
        asyncio.get_running_loop().call_later(0.05, other.set)
        await wait_until(other.wait(), LIMIT_S, "a later timer", "the loop")
        return came

    assert asyncio.run(wait()) == []
