"""The trainer role: one process, or data-parallel ranks under torchrun, each pulling micro-batches on demand."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from typing import TypeVar

import torch
import torch.distributed as dist

from flowrt.algorithms.advantages import PolynomialAge, SampleWeight, UniformWeight
from flowrt.algorithms.algorithm import Algorithm, Credit, Groups
from flowrt.algorithms.support import Support
from flowrt.client.sample_tensors import Batch
from flowrt.client.session import Session
from flowrt.controller.policies.group_filter import compared
from flowrt.engines.base import AppliesSupports, TrainEngine, TrainingBatch
from flowrt.engines.hf import weight_bytes
from flowrt.engines.registry import TRAIN_ENGINES
from flowrt.engines.training.loss_passes import DIVERGENCE
from flowrt.errors import ConfigError, Drained, EngineError
from flowrt.ids import SOURCE, TRAINER, UNSCORED
from flowrt.protocol.messages import KEPT_TOKENS
from flowrt.ranks.barrier import RankCollectives
from flowrt.recipes.algorithm_config import AlgorithmConfig
from flowrt.recipes.config import RunConfig
from flowrt.recipes.grpo import POLICY
from flowrt.recipes.run_dir import model_dir
from flowrt.roles.algorithm import algorithm
from flowrt.roles.best_weights import BestDirectory, BestWeights
from flowrt.roles.checkpoints import Checkpoints, disk_errors
from flowrt.roles.engine_setup import train_engine
from flowrt.roles.main import main
from flowrt.roles.reference_weights import resume_refreshes, write_refresh
from flowrt.roles.sample_records import TrainedSamples
from flowrt.roles.written_models import WrittenModels
from flowrt.runtime.time_limits import pass_s, state_s, weights_s
from flowrt.runtime.waits import BoundedElsewhere, wait_until
from flowrt.transport.weights.snapshot import Snapshot

log = logging.getLogger("flowrt")
Result = TypeVar("Result")
UNTIL_STOPPED = BoundedElsewhere("the end of the session")


async def run(session: Session, config: RunConfig) -> None:
    """Train with the configured engine until the steps of the run are done."""
    with session.timeline.busy("load"), session.progress.expected(weights_s(weight_bytes(model_dir(config)))):
        engine = await asyncio.to_thread(train_engine, config)
    await train(session, config, engine)


async def train(session: Session, config: RunConfig, engine: TrainEngine) -> None:
    """Train the run's steps, from its checkpoint on; rank 0 reports and publishes. Collective: all ranks call it.

    Raises ConfigError if the engine does not apply supports that it needs, EngineError if it returns no metrics of a
    step.
    """
    check_supports(config, engine)
    ranks = RankCollectives(session.timeline, session.worker)
    await Trainer(session, config, engine, ranks, TrainedSamples(session, config)).run()


class Trainer:
    """One rank of the trainer. All its coroutines are collective: every rank calls them, in the same order."""

    def __init__(
        self,
        session: Session,
        config: RunConfig,
        engine: TrainEngine,
        ranks: RankCollectives,
        samples: TrainedSamples | None = None,
    ) -> None:
        """Make a trainer.

        Args:
            session: the session of this rank.
            config: the run's configuration.
            engine: the engine of this rank.
            ranks: its collective calls.
            samples: notes the samples that are stored; None: none are stored.
        """
        self._session = session
        self._config = config
        self._engine = engine
        self._ranks = ranks
        self._samples = samples
        self._algorithm = algorithm(config)
        self._is_leader = int(os.environ.get("RANK", "0")) == 0
        self._is_lock_step = TRAIN_ENGINES[config.trainer.engine].is_lock_step(config.trainer)
        self._model_bytes = weight_bytes(model_dir(config))
        self._update_s = state_s(self._model_bytes)
        """Time limit of work on the whole state, in seconds."""
        self._step_s = self._update_s + self._passes_at_end() * pass_s(self._step_tokens(), self._model_bytes)
        """Time limit of the end of a step, in seconds."""
        self._best: BestWeights | None = None

    def _step_tokens(self) -> int:
        return self._config.prompts_per_step * self._config.group_size * self._config.rollout.max_new_tokens

    def _passes_at_end(self) -> int:
        """Passes over a step after its last sample: with several updates, or statistics of the step, all of them."""
        plan = self._config.algorithm.plan
        return plan.epochs if plan.updates * plan.epochs > 1 or self._algorithm.needs.scope == "step" else 0

    async def run(self) -> None:
        """Train the run's steps, from its checkpoint on."""
        session, config = self._session, self._config
        checkpoints = Checkpoints(session, config, self._engine, self._ranks)
        done = await checkpoints.load()
        models = WrittenModels(session, config, self._engine, self._ranks)
        await models.resume(done)
        if config.reference.refresh and self._is_leader:
            await asyncio.to_thread(resume_refreshes, config, done)
        self._best = await self._best_weights(done)
        if done:
            await self.publish(done)
        writing = None if self._best is None else asyncio.create_task(self._best.run())
        preempted = False
        for step in range(done, config.steps):
            micro_batches = await self.train_step(step)
            if preempted := micro_batches is None:
                break
            metrics = await self._close_step(step)
            if not metrics and micro_batches:
                raise EngineError(f"step {step}: the engine got {micro_batches} micro-batches and reports no metrics")
            if not metrics:
                break  # the prompts are exhausted
            done = step + 1
            if config.reference.refresh and done % config.reference.refresh == 0:
                await self._refresh_reference(done)
            await self.publish(done, measured_kl(metrics, step))
            if self._samples is not None:
                self._samples.send(step)
            if writing is not None and writing.done():
                writing.result()  # raises the error of a failed write
            await checkpoints.save_if_due(done)
            with session.progress.expected(self._update_s):
                await models.write_if_due(done)
        await checkpoints.save(done)
        if config.trainer.save and not preempted:
            with session.progress.expected(self._update_s):
                await models.write_final()
        await session.params.wait_published()
        if writing is not None and not preempted:
            await wait_until(writing, UNTIL_STOPPED, "the results of the last evaluation", SOURCE)
        session.finished()

    async def train_step(self, step: int) -> int | None:
        """Give the engine this rank's share of the step; returns its number of micro-batches.

        Returns None if the run is preempted: then all ranks discard the step and restore the random state from before
        it.
        """
        rng_state = torch.get_rng_state()
        try:
            return await self._accumulate(step)
        except Drained as drained:
            log.info("%s", drained)
            if self._samples is not None:
                self._samples.clear()
            await self.collective_call(self._engine.discard, f"the gradient of step {step} to be discarded")
            torch.set_rng_state(rng_state)
            return None

    async def _close_step(self, step: int) -> Mapping[str, float]:
        """Make the optimiser step and report it; returns its metrics, which are empty if the prompts are exhausted."""
        session = self._session
        with session.timeline.busy("step"), session.progress.expected(self._step_s):
            metrics = await self.collective_call(self._engine.step, f"step {step}")
        if metrics and self._is_leader:
            session.step_done(step, metrics)
        return metrics

    async def collective_call(self, call: Callable[[], Result], what: str) -> Result:
        """Make a collective call of the engine after this rank's last pass of a step; returns its result.

        In lock step (``fsdp.gather = pass``) other ranks may have passes left that need this rank. So there is no
        barrier before the call, and the engine itself waits for the other ranks.
        """
        ranks = self._ranks
        result: Result = await (ranks.local_call(call, what) if self._is_lock_step else ranks.call(call, what))
        return result

    async def publish(self, version: int, kl: Mapping[int, float] | None = None) -> None:
        """Publish a snapshot of the current weights as ``version``; rank 0 sends it.

        ``kl`` has the measured KL (nats per token) of earlier versions by version, for weight-sync policies.
        """
        session, ranks = self._session, self._ranks
        with session.timeline.busy("snapshot"), session.progress.expected(self._update_s):
            tensors = await ranks.call(self._engine.parameters, f"version {version}")
            snapshot = await asyncio.to_thread(Snapshot.take, version, tensors) if self._is_leader else None
        if snapshot is not None:
            if self._best is not None:
                self._best.keep(snapshot)
            with ranks.exempt():  # the checksum of the previous version may still be in progress
                await session.params.publish_in_background(POLICY, snapshot, kl)

    async def _accumulate(self, step: int) -> int:
        """Train this rank's share of the step, prefetching one micro-batch; returns the number of micro-batches.

        Raises Drained if the run is preempted.
        """
        session, config, ranks = self._session, self._config, self._ranks

        def pull() -> asyncio.Task[Batch]:
            tokens = config.trainer.micro_batch_tokens
            return asyncio.create_task(session.pull("train", slots=0, tokens=tokens, step=step))

        with ranks.exempt():
            batch = await pull()
        micro_batches = 0
        while not batch.closed:
            micro_batches += 1
            following = pull()
            with session.timeline.busy("train"):
                ready = to_training_batch(batch, config, step, self._algorithm, self._samples)
                limit_s = pass_s(sum(map(len, (*ready.prompts, *ready.responses))), self._model_bytes)
                # The other ranks wait for this one even if it takes longer than trainer.rank_timeout_s.
                exempt = contextlib.nullcontext() if self._is_lock_step else ranks.exempt(limit_s)
                with session.progress.expected(limit_s), exempt:
                    await ranks.local_call(partial(self._engine.accumulate, ready), f"a pass of step {step}")
            with ranks.exempt():
                batch = await following
        return micro_batches

    async def _best_weights(self, done: int) -> BestWeights | None:
        """The writer of the best weights on rank 0; None on other ranks, or without ``checkpoint.best``.

        It keeps version 0 if no step is done.
        """
        if not self._config.checkpoint.best:
            return None
        tensors = await self._ranks.call(self._engine.parameters, f"the weights of step {done}")
        if not self._is_leader:
            return None
        best = BestWeights(self._session, self._config, BestDirectory(self._config, tensors, done))
        if not done:
            best.keep(await asyncio.to_thread(Snapshot.take, 0, tensors))
        return best

    async def _refresh_reference(self, step: int) -> None:
        """Write the reference of ``step``, before that version of the policy is published.

        Raises EngineError if writing fails.
        """
        session, ranks = self._session, self._ranks
        fix = f"free disk space, then flowrt resume {self._config.run_dir}"
        with (
            session.timeline.busy("save"),
            session.progress.expected(weights_s(self._model_bytes)),
            disk_errors(f"the reference of step {step}", fix),
            ranks.exempt(),
        ):
            tensors = await ranks.call(self._engine.parameters, f"the weights of step {step}")
            if self._is_leader:
                await asyncio.to_thread(write_refresh, self._config, step, tensors)
            if dist.is_initialized():
                await ranks.call(dist.barrier, f"the reference of step {step}")


