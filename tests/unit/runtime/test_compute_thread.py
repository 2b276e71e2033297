"""The thread in which a worker computes on its model."""

import asyncio
import contextvars
import threading

import pytest

from flowrt.runtime.compute_thread import ComputeThread

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("NAME")


async def test_concurrent_calls_run_one_after_the_other_in_one_thread() -> None:
    thread, numbers = ComputeThread(), []

    def call(number: int) -> int:
        numbers.append(number)
        return threading.get_ident()

    threads = await asyncio.gather(*(thread.run(call, number) for number in range(20)))
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()
    assert numbers == list(range(20))


async def test_calls_get_their_arguments_and_context_and_their_errors_are_raised() -> None:
    def arguments(a: int, *, b: int) -> tuple[int, int, str]:
        return a, b, NAME.get()

    thread = ComputeThread()
    NAME.set("pass")
    assert await thread.run(arguments, 1, b=2) == (1, 2, "pass")
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 // 0)


async def test_the_next_call_waits_for_a_cancelled_one() -> None:
    thread, begun, go_on, ended = ComputeThread(), threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        go_on.wait(60.0)
        ended.append("first")

    task = asyncio.create_task(thread.run(first))
    await asyncio.to_thread(begun.wait, 60.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    following = asyncio.create_task(thread.run(ended.append, "second"))
    go_on.set()
    await following
    assert ended == ["first", "second"]
