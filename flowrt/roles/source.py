"""The source role: offers the task's prompts as groups, and evaluates before and after training."""

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import AutoConfig

from flowrt.client.session import Session
from flowrt.engines.hf import load_tokenizer
from flowrt.engines.prompts import PromptEncoder
from flowrt.ids import SOURCE
from flowrt.protocol.prompt_numbers import prompt_number
from flowrt.protocol.records import unpack
from flowrt.recipes.config import RunConfig
from flowrt.recipes.data.mixture import Place, SetSize, mixture
from flowrt.recipes.grpo import EVAL, TRAIN
from flowrt.recipes.prompt_limits import prompt_limits
from flowrt.recipes.run_dir import model_dir
from flowrt.recipes.tasks.base import Example, TrainingSet
from flowrt.recipes.tasks.registry import task_of
from flowrt.roles.main import main

LATEST = -1
"""As a minimum version: the version that is latest when the offer arrives."""


async def run(session: Session, config: RunConfig) -> None:
    """Evaluate, offer each epoch's problems in seeded order until the run needs no more, evaluate again."""
    task = task_of(config)
    columns = PromptColumns(config)
    held_out = [problem for problem in task.held_out_problems() if columns(problem) is not None]
    known = dict(session.welcome.position.numbers)
    if held_out and "eval_first" not in known:
        session.report({"eval_first": await evaluate(session, columns, held_out, min_version=0, epoch=0)})
    await offer_all(session, config, columns, task.training_sets())
    if held_out:
        session.report({"eval_last": await evaluate(session, columns, held_out, min_version=LATEST, epoch=1)})
    session.finished()


class PromptColumns:
    """Converts problems to group columns."""

    def __init__(self, config: RunConfig) -> None:
        path = model_dir(config)
        self._encode = PromptEncoder(load_tokenizer(path), config.data.prompt_format)
        self._most = sys.maxsize
        if config.data.overlong == "drop":
            model = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
            self._most = prompt_limits(config, model).most

    def __call__(self, problem: Example) -> dict[str, torch.Tensor] | None:
        """The columns of one problem: ``prompt``, tokens [L] int32, and ``answer``, its UTF-8 bytes [B] uint8.

        None if the prompt is too long and is left out (``data.overlong``).
        """
        tokens = self._encode(problem.prompt, problem.messages)
        if len(tokens) > self._most:
            return None
        return {
            "prompt": torch.tensor(tokens, dtype=torch.int32),
            "answer": torch.tensor(list(problem.answer.encode()), dtype=torch.uint8),
        }


@dataclass(frozen=True, slots=True)
class _Offer:
    """A prompt of the order, and what is offered of it; None if a resumed run has consumed it."""

    number: int
    epoch: int
    made: dict[str, torch.Tensor] | None


async def offer_all(
    session: Session,
    config: RunConfig,
    columns: Callable[[Example], dict[str, torch.Tensor] | None],
    sets: Sequence[TrainingSet],
) -> None:
    """Offer prompts until the run needs no more, with ``prompts_per_step`` offers always pending at the controller.

    Prompts for which ``columns`` has nothing are left out, and the next one of their set takes their place.

    A resumed run skips the prompts it has consumed and offers the others in their original order.
    """
    consumed = unpack(session.welcome.position.passed)

    def offer(place: Place) -> _Offer | None:
        number = prompt_number(place.data_set, place.row)
        if number in consumed.get(place.epoch, ()):
            return _Offer(number, place.epoch, None)
        made = columns(sets[place.data_set].problems[place.row])
        return None if made is None else _Offer(number, place.epoch, made)

    sizes = [SetSize(one.name, one.weight, len(one.problems), one.difficulties) for one in sets]
    seed = config.seed if config.data.order == "shuffled" else None
    pending: deque[asyncio.Task[int | None]] = deque()
    try:
        for one in mixture(sizes, seed, config.data.epochs, offer):
            if one.made is None:
                continue
            accepted = session.offer(TRAIN, one.number, one.epoch, config.group_size, one.made)
            pending.append(asyncio.create_task(accepted))
            while len(pending) >= config.prompts_per_step:
                if await pending.popleft() is None:
                    return
        while pending:
            await pending.popleft()
        # All prompts are open. One more offer returns when the last step has been trained.
        session.exhausted(TRAIN)
        spare = next(made for one in sets for problem in one.problems if (made := columns(problem)) is not None)
        await session.offer(TRAIN, 0, config.data.epochs, config.group_size, spare)
    finally:
        for task in pending:
            task.cancel()


async def evaluate(
    session: Session, columns: PromptColumns, problems: Sequence[Example], min_version: int, epoch: int
) -> float:
    """Mean reward of greedy responses to these problems, generated by weights of version >= ``min_version``."""
    offers = [
        session.offer(EVAL, index, epoch, 1, made, min_version)
        for index, problem in enumerate(problems)
        if (made := columns(problem)) is not None
    ]
    async with asyncio.TaskGroup() as group:
        opened = [group.create_task(offer) for offer in offers]
    own_groups = {task.result() for task in opened}
    total = 0.0
    seen = 0
    while seen < len(problems):
        batch = await session.pull("evaluate", slots=len(problems))
        # Groups offered by a source that this one replaces are committed but not counted.
        rewards = [one for one, group in zip(batch.inline["reward"], batch.groups, strict=True) if group in own_groups]
        total += sum(rewards)
        seen += len(rewards)
        await session.commit("evaluate", batch.slots, batch.leases)
    return total / len(problems)


def start() -> None:
    """Entry point of the worker process."""
    main(SOURCE, run)


if __name__ == "__main__":
    start()
