"""User-defined roles in a deadlock: the run ends within seconds, and its reason is one sentence."""

import asyncio
import traceback
from dataclasses import replace

import pytest
import torch

from examples import custom_loop as loop
from flowrt import api
from flowrt.errors import EXIT_STALLED, LocalProtocolError, RemoteProtocolError, Stopped

ROLES: dict[str, api.Role] = {
    "source": loop.source,
    "player": loop.player,
    "judge": loop.judge,
    "learner": loop.learner,
}


async def learner_without_finished(session: api.Session) -> None:
    """Trains, but does not report that it has finished."""
    session.finished = lambda: None  # type: ignore[method-assign]
    await loop.learner(session)


async def player_without_applied(session: api.Session) -> None:
    """Never reports its weight version."""
    session.params.applied = lambda *_: None  # type: ignore[method-assign]
    await loop.player(session)


def stop_reason(roles: dict[str, api.Role], settings: api.Settings = loop.SETTINGS) -> str:
    """The reason for which a run with these roles was stopped."""
    with pytest.raises(Stopped) as raised:
        asyncio.run(asyncio.wait_for(api.run_roles(loop.FLOW, settings, loop.POLICIES, roles), 120.0))
    assert raised.value.code == EXIT_STALLED
    return raised.value.reason


@pytest.mark.parametrize("missing", ["player", "judge"])
def test_role_without_a_worker_is_reported_missing(missing: str) -> None:
    reason = stop_reason({name: role for name, role in ROLES.items() if name != missing})
    stage = {"player": "play", "judge": "judge"}[missing]
    assert f"samples are ready for {stage}, and no worker pulls them" in reason


def test_missing_trainer_is_reported() -> None:
    roles = {name: role for name, role in ROLES.items() if name != "learner"}
    reason = stop_reason(roles, replace(loop.SETTINGS, completing_roles=("judge",)))
    assert "samples are ready for learn, and no worker pulls them" in reason


def test_missing_source_is_reported() -> None:
    assert "learner waits" in stop_reason({name: role for name, role in ROLES.items() if name != "source"})


def test_role_that_does_not_report_completion_is_named() -> None:
    settings = replace(loop.SETTINGS, steps=loop.STEPS)
    reason = stop_reason({**ROLES, "learner": learner_without_finished}, settings)
    assert "the run is complete when learner has called session.finished(), and did not" in reason


def test_pull_without_an_applied_version_is_refused_with_the_fix() -> None:
    run = api.run_roles(loop.FLOW, loop.SETTINGS, loop.POLICIES, {**ROLES, "player": player_without_applied})
    with pytest.raises(
        RemoteProtocolError, match=r"call session\.params\.applied\(MODEL, VERSION\) before the first pull"
    ):
        asyncio.run(asyncio.wait_for(run, 120.0))


async def raising_judge(session: api.Session) -> None:
    await session.pull("judge", slots=64)
    raise ValueError("a mistake in a role")


async def judge_of_another_column(session: api.Session) -> None:
    while batch := await session.pull("judge", slots=64):
        await session.commit("judge", batch.slots, batch.leases, inline={"rewards": [0.0] * len(batch)})


async def judge_with_a_tensor(session: api.Session) -> None:
    batch = await session.pull("judge", slots=64)
    await session.commit("judge", batch.slots, batch.leases, {"choice": [torch.zeros(1)] * len(batch)})


@pytest.mark.parametrize(
    ("judge", "kind", "expected"),
    [
        (raising_judge, ValueError, "a mistake in a role"),
        (judge_of_another_column, Stopped, "it brings tensors .* and numbers .'rewards'."),
        (judge_with_a_tensor, LocalProtocolError, "choice"),
    ],
)
def test_exception_of_a_role_is_raised_without_an_exception_group(
    judge: api.Role, kind: type[Exception], expected: str
) -> None:
    run = api.run_roles(loop.FLOW, loop.SETTINGS, loop.POLICIES, {**ROLES, "judge": judge})
    with pytest.raises(kind, match=expected) as raised:
        asyncio.run(asyncio.wait_for(run, 60.0))
    formatted = "".join(traceback.format_exception(raised.value))
    assert "ExceptionGroup" not in formatted
    assert expected in formatted.splitlines()[-1] or kind is Stopped
