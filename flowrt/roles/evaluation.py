"""Evaluation during a run: each evaluation has answers of one version of the weights; training continues meanwhile.

- The source offers the prompts of an evaluation before its version is published, so that the controller pins a worker
  to that version in time, and the trainer keeps it.
- Each version is evaluated with the same random numbers, which reduces the noise in differences between versions.
- Results go to the controller, which records them with the version; a resumed run evaluates only what is missing.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

import torch

from flowrt.algorithms.evaluation import statistics
from flowrt.client.samples import Batch
from flowrt.client.session import Session
from flowrt.errors import RemoteProtocolError, WaitExpired
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
        rows = [(first + row, found) for row, one in enumerate(problems) if (found := columns(one)) is not None]
        if not rows:
            return None
        names = rows[0][1].keys()
        return cls(name, tuple(number for number, _ in rows), {key: [found[key] for _, found in rows] for key in names})


@dataclass(slots=True)
class _Answers:
    """The answers to an offer: rewards by group, and counts over all answers."""

    members: int
    rewards: dict[int, list[float]] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)
    tokens: int = 0
    truncated: int = 0
    missing: int = 0
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self, groups: range) -> None:
        self.rewards = {group: [] for group in groups}
        self.missing = len(groups) * self.members

    def add(self, batch: Batch, row: int) -> None:
        spans = batch.grant.spans[row]
        self.rewards[batch.groups[row]].append(batch.inline["reward"][row])
        self.versions.update(spans[::2])
        self.tokens += sum(spans[1::2])
        self.truncated += batch.inline["truncated"][row] > 0
        self.missing -= 1
        if not self.missing:
            self.complete.set()

    async def wait_complete(self) -> None:
        await wait_until(self.complete.wait(), SESSION, "the answers of an evaluation", CONTROLLER)


class _Collector:
    """Pulls scored answers while an evaluation is open, and adds each to its evaluation."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._of_group: dict[int, _Answers] = {}
        self._early: dict[int, list[tuple[Batch, int]]] = {}
        self._pulling: asyncio.Task[None] | None = None

    def open(self, groups: range, answers: _Answers) -> None:
        """Collect the answers to these groups in ``answers``."""
        answers.open(groups)
        self._of_group.update(dict.fromkeys(groups, answers))
        for group in groups:
            for batch, row in self._early.pop(group, ()):
                answers.add(batch, row)

    async def collect(self, answers: _Answers, version: int) -> bool:
        """Wait for all answers; returns False if no worker has their version any more.

        Raises the error of a pull.
        """
        complete = asyncio.create_task(self._session.unless_ended(answers.wait_complete()))
        lost = asyncio.create_task(self._session.unless_ended(self._session.evaluations.wait_lost(version)))
        try:
            while not answers.complete.is_set() and not lost.done():
                if self._pulling is None:
                    self._pulling = asyncio.create_task(self._pull())
                await wait_any(
                    {complete, lost, self._pulling}, SESSION, f"the answers of version {version}", CONTROLLER
                )
                if self._pulling is not None and self._pulling.done():
                    pulled, self._pulling = self._pulling, None
                    pulled.result()
            return answers.complete.is_set()
        finally:
            for group in answers.rewards:
                self._of_group.pop(group, None)
            await cancel_and_wait([complete, lost, *self._idle()], CANCEL_S)

    def _idle(self) -> list[asyncio.Task[None]]:
        """The pull in progress, if no evaluation needs it any more."""
        if self._of_group or self._pulling is None:
            return []
        idle, self._pulling = self._pulling, None
        return [idle]

    async def _pull(self) -> None:
        batch = await self._session.pull("evaluate", slots=PULL_SLOTS)
        for row, group in enumerate(batch.groups):
            if (answers := self._of_group.get(group)) is not None:
                answers.add(batch, row)
            else:  # the acceptance of the offer has not arrived, or an earlier source made it
                self._early.setdefault(group, []).append((batch, row))
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
            (one.name, one.version): dict(one.numbers) for one in session.welcome.position.evaluations
        }
        self.is_target_reached = False
        """Whether a result has reached ``eval.stop_at``."""

    @property
    def _average(self) -> str:
        return f"avg@{self._config.eval.samples}"

    async def at_start(self) -> None:
        """Evaluate the initial weights, unless their results are known or training has begun.

        Known results of the version that the run continues from are reported again.
        """
        for (name, version), numbers in self._known.items():
            if version == self._first_step:  # the trainer may have been killed before it wrote these weights
                self._session.evaluated(name, version, numbers)
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
        interval, last = self._config.eval.interval, self._config.steps
        if not interval or not self._sets:
            return
        first = max(interval, -(-self._first_step // interval) * interval)
        for version in range(first, last + 1, interval):
            if version < last or not self._config.eval.at_end:
                yield version

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
        missing = [one for one in self._sets if (one.name, version) not in self._known]
        tasks = [asyncio.create_task(self._evaluate_set(one, version, training_is_over)) for one in missing]
        try:
            for task in tasks:
                found = await wait_until(task, SESSION, f"the results of version {version}", CONTROLLER)
                if found is None:
                    continue
                name, of_version, numbers = found
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
        self, one: EvalSet, version: int, training_is_over: asyncio.Event | None
    ) -> tuple[str, int, dict[str, float]] | None:
        """(name, version, numbers) of a version on a data set.

        None if no worker has the version any more, or it is not published.
        """
        groups = await self._offer(one, version, training_is_over)
        if groups is None:
            return None
        begin_s, options = monotonic(), self._config.eval
        answers = _Answers(self._config.eval.samples)
        self._collector.open(groups, answers)
        if not await self._collector.collect(answers, version):
            self._note_skipped(one, version, "no worker has it any more")
            return None
        if len(answers.versions) != 1 or version not in (LATEST, *answers.versions):
            raise RemoteProtocolError(f"answers to {one.name} of version {version} are of {sorted(answers.versions)}")
        of_version = min(answers.versions)
        count = len(groups) * answers.members
        numbers = {
            **statistics(list(answers.rewards.values()), options.solved_reward, pass_ks(options.samples)),
            "length": answers.tokens / count,
            "truncated": answers.truncated / count,
            "seconds": monotonic() - begin_s,
        }
        return one.name, of_version, numbers

    def _note_skipped(self, one: EvalSet, version: int, reason: str) -> None:
        log.warning("version %d is not evaluated on %s: %s", version, one.name, reason)
        if version >= 0:
            self._session.evaluated(one.name, version, {})

    async def _offer(self, one: EvalSet, version: int, training_is_over: asyncio.Event | None) -> range | None:
        """Offer the prompts once the version is published; None if training ends before, or the version is gone."""
        while True:
            offer = asyncio.create_task(
                self._session.offer_many(
                    EVAL,
                    one.prompts,
                    members=self._config.eval.samples,
                    tensors=one.columns,
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
                    self._note_skipped(one, version, "another evaluation ran until it was gone")
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
    return [one for name, problems in sets.items() if (one := EvalSet.of(name, problems, columns)) is not None]