def check_supports(config: RunConfig, engine: object) -> None:
    """Raise ConfigError if sampling is truncated and the engine, an object or a class, does not apply supports."""
    applies = isinstance(engine, AppliesSupports) and engine.applies_supports
    if config.rollout.truncation.is_active and not applies:
        name = getattr(engine, "__name__", type(engine).__name__)
        raise ConfigError(
            f"rollout.top_k is {config.rollout.top_k}, and the training engine {name} does not declare that it applies "
            "TrainingBatch.supports: it would train another policy than the one sampled; set rollout.top_k to 0, or "
            "apply them and set applies_supports = True in its class"
        )


def measured_kl(metrics: Mapping[str, float], step: int) -> dict[int, float]:
    """KL (nats per token) of each version from the weights before this step, by version, measured on its samples.

    The weights after the step are one update newer; their KL is not measured.
    """
    by_age = {
        int(name.removeprefix(DIVERGENCE)): value for name, value in metrics.items() if name.startswith(DIVERGENCE)
    }
    return {step - age: value for age, value in by_age.items()}


def to_training_batch(
    batch: Batch, config: RunConfig, step: int, objective: Algorithm, samples: TrainedSamples | None = None
) -> TrainingBatch:
    """Convert pulled groups to a micro-batch with advantages.

    Args:
        batch: complete groups of the train stage.
        config: the run's configuration.
        step: the version being trained, from which staleness is counted.
        objective: the run's algorithm. With scope "step" the engine computes advantages, at the end of the step.
        samples: notes the samples that are stored; None: none are stored.

    If steps are cut to a token budget, advantages are computed over all responses, and only kept tokens are trained.
    Samples to which no reward function applies are left out before that.
    """
    comparable = comparable_rows(batch)
    batch = batch if len(comparable) == len(batch) else batch.only(comparable)
    groups_N = torch.tensor(batch.groups, dtype=torch.int64)
    staleness_N = torch.tensor([step - batch.oldest_version(row) for row in range(len(batch))], dtype=torch.int64)
    groups = Groups(
        rewards_N=torch.tensor(batch.inline["reward"]),
        group_N=groups_N,
        lengths_N=torch.tensor([len(response) for response in batch.tensors["response"]]),
        truncated_N=torch.tensor(batch.inline["truncated"]).bool(),
        staleness_N=staleness_N,
        kl_N=_sampled_kl(batch) if "ref_logprobs" in batch.tensors else None,
    )
    if objective.needs.scope == "step" or not len(batch):
        credit = Credit(torch.zeros(len(batch)), torch.ones(len(batch), dtype=torch.bool))
    else:
        credit = objective.credit(groups)
    weights_N = sample_weight(config.algorithm)(staleness_N)
    kept_N: list[int | None] = [int(count) for count in batch.inline.get(KEPT_TOKENS, [])] or [None] * len(batch)
    rows = [row for row, kept in enumerate(kept_N) if kept != 0 and credit.trained_N[row]]
    captures = None if samples is None else samples.captures(batch, credit.advantages_N)

    def kept_prefixes(column: str) -> list[torch.Tensor]:
        return [batch.tensors[column][row][: kept_N[row]] for row in rows]

    return TrainingBatch(
        prompts=[batch.tensors["prompt"][row] for row in rows],
        responses=kept_prefixes("response"),
        rollout_logprobs=kept_prefixes("logprobs"),
        reference_logprobs=kept_prefixes("ref_logprobs") if "ref_logprobs" in batch.tensors else None,
        advantages_N=credit.advantages_N[rows],
        weights_N=weights_N[rows],
        groups_N=groups_N[rows],
        ages=[step - batch.versions(row)[: kept_N[row]] for row in rows],
        credit=groups if objective.needs.scope == "step" else None,
        supports=[_support(batch, row).prefix(kept_N[row]) for row in rows] if "support" in batch.tensors else None,
        captures=None if captures is None else [captures[row] for row in rows],
    )


