"""The prompt source: offers problems as groups, evaluates before and after."""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from flowrt.workers.entry import main

from flowrt.client.session import Session
from flowrt.engines.checkpoint import load_tokenizer
from flowrt.recipes.config import RunConfig
from flowrt.recipes.grpo import EVAL, TRAIN
from flowrt.recipes.paths import model_dir
from flowrt.recipes.problems import Problem
from flowrt.recipes.subjects import subject
from flowrt.wire.positions import unpack

NEWEST = -1


async def run(session: Session, config: RunConfig) -> None:
    """Evaluate, offer every epoch's problems in a seeded order until the run has enough, evaluate again."""
    subject_ = subject(config)
    columns = Columns(load_tokenizer(model_dir(config)))
    held_out = subject_.held_out_problems()
    known = dict(session.welcome.position.numbers)
    if held_out and "eval_first" not in known:
        session.report({"eval_first": await evaluate(session, columns, held_out, at_least=0, epoch=0)})
    await offer_all(session, config, columns, subject_.training_problems())
    if held_out:
        session.report({"eval_last": await evaluate(session, columns, held_out, at_least=NEWEST, epoch=1)})
    session.finished()


class Columns:
    """Problems as tensors."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, problem: Problem) -> dict[str, torch.Tensor]:
        """The group columns of a problem: prompt tokens (int32), answer as UTF-8 bytes (uint8)."""
        tokens = self._tokenizer(problem.prompt)["input_ids"]
        return {
            "prompt": torch.tensor(tokens, dtype=torch.int32),
            "answer": torch.tensor(list(problem.answer.encode()), dtype=torch.uint8),
        }


async def offer_all(
    session: Session,
    config: RunConfig,
    columns: Callable[[Problem], dict[str, torch.Tensor]],
    problems: Sequence[Problem],
) -> None:
    """Offer prompts until the run needs no more; some always wait at the controller, so opening needs no round trip.

    Those that a resumed run is done with are passed over; the others come in the order that they would have come in.
    """
    passed = unpack(session.welcome.position.passed)
    waiting: deque[asyncio.Task[int | None]] = deque()
    epoch = 0
    try:
        while config.data.epochs == 0 or epoch < config.data.epochs:
            order = list(range(len(problems)))
            random.Random(f"order {config.seed} {epoch}").shuffle(order)
            done = passed.get(epoch, frozenset())
            for prompt in order:
                if prompt in done:
                    continue
                offer = session.offer(TRAIN, prompt, epoch, config.group_size, columns(problems[prompt]))
                waiting.append(asyncio.create_task(offer))
                while len(waiting) >= config.prompts_per_step:
                    if await waiting.popleft() is None:
                        return
            epoch += 1
        while waiting:
            await waiting.popleft()
        # Everything is open. From here on an offer only asks to be told when the last step has been trained.
        session.exhausted(TRAIN)
        await session.offer(TRAIN, 0, epoch, config.group_size, columns(problems[0]))
    finally:
        for task in waiting:
            task.cancel()


async def evaluate(session: Session, columns: Columns, problems: Sequence[Problem], at_least: int, epoch: int) -> float:
    """Mean reward of greedy answers to these problems by weights of version ``at_least`` or newer."""
    offers = [
        session.offer(EVAL, index, epoch, 1, columns(problem), at_least) for index, problem in enumerate(problems)
    ]
    async with asyncio.TaskGroup() as group:
        opened = [group.create_task(offer) for offer in offers]
    mine = {task.result() for task in opened}
    total, seen = 0.0, 0
    while seen < len(problems):
        batch = await session.pull("evaluate", slots=len(problems))
        # There may be answers to a source that died, which this one replaces: they are only cleared away.
        rewards = [one for one, group in zip(batch.inline["reward"], batch.groups, strict=True) if group in mine]
        total += sum(rewards)
        seen += len(rewards)
        await session.commit("evaluate", batch.slots, batch.leases)
    return total / len(problems)


if __name__ == "__main__":
    main("source", run)
