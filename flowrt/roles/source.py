"""The source role: offers the task's prompts as groups, and evaluates before and after training."""

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flowrt.client.session import Session
from flowrt.engines.hf import load_config, load_tokenizer
from flowrt.engines.prompts import PromptEncoders
from flowrt.ids import SOURCE, prompt_number
from flowrt.protocol.messages import unpack
from flowrt.recipes.config import RunConfig
from flowrt.recipes.data.mixture import Place, SetSize, mixture
from flowrt.recipes.eval_sets import eval_sets
from flowrt.recipes.grpo import TRAIN
from flowrt.recipes.prompt_limits import prompt_limits
from flowrt.recipes.run_dir import model_dir
from flowrt.recipes.tasks.base import Example, TrainingSet
from flowrt.recipes.tasks.registry import task_of
from flowrt.roles.evaluation import CANCEL_S, SESSION, Evaluations, eval_sets_of
from flowrt.roles.main import main
from flowrt.runtime.waits import CONTROLLER, cancel_and_wait, wait_any, wait_until

log = logging.getLogger("flowrt")
NO_EPOCH = 2**40
"""Epoch of an offer that is never opened and only waits for the end of the last step."""


async def run(session: Session, config: RunConfig) -> None:
    """Evaluate, offer the prompts of each epoch until the run needs no more, and evaluate again.

    Due versions are evaluated meanwhile; a result that reaches ``eval.stop_at`` ends training.
    """
    with session.timeline.busy("load"):
        task = task_of(config)
        columns = PromptColumns(config)
        sets = task.training_sets()
        evaluations = Evaluations(session, config, eval_sets_of(eval_sets(config, task), columns))
    await evaluations.at_start()
    if config.eval.only:
        session.finished()
        return
    is_over = asyncio.Event()
    following = asyncio.create_task(evaluations.follow(is_over))
    offering = asyncio.create_task(offer_all(session, config, columns, sets))
    try:
        if not evaluations.is_target_reached:
            await wait_any({offering, following}, SESSION, "the end of training", CONTROLLER)
        if following.done():
            following.result()
        if evaluations.is_target_reached:
            await cancel_and_wait([offering], CANCEL_S)
            await end_training(session, config, _first(columns, sets))
        else:
            await wait_until(offering, SESSION, "the end of training", CONTROLLER)
        is_over.set()
        await wait_until(following, SESSION, "the results of evaluations", CONTROLLER)
    finally:
        await cancel_and_wait([offering, following], CANCEL_S)
    await evaluations.at_end()
    session.finished()


async def end_training(session: Session, config: RunConfig, spare: dict[str, torch.Tensor]) -> None:
    """Open no more prompts, and wait until all open prompts are trained.

    ``spare`` has the columns of a prompt, for offers that are not opened.
    """
    log.info("eval.stop_at is reached: no more prompts are opened")
    session.exhausted(TRAIN)
    while await session.offer(TRAIN, 0, NO_EPOCH, config.group_size, spare) is not None:
        pass


class PromptColumns:
    """Converts problems to columns of groups."""

    def __init__(self, config: RunConfig) -> None:
        path = model_dir(config)
        self._encoders = PromptEncoders(load_tokenizer(path), config.data.prompt_format)
        self._most = sys.maxsize
        if config.data.overlong == "drop":
            model = load_config(path).get_text_config()
            self._most = prompt_limits(config, model).most

    def __call__(self, problem: Example) -> dict[str, torch.Tensor] | None:
        """The columns of one problem: ``prompt``, tokens [L] int32, and ``answer``, its UTF-8 bytes [B] uint8.

        None if the prompt is too long and is left out (``data.overlong``).
        """
        tokens = self._encoders.of(problem.form)(*problem.as_prompt)
        if len(tokens) > self._most:
            return None
        return {
            "prompt": torch.tensor(tokens, dtype=torch.int32),
            "answer": torch.frombuffer(bytearray(problem.answer.encode()), dtype=torch.uint8)
            if problem.answer
            else torch.zeros(0, dtype=torch.uint8),
        }


@dataclass(frozen=True, slots=True)
class _Offer:
    """A prompt of the mixture with its columns; ``row`` is None if a resumed run has consumed it."""

    number: int
    epoch: int
    row: dict[str, torch.Tensor] | None


async def offer_all(
    session: Session,
    config: RunConfig,
    columns: Callable[[Example], dict[str, torch.Tensor] | None],
    sets: Sequence[TrainingSet],
) -> None:
    """Offer prompts until the run needs no more, with ``prompts_per_step`` offers always pending at the controller.

    A prompt for which ``columns`` returns None is left out, and the next one of its set takes its place.

    A resumed run skips the prompts it has consumed and offers the others in their original order.
    """
    consumed = unpack(session.welcome.position.passed)

    def offer(place: Place) -> _Offer | None:
        number = prompt_number(place.data_set, place.row)
        if number in consumed.get(place.epoch, ()):
            return _Offer(number, place.epoch, None)
        row = columns(sets[place.data_set].problems[place.row])
        return None if row is None else _Offer(number, place.epoch, row)

    sizes = [SetSize(set_.name, set_.weight, len(set_.problems), set_.difficulties) for set_ in sets]
    seed = config.seed if config.data.order == "shuffled" else None
    pending: deque[asyncio.Task[int | None]] = deque()
    try:
        for prompt in mixture(sizes, seed, config.data.epochs, offer):
            if prompt.row is None:
                continue
            accepted = session.offer(TRAIN, prompt.number, prompt.epoch, config.group_size, prompt.row)
            pending.append(asyncio.create_task(accepted))
            while len(pending) >= config.prompts_per_step:
                if await pending.popleft() is None:
                    return
        while pending:
            await pending.popleft()
        # All prompts are open. One more offer returns when the last step has been trained.
        session.exhausted(TRAIN)
        await session.offer(TRAIN, 0, config.data.epochs, config.group_size, _first(columns, sets))
    finally:
        for task in pending:
            task.cancel()


def _first(
    columns: Callable[[Example], dict[str, torch.Tensor] | None], sets: Sequence[TrainingSet]
) -> dict[str, torch.Tensor]:
    """The columns of the first usable prompt, for an offer that is not opened."""
    return next(row for set_ in sets for problem in set_.problems if (row := columns(problem)) is not None)


def start() -> None:
    """Entry point of the worker process."""
    main(SOURCE, run)


if __name__ == "__main__":
    start()
