"""The reward role: decodes responses and scores them, with the run's task or with reward functions.

A built-in task scores in this process. Reward functions, and the reward of a task in a user's file, run in child
processes or are requests to a server.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import monotonic

from flowrt.client.samples import Batch
from flowrt.client.session import Session
from flowrt.client.streams import PULL_INTERVAL_S, StageOutput, delay_pull, run_stage
from flowrt.engines.stopping import StopConditions
from flowrt.errors import Drained
from flowrt.ids import REWARD
from flowrt.recipes.config import RunConfig
from flowrt.recipes.eval_names import chat_templates
from flowrt.recipes.grpo import EVAL
from flowrt.recipes.run_dir import judge_file, model_dir
from flowrt.recipes.tasks.base import Task
from flowrt.recipes.tasks.registry import task_of
from flowrt.recipes.tasks.task_reward import is_scored_by_task, row_of, task_reward
from flowrt.rewards.check import check_here
from flowrt.rewards.functions import parse_functions
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.scoring import CALLS, RewardScorer, SampleReward
from flowrt.roles.filter import with_filter
from flowrt.roles.main import main
from flowrt.roles.samples import Score, ScoredSamples
from flowrt.runtime.waits import wait_all, wait_any, wait_until

log = logging.getLogger(__name__)
MAX_PULL_SLOTS = 256
"""Maximum number of slots that are scored at a time."""
LEASE_SHARE = 0.5
"""Share of the duration of a lease that scoring a slot may take."""
MAX_WARNINGS = 20
"""Number of failures of reward functions that are logged; all of them are counted."""


async def run(session: Session, config: RunConfig) -> None:
    """Score responses until the run ends.

    Commits ``reward`` (one float per slot) and the columns of `reward_columns`.
    """
    with session.timeline.busy("load"):
        task = task_of(config)
        stop = StopConditions.of(model_dir(config), config.rollout.stop, chat_templates(config))
    if config.reward.functions:
        await asyncio.to_thread(check_here, config.reward)
        await FunctionRewards(session, config, stop, task).run()
    else:
        await _run_task(session, task, stop, ScoredSamples(session, config, stop))


async def _run_task(session: Session, task: Task, stop: StopConditions, samples: ScoredSamples) -> None:
    """Score responses with the run's task, in this process."""

    def scored(batch: Batch) -> tuple[list[float], list[str | None]]:
        """The scores and the decoded texts of a batch."""
        scores, texts = [], []
        columns = batch.tensors["response"], batch.tensors["answer"], batch.inline["truncated"]
        for tokens, answer, truncated in zip(*columns, strict=True):
            # Most tasks score a truncated response as an empty one.
            text = stop.text(tokens.tolist()) if task.scores_truncated or not truncated else None
            scores.append(task.reward(text or "", bytes(answer.tolist()).decode()))
            texts.append(text)
        return scores, texts

    async def score(batch: Batch) -> StageOutput:
        with session.timeline.busy("reward"):
            start_s = monotonic()
            scores, texts = await asyncio.to_thread(scored, batch)
            mean_s = (monotonic() - start_s) / len(scores)
            pairs = enumerate(zip(scores, texts, strict=True))
            of_rows = {row: Score(reward, {}, "", mean_s, text) for row, (reward, text) in pairs}
        return StageOutput(inline={"reward": scores}, on_committed=partial(samples.send, batch, of_rows))

    await run_stage(session, "reward", MAX_PULL_SLOTS, score, PULL_INTERVAL_S)


