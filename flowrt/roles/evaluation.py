"""Evaluation during a run: each evaluation has answers of one version of the weights; training continues meanwhile.

- The source offers the prompts of an evaluation before its version is published, so that the controller pins a worker
  to that version in time, and the trainer keeps it.
- Each version is evaluated with the same random numbers, which reduces the noise in differences between versions.
- An evaluation is complete when the controller has closed its groups. An answer counts as it was granted last: a slot
  is granted again if its commit was refused, or got lost with the controller.
- Results go to the controller, which records them with the version; a resumed run evaluates only what is missing, from
  the version of its checkpoint on: the weights of earlier versions are gone.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

import torch

from flowrt.algorithms.evaluation import statistics
from flowrt.client.session import Session
from flowrt.errors import RemoteProtocolError, WaitExpired
from flowrt.ids import UNSCORED
from flowrt.recipes.config import RunConfig
from flowrt.recipes.eval_names import first_number
from flowrt.recipes.grpo import EVAL
from flowrt.recipes.metric_names import pass_ks
from flowrt.recipes.tasks.base import Example
from flowrt.runtime.waits import CONTROLLER, BoundedElsewhere, cancel_and_wait, wait_any, wait_until

log = logging.getLogger("flowrt")
LATEST = -1
"""Placeholder for the version after the last closed step."""
PULL_SLOTS = 4096
MAX_PART_ROWS = 250_000
"""Answers that are offered together: at most half of `Settings.budget_rows`, so that a part of an evaluation is open
while the next one waits, and workers keep the version."""
MAX_WAITING = 2
"""Number of evaluations that may wait for a running one (``eval.overlap`` wait); the trainer keeps their versions."""
SESSION = BoundedElsewhere("the end of the session")
CANCEL_S = 30.0
Columns = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class EvalSet:
    """A data set of evaluations; ``columns`` has one tensor a prompt."""

    name: str
    prompts: tuple[int, ...]
    """Numbers of the prompts, by data set and row; the seeds of the answers depend on them."""
    columns: dict[str, list[torch.Tensor]]

    @classmethod
    def of(
        cls, name: str, problems: Sequence[Example], columns: Callable[[Example], Columns | None]
    ) -> "EvalSet | None":
        """The prompts for which ``columns`` returns columns; None if there is no such prompt."""
        first = first_number(name)
        rows = [
            (first + row, tensors) for row, problem in enumerate(problems) if (tensors := columns(problem)) is not None
        ]
        if not rows:
            return None
        names = rows[0][1].keys()
        return cls(
            name, tuple(number for number, _ in rows), {key: [tensors[key] for _, tensors in rows] for key in names}
        )

    def parts(self, prompts: int) -> Iterator["EvalSet"]:
        """The set in parts of this many prompts."""
        for start in range(0, len(self.prompts), prompts):
            part = slice(start, start + prompts)
            yield EvalSet(self.name, self.prompts[part], {name: rows[part] for name, rows in self.columns.items()})


@dataclass(frozen=True, slots=True)
class _Answer:
    """A scored answer; ``spans``: version, tokens, version, tokens, ..."""

    reward: float
    spans: Sequence[int]
    truncated: bool
    is_unscored: bool = False
    """Whether no reward function applies to it."""


Answers = dict[int, dict[int, _Answer]]
"""Answers by group and slot."""


class _Collector:
    """Pulls scored answers while an evaluation is open."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._answers: Answers = {}
        self._open: set[int] = set()
        self._pulling: asyncio.Task[None] | None = None

    async def collect(self, groups: Sequence[int]) -> Answers:
        """The answers to these groups when all of them are closed; those to dropped groups may be missing.

        Raises the error of a pull.
        """
        self._open.update(groups)
        closed = asyncio.create_task(self._session.unless_ended(self._session.wait_groups_closed(groups)))
        try:
            while not closed.done():
                if self._pulling is None:
                    self._pulling = asyncio.create_task(self._pull())
                await wait_any({closed, self._pulling}, SESSION, "the answers of an evaluation", CONTROLLER)
                if self._pulling is not None and self._pulling.done():
                    pulled, self._pulling = self._pulling, None
                    pulled.result()
            closed.result()
            return {group: self._answers.get(group, {}) for group in groups}
        finally:
            self._open.difference_update(groups)
            for group in groups:
                self._answers.pop(group, None)
            await cancel_and_wait([closed, *self._idle()], CANCEL_S)

    def _idle(self) -> list[asyncio.Task[None]]:
        """The pull in progress, if no evaluation needs it any more."""
        if self._open or self._pulling is None:
            return []
        idle, self._pulling = self._pulling, None
        return [idle]

    async def _pull(self) -> None:
        batch = await self._session.pull("evaluate", slots=PULL_SLOTS)
        unscored = batch.inline.get(UNSCORED) or ()
        for row, group in enumerate(batch.groups):  # of an unknown group: the answer to its offer has not been handled
            is_unscored = bool(unscored) and unscored[row] > 0
            is_truncated = batch.inline["truncated"][row] > 0
            answer = _Answer(batch.inline["reward"][row], batch.grant.spans[row], is_truncated, is_unscored)
            self._answers.setdefault(group, {})[batch.slots[row]] = answer
        await self._session.commit("evaluate", batch.slots, batch.leases)


