"""The reward role: decodes responses and scores them, with the run's task or with reward functions.

A built-in task scores in this process. Reward functions, and the reward of a task in a user's file, run in child
processes or are requests to a server.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from time import monotonic

from flowrt.client.sample_tensors import Batch
from flowrt.client.session import Session
from flowrt.client.streams import PULL_INTERVAL_S, StageOutput, delay_pull, run_stage
from flowrt.engines.prompts import PromptFormat
from flowrt.engines.stopping import StopConditions
from flowrt.engines.turns import Turns, TurnsOfForms
from flowrt.errors import ConfigError, Drained
from flowrt.ids import REWARD
from flowrt.recipes.config import RunConfig
from flowrt.recipes.eval_names import chat_templates
from flowrt.recipes.grpo import EVAL
from flowrt.recipes.prompt_forms import PromptForms
from flowrt.recipes.run_dir import judge_file, model_dir
from flowrt.recipes.tasks.base import Task
from flowrt.recipes.tasks.registry import task_of
from flowrt.recipes.tasks.task_reward import is_scored_by_task, row_of, task_reward
from flowrt.rewards.call_forms import CallForm, RewardSample
from flowrt.rewards.check import check_here
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.outcomes import Result
from flowrt.rewards.reward_names import parse_functions
from flowrt.rewards.rows import decode_row
from flowrt.rewards.scoring import CALLS, RewardScorer, SampleReward
from flowrt.roles.filter import with_filter
from flowrt.roles.main import main
from flowrt.roles.sample_records import Score, ScoredSamples, finish_reason
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
            scores.append(task.reward(text or "", answer.numpy().tobytes().decode()))
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
        self._forms = PromptForms(config)
        self._turns = TurnsOfForms(stop)
        self._drops = config.reward.on_failure == "drop"
        self._scorer = RewardScorer(
            config.reward,
            is_deterministic=config.deterministic,
            cache=judge_file(Path(config.run_dir)),
            task=task_reward(config),
            model=str(model_dir(config)),
        )
        self._config = config
        self._of_groups = bool(config.reward.of_groups)
        self._samples = ScoredSamples(session, config, stop)
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
            with self._session.timeline.busy("load"), self._session.progress.expected(self._call_s):
                await self._scorer.load()
            self._check_groups()
            most = most_slots(self._config, [self._scorer.form(function) for function in self._scorer.functions])
            async with asyncio.TaskGroup() as group:
                try:
                    while True:
                        while self._open >= most:
                            self._has_room.clear()
                            await wait_until(self._has_room.wait(), CALLS, "rewards", "reward functions")
                        batch = await self._session.pull("reward", slots=most - self._open)
                        arrived_s = loop.time()
                        self._open += len(batch)
                        batches.add(group.create_task(self._score(batch)))
                        batches = {batch for batch in batches if not batch.done()}
                        await delay_pull(self._session, arrived_s, PULL_INTERVAL_S)
                except Drained:
                    await wait_all(batches, CALLS, "the rewards of samples that were pulled", "reward functions")
                    raise
        finally:
            await self._scorer.close()

    def _check_groups(self) -> None:
        """Raise ConfigError if other functions take whole groups than those found before the run began."""
        present, known = self._scorer.of_groups, list(self._config.reward.of_groups)
        if present != known:
            function = next(name for name in (*present, *known) if (name in present) != (name in known))
            raise ConfigError(
                f"reward function {function} has changed since the run began: it did {'not ' * (function in present)}"
                "take a group then; restore the file, or start another run"
            )

    async def _score(self, batch: Batch) -> None:
        """Score a batch; rewards that are ready at the same time are committed together."""
        with self._session.timeline.busy("reward"):
            # Long responses take long to decode; the event loop must not wait for them.
            samples = await asyncio.to_thread(self._samples_of, batch)
            together = [[row] for row in range(len(batch))]
            if self._of_groups:
                together = [list(rows) for _, rows in groupby(range(len(batch)), batch.groups.__getitem__)]
            scoring = {
                asyncio.create_task(self._scorer.score_all([samples[row] for row in rows])): rows for rows in together
            }
            try:
                while scoring:
                    with self._session.progress.expected(self._call_s):  # each call has a deadline of its own
                        done = await wait_any(scoring.keys(), CALLS, "rewards", "reward functions")
                    rewards: dict[int, SampleReward] = {}
                    for task in [task for task in scoring if task in done]:
                        rewards |= zip(scoring.pop(task), task.result(), strict=True)
                    await self._commit(batch, dict(sorted(rewards.items())))
            finally:
                for task in scoring:
                    task.cancel()

    def _samples_of(self, batch: Batch) -> list[RewardSample]:
        """What the functions are called with, for each row of a batch."""
        samples = []
        names = self._scorer.facts
        columns = batch.tensors["response"], batch.tensors["answer"], batch.inline["truncated"]
        for row, (response, answer, truncated) in enumerate(zip(*columns, strict=True)):
            # Most tasks score a truncated response as an empty one.
            tokens = response.tolist() if self._scores_truncated or not truncated else []
            columns_of_row = answer.numpy().tobytes()
            turns = self._turns.of(self._form(batch, row))
            prefix = self._prefix(turns, columns_of_row) if tokens or not truncated or self._scores_truncated else ""
            text = prefix + turns.generated(tokens)
            facts: dict[str, object] = {}
            if names:
                facts = {
                    "step": max(batch.grant.spans[row][::2], default=0),
                    "truncated": bool(truncated),
                    "finish_reason": finish_reason(self._stop, tokens[-1:], bool(truncated)),
                    "completion_ids": tokens if "completion_ids" in names else [],
                    "prefix": prefix,
                    "turn": text,
                }
            samples.append(
                RewardSample(text, row_of(columns_of_row) if self._is_scored_by_task else columns_of_row, facts)
            )
        return samples

    def _form(self, batch: Batch, row: int) -> PromptFormat:
        """The format of the prompt of a row of a batch."""
        number = batch.grant.prompts[row]
        return self._forms.evaluated(number) if batch.flows[row] == EVAL else self._forms.trained(number)

    def _prefix(self, turns: Turns, row: bytes) -> str:
        """The beginning of the turn that was not generated."""
        if not turns.depends_on_prompt or self._is_scored_by_task:
            return turns.beginning()
        prompt = decode_row(row)["prompt"]
        return turns.beginning(prompt if isinstance(prompt, list) else ())

    async def _commit(self, batch: Batch, rewards: dict[int, SampleReward]) -> None:
        """Commit the rewards of these rows of a batch, and report samples that are dropped as lost."""
        for reward in rewards.values():
            if reward.failure:
                self._warn(reward.failure)
        lost = self._lost(batch, rewards)
        for index, reason in lost.items():
            self._session.lost("reward", [batch.slots[index]], [batch.leases[index]], reason)
        kept = [index for index in rewards if index not in lost]
        refused: Sequence[int] = ()
        if kept:
            inline = {name: [rewards[index].numbers[name] for index in kept] for name in rewards[kept[0]].numbers}
            inline["reward"] = [rewards[index].reward for index in kept]
            slots, leases = [batch.slots[index] for index in kept], [batch.leases[index] for index in kept]
            refused = await self._session.commit("reward", slots, leases, inline=inline)
        shown = {index: _score(reward) for index, reward in rewards.items() if index not in lost or reward.failure}
        self._samples.send(batch, shown, refused)
        self._open -= len(rewards)
        self._has_room.set()

    def _lost(self, batch: Batch, rewards: Mapping[int, SampleReward]) -> dict[int, str]:
        """The rows that ``reward.on_failure`` drops, each with the reason.

        Of functions that take whole groups a group is scored at once, and as a whole: a failure drops all its rows.
        """
        if not self._drops:
            return {}
        failed = {
            index: reward.reason for index, reward in rewards.items() if reward.failure and batch.flows[index] != EVAL
        }
        if not self._of_groups:
            return failed
        reasons = {batch.groups[index]: reason for index, reason in failed.items()}
        return {index: reasons[batch.groups[index]] for index in rewards if batch.groups[index] in reasons}

    def _warn(self, failure: str) -> None:
        self._warnings += 1
        if self._warnings <= MAX_WARNINGS:
            log.warning("%s", failure)
        if self._warnings == MAX_WARNINGS:
            log.warning(
                "further failures of reward functions are counted (reward_failures in metrics.jsonl), not logged"
            )


def _score(reward: SampleReward) -> Score:
    is_unscored = reward.reason == Result.NOT_APPLICABLE  # a function of weight 0 may have failed
    return Score(
        reward.reward,
        reward.numbers,
        reward.reason if is_unscored or not reward.failure else f"{reward.reason}: {reward.failure}",
        reward.seconds,
    )


def most_slots(config: RunConfig, forms: Sequence[CallForm] = ()) -> int:
    """Maximum number of slots that are scored at a time: those whose functions run at the same time, and more.

    With more, scoring takes at most `LEASE_SHARE` of a lease even if every call takes until its deadline.

    Args:
        config: of the run.
        forms: how each function is called; without: requests side by side, all others with a sample a call.
    """
    reward, functions = config.reward, parse_functions(config.reward.functions)
    forms = forms or [CallForm(is_async=function.is_remote) for function in functions]
    side_by_side = sum(form.is_async for form in forms)
    requests = sum(function.is_remote for function in functions)
    slot_s = reward.timeout_s * (len(functions) - side_by_side) / reward.workers
    slot_s += reward.timeout_s * (side_by_side + requests * reward.retries) / reward.concurrency
    slot_s = max(slot_s, side_by_side / reward.rate_per_s if reward.rate_per_s else 0.0)
    at_once = reward.workers if side_by_side < len(functions) else reward.concurrency
    if any(form.form != "sample" for form in forms):
        at_once *= reward.batch_size
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