def comparable_rows(batch: Batch) -> list[int]:
    """The rows that advantages are computed from, see `compared`."""
    rows: list[int] = []
    unscored_N = batch.inline.get(UNSCORED) or [0.0] * len(batch)
    for _, of_group in groupby(range(len(batch)), batch.groups.__getitem__):
        places = list(of_group)
        rows += [places[at] for at in compared([unscored_N[place] for place in places])]
    return rows


def _sampled_kl(batch: Batch) -> torch.Tensor:
    """Sum over the tokens of each sample of log(rollout / reference), in nats ([N] float64).

    It is 0 where the lengths of the two differ, and where it is not finite.
    """
    pairs = zip(batch.tensors["logprobs"], batch.tensors["ref_logprobs"], strict=True)
    sums = [float((tensor - other).double().sum()) if len(tensor) == len(other) else 0.0 for tensor, other in pairs]
    return torch.tensor(sums, dtype=torch.float64).nan_to_num(0.0, 0.0, 0.0)


def _support(batch: Batch, row: int) -> Support:
    return Support(batch.tensors["support"][row], batch.tensors["support_counts"][row])


def sample_weight(config: AlgorithmConfig) -> SampleWeight:
    """The policy that weights samples by their staleness."""
    return PolynomialAge(config.staleness_power) if config.staleness_weight == "polynomial" else UniformWeight()


def start() -> None:
    """Entry point of the worker process."""
    main(TRAINER, run, drains=True)


if __name__ == "__main__":
    start()
