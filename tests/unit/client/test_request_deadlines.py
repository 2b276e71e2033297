"""Many deadlines and one timer: each that is not removed expires once and on time."""

import asyncio
import time

from flowrt.client.requests import Deadlines
from flowrt.runtime.waits import wait_until

LIMIT_S = 20.0


def expiry_order(seconds: dict[int, float], removed: set[int]) -> list[int]:
    """Add these deadlines, remove some of them, and wait until the last of the others has expired."""

    async def wait() -> list[int]:
        expired: list[int] = []
        last = asyncio.Event()

        def on_expiry(number: int) -> None:
            expired.append(number)
            if len(expired) == len(seconds) - len(removed):
                last.set()
            if number == 0:
                raise ValueError("an error of the callback")

        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        deadlines = Deadlines(on_expiry)
        for number, limit_s in seconds.items():
            deadlines.add(number, limit_s)
        for number in removed:
            deadlines.remove(number)
        await wait_until(last.wait(), LIMIT_S, "the last deadline", "its timer")
        deadlines.close()
        return expired

    return asyncio.run(wait())


def test_each_deadline_expires_once_and_in_order() -> None:
    assert expiry_order({1: 0.15, 2: 0.05, 3: 0.1}, set()) == [2, 3, 1]


def test_a_removed_deadline_never_expires_and_delays_no_other() -> None:
    assert expiry_order({1: 0.05, 2: 0.1, 3: 0.02}, {3}) == [1, 2]


def test_an_error_in_one_callback_does_not_delay_the_others() -> None:
    assert expiry_order({0: 0.05, 1: 0.05, 2: 0.05}, set()) == [0, 1, 2]


def test_no_deadline_expires_after_close() -> None:
    async def wait() -> list[int]:
        expired: list[int] = []
        deadlines, other = Deadlines(expired.append), asyncio.Event()
        deadlines.add(1, 0.01)
        deadlines.close()
        asyncio.get_running_loop().call_later(0.05, other.set)
        await wait_until(other.wait(), LIMIT_S, "a later timer", "the loop")
        return expired

    assert asyncio.run(wait()) == []


def test_a_deadline_does_not_contain_time_in_which_the_process_did_not_run() -> None:
    async def wait() -> list[int]:
        expired: list[int] = []
        answered = asyncio.Event()
        deadlines = Deadlines(expired.append)
        deadlines.add(1, 1.0)

        def answer() -> None:
            deadlines.remove(1)
            answered.set()

        loop = asyncio.get_running_loop()
        loop.call_later(0.01, time.sleep, 2.5)  # the process is stopped, and the answer comes right after
        loop.call_later(2.6, answer)
        await wait_until(answered.wait(), LIMIT_S, "the answer", "the loop")
        deadlines.close()
        return expired

    assert asyncio.run(wait()) == []
