"""Evaluations over real sockets: over restarts of the controller each answer counts once; of any size."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrt import api
from flowrt.client.session import Session
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import parse
from flowrt.roles import evaluation
from flowrt.roles.evaluation import EvalSet, Evaluations
from tests.integration.test_controller_reconnect import Controllers

SAMPLES, PROMPTS = 4, 3
REWARDS = [(prompt * SAMPLES + member) / (PROMPTS * SAMPLES) for prompt in range(PROMPTS) for member in range(SAMPLES)]


@pytest.fixture
def controllers(tmp_path: Path) -> Iterator[Controllers]:
    controllers = Controllers(tmp_path, "eval")
    yield controllers
    controllers.kill()


def eval_config() -> RunConfig:
    return parse(["--eval.samples", str(SAMPLES), "--eval.temperature", "1.0"])


async def generate(session: Session) -> None:
    """Generate two answers at a time; each has its place in the evaluation as its only token."""
    session.params.applied("policy", 0)
    while True:
        batch = await session.pull("rollout", slots=2)
        grant = batch.grant
        places = [
            prompt % PROMPTS * SAMPLES + member for prompt, member in zip(grant.prompts, grant.members, strict=True)
        ]
        tensors = {"response": [torch.tensor([float(place)]) for place in places]}
        inline = {"truncated": [0.0] * len(batch)}
        await session.commit("rollout", batch.slots, batch.leases, tensors, inline, [(0, 1)] * len(batch))


async def reward(session: Session) -> None:
    while True:
        batch = await session.pull("reward", slots=2)
        rewards = [REWARDS[int(response)] for response in batch.tensors["response"]]
        await session.commit("reward", batch.slots, batch.leases, inline={"reward": rewards})


def restarting(
    controllers: Controllers, commit: Callable[..., Awaitable[Any]], before: int, after: int
) -> Callable[..., Awaitable[Any]]:
    """The commit of a session, during which the controller restarts: before the call ``before``, after ``after``."""
    calls = 0

    async def restart_and_commit(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == before:
            await controllers.restart()
        answer = await commit(*arguments)
        if calls == after:
            await controllers.restart()
        return answer

    return restart_and_commit


@pytest.mark.slow
async def test_answers_count_once_over_restarts_of_the_controller(
    controllers: Controllers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that a restart refuses is granted again: the answers must not be counted twice, and none is missing."""
    await controllers.start()
    source, rollout, scorer, trainer = [
        await api.connect(controllers.address, n, n, 20) for n in ("source", "rollout", "reward", "trainer")
    ]
    monkeypatch.setattr(source, "commit", restarting(controllers, source.commit, before=1, after=3))
    reported: list[tuple[str, int, dict[str, float]]] = []
    monkeypatch.setattr(source, "evaluated", lambda *result: reported.append(result))
    prompts = {"prompt": [torch.arange(2, dtype=torch.int32)] * PROMPTS}
    evaluations = Evaluations(source, eval_config(), [EvalSet("held_out", tuple(range(PROMPTS)), prompts)])
    working = [asyncio.create_task(generate(rollout)), asyncio.create_task(reward(scorer))]
    try:
        await asyncio.wait_for(evaluations.at_start(), 120)
    finally:
        for task in working:
            task.cancel()
        await asyncio.wait(working)
    [(name, version, numbers)] = reported
    assert (name, version) == ("held_out", 0)
    assert numbers[f"avg@{SAMPLES}"] == pytest.approx(sum(REWARDS) / len(REWARDS))
    assert numbers["length"] == 1.0
    for session in (source, rollout, scorer, trainer):
        await session.close()


@pytest.mark.slow
async def test_an_evaluation_may_be_larger_than_what_the_controller_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2 sets of 12 answers the controller holds 8 at a time: each is offered in parts of 4."""
    monkeypatch.setattr(evaluation, "MAX_PART_ROWS", SAMPLES)
    controllers = Controllers(tmp_path, "eval", f"budget={2 * SAMPLES}")
    try:
        await controllers.start()
        sessions = [
            await api.connect(controllers.address, n, n, 20) for n in ("source", "rollout", "reward", "trainer")
        ]
        source, rollout, scorer, _ = sessions
        reported: dict[str, dict[str, float]] = {}
        monkeypatch.setattr(source, "evaluated", lambda name, _, numbers: reported.update({name: numbers}))
        prompts = {"prompt": [torch.arange(2, dtype=torch.int32)] * PROMPTS}
        sets = [
            EvalSet(name, tuple(range(first, first + PROMPTS)), prompts)
            for name, first in (("a", 0), ("b", 3 * PROMPTS))
        ]
        working = [asyncio.create_task(generate(rollout)), asyncio.create_task(reward(scorer))]
        try:
            await asyncio.wait_for(Evaluations(source, eval_config(), sets).at_start(), 120)
        finally:
            for task in working:
                task.cancel()
            await asyncio.wait(working)
            for session in sessions:
                await session.close()
    finally:
        controllers.kill()
    assert {name: numbers[f"avg@{SAMPLES}"] for name, numbers in reported.items()} == {
        name: pytest.approx(sum(REWARDS) / len(REWARDS)) for name in ("a", "b")
    }