class FunctionRewards:
    """Scores responses with reward functions: several batches at a time, each committed in parts."""

    def __init__(self, session: Session, config: RunConfig, stop: StopConditions, task: Task) -> None:
        self._session = session
        self._is_scored_by_task = is_scored_by_task(config)
        self._scores_truncated = task.scores_truncated or not self._is_scored_by_task
        self._stop = stop
        self._drops = config.reward.on_failure == "drop"
        self._scorer = RewardScorer(
            config.reward,
            is_deterministic=config.deterministic,
            cache=judge_file(Path(config.run_dir)),
            task=task_reward(config),
        )
        self._samples = ScoredSamples(session, config, stop)
        self._most = most_slots(config)
        self._call_s = longest_call_s(config.reward)
        self._open = 0
        """Number of slots that are being scored."""
        self._has_room = asyncio.Event()
        self._warnings = 0

    async def run(self) -> None:
        """Score until the run ends. Raises ConfigError if failures of reward functions end the run."""
        loop = asyncio.get_running_loop()
        batches: set[asyncio.Task[None]] = set()
        try:
            async with asyncio.TaskGroup() as group:
                try:
                    while True:
                        while self._open >= self._most:
                            self._has_room.clear()
                            await wait_until(self._has_room.wait(), CALLS, "rewards", "reward functions")
                        batch = await self._session.pull("reward", slots=self._most - self._open)
                        arrived_s = loop.time()
                        self._open += len(batch)
                        batches.add(group.create_task(self._score(batch)))
                        batches = {one for one in batches if not one.done()}
                        await delay_pull(self._session, arrived_s, PULL_INTERVAL_S)
                except Drained:
                    await wait_all(batches, CALLS, "the rewards of samples that were pulled", "reward functions")
                    raise
        finally:
            await self._scorer.close()

    async def _score(self, batch: Batch) -> None:
        """Score a batch; rewards that are ready at the same time are committed together."""
        answers = [bytes(answer.tolist()) for answer in batch.tensors["answer"]]
        rows = [row_of(answer) for answer in answers] if self._is_scored_by_task else answers
        # Most tasks score a truncated response as an empty one.
        scored = [
            tokens if self._scores_truncated or not truncated else tokens[:0]
            for tokens, truncated in zip(batch.tensors["response"], batch.inline["truncated"], strict=True)
        ]
        with self._session.timeline.busy("reward"):
            # Long responses take long to decode; the event loop must not wait for them.
            texts = await asyncio.to_thread(lambda: [self._stop.text(one.tolist()) for one in scored])
            scoring = {
                asyncio.create_task(self._scorer.score(text, row)): index
                for index, (text, row) in enumerate(zip(texts, rows, strict=True))
            }
            try:
                while scoring:
                    with self._session.progress.expected(self._call_s):  # each call has a deadline of its own
                        done = await wait_any(scoring.keys(), CALLS, "rewards", "reward functions")
                    ready = [one for one in scoring if one in done]
                    found = {scoring.pop(one): one.result() for one in ready}
                    await self._commit(batch, dict(sorted(found.items())))
            finally:
                for one in scoring:
                    one.cancel()

    async def _commit(self, batch: Batch, found: dict[int, SampleReward]) -> None:
        """Commit the rewards of these rows of a batch, and report samples that are dropped as lost."""
        for index, one in found.items():
            if one.failure:
                self._warn(one.failure)
                if self._drops and batch.flows[index] != EVAL:
                    slot, lease = [batch.slots[index]], [batch.leases[index]]
                    self._session.lost("reward", slot, lease, one.reason)
        kept = [
            index for index, one in found.items() if not (one.failure and self._drops) or batch.flows[index] == EVAL
        ]
        refused: Sequence[int] = ()
        if kept:
            inline = {name: [found[index].numbers[name] for index in kept] for name in found[kept[0]].numbers}
            inline["reward"] = [found[index].reward for index in kept]
            slots, leases = [batch.slots[index] for index in kept], [batch.leases[index] for index in kept]
            refused = await self._session.commit("reward", slots, leases, inline=inline)
        self._samples.send(batch, {index: _score(one) for index, one in found.items()}, refused)
        self._open -= len(found)
        self._has_room.set()

    def _warn(self, failure: str) -> None:
        self._warnings += 1
        if self._warnings <= MAX_WARNINGS:
            log.warning("%s", failure)
        if self._warnings == MAX_WARNINGS:
            log.warning(
                "further failures of reward functions are counted (reward_failures in metrics.jsonl), not logged"
            )


def _score(one: SampleReward) -> Score:
    return Score(one.reward, one.numbers, f"{one.reason}: {one.failure}" if one.failure else "", one.seconds)


def most_slots(config: RunConfig) -> int:
    """Maximum number of slots that are scored at a time: those whose functions run at the same time, and more.

    With more, scoring takes at most `LEASE_SHARE` of a lease even if every call takes until its deadline.
    """
    reward, functions = config.reward, parse_functions(config.reward.functions)
    requests = sum(one.is_remote for one in functions)
    slot_s = reward.timeout_s * (len(functions) - requests) / reward.workers
    slot_s += reward.timeout_s * requests * (reward.retries + 1) / reward.concurrency
    at_once = reward.workers if requests < len(functions) else reward.concurrency
    return min(MAX_PULL_SLOTS, max(at_once // len(functions), int(LEASE_SHARE * config.controller.lease_s / slot_s), 1))


def longest_call_s(reward: RewardOptions) -> float:
    """Longest duration of scoring a sample, with starts and repetitions of each function, in seconds."""
    calls = len(reward.functions) * (reward.retries + 1)
    return calls * (reward.timeout_s + reward.load_timeout_s)


def start() -> None:
    """Entry point of the worker process."""
    main(REWARD, with_filter(run), drains=True)


if __name__ == "__main__":
    start()
