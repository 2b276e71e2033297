"""The filter in parallel with the reward role: how the two loops of one worker end."""

import asyncio
from typing import Any, cast

import pytest

from flowrt.client.session import Session
from flowrt.errors import ConfigError, Drained
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import parse
from flowrt.roles import filter as filter_role

SESSION = cast(Session, None)
WITH_FUNCTION = parse(["--algorithm.filter.function", "mine.py"])


def loops(monkeypatch: pytest.MonkeyPatch, reward_error: Exception) -> tuple[Any, list[str]]:
    """A reward loop that ends at once, and a filter loop that commits one group after it."""
    done: list[str] = []
    reward_ended = asyncio.Event()

    async def reward(session: Session, config: RunConfig) -> None:
        reward_ended.set()
        raise reward_error

    async def decide(session: Session, config: RunConfig) -> None:
        await reward_ended.wait()
        await asyncio.to_thread(done.clear)  # like a filter decision: a cancellation would take effect here
        done.append("committed")
        raise Drained("drained")

    monkeypatch.setattr(filter_role, "run", decide)
    return filter_role.with_filter(reward), done


def test_a_drained_worker_commits_the_groups_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        both, done = loops(monkeypatch, Drained("drained"))
        with pytest.raises(Drained):
            await both(SESSION, WITH_FUNCTION)
        assert done == ["committed"]

    asyncio.run(check())


def test_an_error_of_one_loop_cancels_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        both, done = loops(monkeypatch, ConfigError("wrong"))
        with pytest.raises(ExceptionGroup) as raised:
            await both(SESSION, WITH_FUNCTION)
        assert raised.group_contains(ConfigError)
        assert done == []

    asyncio.run(check())


def test_without_a_filter_function_only_the_reward_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        both, done = loops(monkeypatch, Drained("drained"))
        with pytest.raises(Drained):
            await both(SESSION, parse([]))
        assert done == []

    asyncio.run(check())