class Evaluations:
    """The evaluations of a run."""

    def __init__(self, session: Session, config: RunConfig, sets: Sequence[EvalSet]) -> None:
        """``sets`` are the data sets in the order of the configuration."""
        self._session = session
        self._config = config
        self._sets = sets
        self._collector = _Collector(session)
        self._first_step = session.welcome.position.step
        self._known: dict[tuple[str, int], dict[str, float]] = {
            (evaluation.name, evaluation.version): dict(evaluation.numbers)
            for evaluation in session.welcome.position.evaluations
        }
        self.is_target_reached = False
        """Whether a result has reached ``eval.stop_at``."""

    @property
    def _average(self) -> str:
        return f"avg@{self._config.eval.samples}"

    async def at_start(self) -> None:
        """Evaluate the initial weights, unless their results are known or training has begun.

        Known results of the version that the run continues from are reported again. Evaluations that were not complete
        when the run ended, of versions before that one, are recorded as skipped.
        """
        for (name, version), numbers in self._known.items():
            if version == self._first_step:  # the trainer may have been killed before it wrote these weights
                self._session.evaluated(name, version, numbers)
        for name, version in self._interrupted():
            self._note_skipped(name, version, "the run ended before it was complete, and continues with newer weights")
        options = self._config.eval
        if (options.at_start or options.only) and not self._first_step:
            await self._evaluate(0, "eval_first")

    async def at_end(self) -> None:
        """Evaluate the last weights, and tell the trainers that no evaluation follows."""
        if self._sets and self._config.eval.at_end:
            known = self._results(self._config.steps)
            await self._evaluate(LATEST if len(known) < len(self._sets) else self._config.steps, "eval_last")
        self._session.evaluated("", 0, {})

    def due(self) -> Iterator[int]:
        """The versions to be evaluated during training, ascending, from where the run continues."""
        last = self._config.steps
        for version in self._multiples(self._first_step, last + 1):
            if version < last or not self._config.eval.at_end:
                yield version

    def _multiples(self, start: int, stop: int) -> range:
        """The positive multiples of ``eval.interval`` from ``start`` to before ``stop``; none without evaluations."""
        interval = self._config.eval.interval
        if not interval or not self._sets:
            return range(0)
        return range(max(interval, -(-start // interval) * interval), stop, interval)

    def _interrupted(self) -> Iterator[tuple[str, int]]:
        """Data set and version of evaluations before `_first_step` that were due after the last complete one."""
        for name in (eval_set.name for eval_set in self._sets):
            complete = max((version for known, version in self._known if known == name), default=0)
            for version in self._multiples(complete + 1, self._first_step):
                yield name, version

    async def follow(self, training_is_over: asyncio.Event) -> None:
        """Evaluate the due versions; returns when training is over or a result reaches ``eval.stop_at``."""
        depth = 1 + (MAX_WAITING if self._config.eval.overlap == "wait" else 0)
        running: deque[asyncio.Task[None]] = deque()
        try:
            for version in self.due():
                if training_is_over.is_set():
                    break
                running.append(asyncio.create_task(self._evaluate(version, "", training_is_over)))
                while len(running) >= depth and not self.is_target_reached:
                    await running.popleft()
                if self.is_target_reached:
                    break
            while running and not self.is_target_reached:
                await running.popleft()
        finally:
            await cancel_and_wait(running, CANCEL_S)

    def _results(self, version: int) -> dict[str, dict[str, float]]:
        return {name: numbers for (name, of), numbers in self._known.items() if of == version}

    async def _evaluate(self, version: int, summary: str, training_is_over: asyncio.Event | None = None) -> None:
        """Evaluate a version on the data sets whose results are missing.

        ``summary``: name under which the average of the first data set is reported; empty: it is not.
        """
        missing = [set_ for set_ in self._sets if (set_.name, version) not in self._known]
        tasks = [asyncio.create_task(self._evaluate_set(eval_set, version, training_is_over)) for eval_set in missing]
        try:
            for task in tasks:
                result = await wait_until(task, SESSION, f"the results of version {version}", CONTROLLER)
                if result is None:
                    continue
                name, of_version, numbers = result
                self._note(name, of_version, numbers)
                version = of_version
        finally:
            await cancel_and_wait(tasks, CANCEL_S)
        first = self._known.get((self._sets[0].name, version)) if self._sets else None
        if summary and first is not None:
            self._session.report({summary: first[self._average]})

    def _note(self, name: str, version: int, numbers: dict[str, float]) -> None:
        """Report results, and note whether they reach ``eval.stop_at``."""
        options = self._config.eval
        self._known[name, version] = numbers
        self._session.evaluated(name, version, numbers)
        log.info("version %d: %s", version, ", ".join(f"{name}/{key} {value:.4g}" for key, value in numbers.items()))
        if options.stop_at and name == self._sets[0].name and numbers[self._average] >= options.stop_at:
            self.is_target_reached = True

    async def _evaluate_set(
        self, eval_set: EvalSet, version: int, training_is_over: asyncio.Event | None
    ) -> tuple[str, int, dict[str, float]] | None:
        """(name, version, numbers) of a version on a data set.

        None if the version is not published, or no worker has it any more, or prompts were dropped.
        """
        options = self._config.eval
        collected = await self._collect(eval_set, version, training_is_over)
        if collected is None:
            return None
        begin_s, answers = collected
        groups = list(answers)
        dropped = self._session.evaluations.take_dropped(groups)
        if missing := [group for group in groups if len(answers[group]) < options.samples]:
            reason = next(iter(dropped.values()), "it was given up while the controller was restarted")
            self._note_skipped(
                eval_set.name, version, f"{len(missing)} of {len(groups)} prompts were dropped: {reason}"
            )
            return None
        rows = [answer for group in groups for answer in answers[group].values()]
        versions = {number for row in rows for number in row.spans[::2]}
        if len(versions) != 1 or version not in (LATEST, *versions):
            raise RemoteProtocolError(f"answers to {eval_set.name} of version {version} are of {sorted(versions)}")
        scored = [group for group in groups if not all(answer.is_unscored for answer in answers[group].values())]
        if not scored:
            self._note_skipped(eval_set.name, min(versions), "no reward function applies to any of its prompts")
            return None
        rewards = [[answer.reward for answer in answers[group].values()] for group in scored]
        numbers = {
            **statistics(rewards, options.solved_reward, pass_ks(options.samples)),
            "length": sum(sum(row.spans[1::2]) for row in rows) / len(rows),
            "truncated": sum(row.truncated for row in rows) / len(rows),
            "seconds": monotonic() - begin_s,
        }
        if unscored := sum(row.is_unscored for row in rows):
            numbers["not_applicable"] = unscored / len(rows)
        return eval_set.name, min(versions), numbers

    async def _collect(
        self, eval_set: EvalSet, version: int, training_is_over: asyncio.Event | None
    ) -> tuple[float, Answers] | None:
        """When the prompts were open, and the answers to them by group, in their order; None as `_offer`."""
        collecting: list[asyncio.Task[Answers]] = []
        begin_s = 0.0
        try:
            for part in eval_set.parts(max(MAX_PART_ROWS // self._config.eval.samples, 1)):
                groups = await self._offer(part, version, None if collecting else training_is_over)
                if groups is None:
                    return None
                begin_s = begin_s or monotonic()
                collecting.append(asyncio.create_task(self._collector.collect(groups)))
            answers: Answers = {}
            for task in collecting:
                answers |= await wait_until(task, SESSION, "the answers of an evaluation", CONTROLLER)
            return begin_s, answers
        finally:
            await cancel_and_wait(collecting, CANCEL_S)

    def _note_skipped(self, name: str, version: int, reason: str) -> None:
        log.warning("version %d is not evaluated on %s: %s", version, name, reason)
        if version >= 0:
            self._session.evaluated(name, version, {})

    async def _offer(self, eval_set: EvalSet, version: int, training_is_over: asyncio.Event | None) -> range | None:
        """Offer the prompts once the version is published; None if training ends before, or the version is gone."""
        while True:
            offer = asyncio.create_task(
                self._session.offer_many(
                    EVAL,
                    eval_set.prompts,
                    members=self._config.eval.samples,
                    tensors=eval_set.columns,
                    at_least=version,
                    at_most=version,
                )
            )
            over = asyncio.create_task(_wait_set(training_is_over))
            try:
                await wait_any({offer, over}, SESSION, f"version {version} to be published", CONTROLLER)
                if not offer.done():
                    return None
                if (groups := offer.result()) is None:
                    self._note_skipped(eval_set.name, version, "another evaluation ran until it was gone")
                return groups
            except WaitExpired:
                continue  # the interval may take longer than the deadline of a request
            finally:
                await cancel_and_wait([offer, over], CANCEL_S)


async def _wait_set(event: asyncio.Event | None) -> None:
    """Wait for an event, which may never be set; None: wait until cancelled."""
    await wait_until((event or asyncio.Event()).wait(), SESSION, "the end of training", CONTROLLER)


def eval_sets_of(sets: Mapping[str, Sequence[Example]], columns: Callable[[Example], Columns | None]) -> list[EvalSet]:
    """The data sets with their columns, without those that have no usable prompt."""
    return [
        eval_set for name, problems in sets.items() if (eval_set := EvalSet.of(name, problems, columns)) is not None
    ]
