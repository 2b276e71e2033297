"""The rollout role: pulls slots as sequences finish, generates, and swaps weights at safe points."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flowrt.algorithms.support import Support
from flowrt.client.sample_tensors import Batch
from flowrt.client.session import Session
from flowrt.client.weights import StagedWeights
from flowrt.engines.base import (
    ExternalEngine,
    Prompt,
    ReportsUse,
    Response,
    RolloutEngine,
    SupportsInFlightUpdate,
    sample_seed,
)
from flowrt.engines.hf import weight_bytes
from flowrt.engines.options import SamplingOptions
from flowrt.engines.registry import ROLLOUT_ENGINES
from flowrt.errors import Drained, EngineError
from flowrt.ids import ROLLOUT
from flowrt.protocol.journals import journal_of
from flowrt.protocol.messages import NO_VERSION
from flowrt.protocol.resources import EngineUse
from flowrt.recipes.config import RunConfig
from flowrt.recipes.grpo import EVAL, POLICY
from flowrt.recipes.run_dir import model_dir
from flowrt.roles.engine_setup import rollout_engine, weights_device
from flowrt.roles.journal import Journal, KeptJournals, KeptTokens, newest_checkpoint
from flowrt.roles.kept_sequences import KeptSequences
from flowrt.roles.main import CONTROLLER_FILE, main
from flowrt.roles.sample_records import GeneratedSamples
from flowrt.runtime.compute_thread import ComputeThread
from flowrt.runtime.time_limits import pass_s, weights_s
from flowrt.runtime.waits import CONTROLLER, BoundedElsewhere, wait_any

log = logging.getLogger("flowrt")
LEASE = BoundedElsewhere("the lease on the running slots")
PROBE_S = 10.0
PROBE_SHARE = 0.25
"""Share of the duration of a lease after which the engine is interrupted."""
PULL = BoundedElsewhere("the deadline of the pull, or the end of the session")


async def run(session: Session, config: RunConfig) -> None:
    """Generate with the configured engine until the run ends."""
    with session.timeline.busy("load"), session.progress.expected(weights_s(weight_bytes(model_dir(config)))):
        engine = await asyncio.to_thread(rollout_engine, config, session.worker)
    await generate(session, config, engine)


async def generate(session: Session, config: RunConfig, engine: RolloutEngine) -> None:
    """Generate until the run ends.

    ``engine`` must hold the run's initial weights (version 0) once it is started.
    """
    model_bytes = weight_bytes(model_dir(config))
    with contextlib.ExitStack() as stack:
        if isinstance(engine, ExternalEngine):
            stack.callback(engine.close)
            server = ROLLOUT_ENGINES[config.rollout.engine].server_options(config.rollout)
            limit_s = (1 + server.max_server_restarts) * (server.start_s + weights_s(model_bytes))
            with session.timeline.busy("load"), session.progress.expected(limit_s):
                await session.unless_ended(asyncio.to_thread(engine.start))
        session.params.set_device(POLICY, weights_device(config))
        session.params.applied(POLICY, 0)
        sequences = await keep_sequences(session, config, engine)
        try:
            async with asyncio.TaskGroup() as tasks:
                in_flight = config.rollout.weight_update == "in_flight"
                with_support = config.rollout.truncation.is_active
                loop = RolloutLoop(
                    session,
                    engine,
                    config.seed,
                    tasks,
                    in_flight=in_flight,
                    with_support=with_support,
                    eval_sampling=config.eval.sampling(config.rollout.temperature),
                    samples=GeneratedSamples(session, config),
                    limits=GenerationLimits(
                        model_bytes=model_bytes,
                        max_new_tokens=config.longest_response,
                        lengths=_lengths(config),
                        probe_s=min(PROBE_S, PROBE_SHARE * config.controller.lease_s),
                    ),
                )
                if sequences is None:
                    await loop.run()
                else:
                    loop.keep(sequences)
                    ending = tasks.create_task(session.wait_stopped())  # its error cancels the loop
                    await loop.run()
                    ending.cancel()
        finally:
            if sequences is not None and session.is_ended:
                await sequences.save()


async def keep_sequences(session: Session, config: RunConfig, engine: RolloutEngine) -> KeptSequences | None:
    """The journal of this worker; None if the run has none, or this host does not have the run directory."""
    journals, run_dir = session.welcome.journals, Path(config.run_dir)
    if not journals:
        return None
    if not await asyncio.to_thread((run_dir / CONTROLLER_FILE).is_file):
        log.warning(
            "run directory %s is not the controller's on this host: what this worker generates does not survive it "
            "(checkpoint.samples)",
            run_dir,
        )
        return None
    return KeptSequences(
        session,
        engine,
        Journal(run_dir / journal_of(journals, session.worker), partial(newest_checkpoint, run_dir)),
        KeptJournals(run_dir),
        interval_s=config.rollout.journal_s,
        continues=not config.deterministic,
        max_new_tokens=config.rollout.max_new_tokens,
    )


@dataclass(frozen=True, slots=True)
class Pulled:
    """Pulled slots, and what journals have of them, by row."""

    batch: Batch
    kept: Mapping[int, KeptTokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLimits:
    """Time limits of the work of a rollout worker that does not report progress, and lengths of responses.

    Attributes:
        model_bytes: size of the weights.
        max_new_tokens: maximum length of a response, in tokens.
        lengths: that of responses to train on, and of answers of evaluations; 0: the same.
        probe_s: the engine is interrupted after this many seconds without a finished sequence; that it returns shows
            that its sequences advance.
    """

    model_bytes: int = 0
    max_new_tokens: int = 0
    lengths: tuple[int, int] = (0, 0)
    probe_s: float = PROBE_S

    def prefill_s(self, tokens: int) -> float:
        """Limit of the computation of new prompts of this many tokens."""
        return pass_s(tokens, self.model_bytes) if tokens else 0.0

    def swap_s(self, sequences: int) -> float:
        """Limit of a swap: weights are loaded, and keys and values of running sequences computed again."""
        return weights_s(self.model_bytes) + pass_s(sequences * self.max_new_tokens, self.model_bytes)


class RolloutLoop:
    """Keeps the engine full and swaps in new weights at safe points.

    By default weights are swapped between sequences: once new weights are staged, no sequence is started until all
    running ones have finished. With ``in_flight`` they are swapped while sequences run, which continue with the new
    weights; an engine that `SupportsInFlightUpdate` prepares the swap in the background first. While sequences of an
    evaluation run, no weights are swapped, because one version must generate the whole sequence.

    ``with_support``: the sampling is truncated, so the tokens that could be drawn are committed too.
    ``eval_sampling``: sampling of evaluations; None: greedy.
    ``samples``: sends the generation times of stored samples; None: no samples are stored.
    ``limits``: time limits of work that does not report progress.
    """

    def __init__(
        self,
        session: Session,
        engine: RolloutEngine,
        seed: int,
        tasks: asyncio.TaskGroup,
        *,
        in_flight: bool = False,
        with_support: bool = False,
        eval_sampling: SamplingOptions | None = None,
        samples: GeneratedSamples | None = None,
        limits: "GenerationLimits | None" = None,
    ) -> None:
        self._session = session
        self._engine = engine
        self._seed = seed
        self._tasks = tasks
        self._in_flight = in_flight
        self._with_support = with_support
        self._eval_sampling = eval_sampling
        self._samples = samples
        self._limits = limits or GenerationLimits()
        self._kept: KeptSequences | None = None
        self._finished_tokens = 0  # of all responses that the engine has returned
        session.resources.engine = self.use
        self._new_tokens = 0  # of prompts that the engine got since it last returned
        self._version = 0  # version of the weights in use
        self._exact: set[int] = set()  # keys of running sequences of an evaluation
        self._interrupt = threading.Event()
        self._thread = ComputeThread()
        self._pull: asyncio.Task[Pulled | None] | None = None
        # (slot, lease) by key. A slot may be granted again, with another lease, while its earlier sequence still runs.
        self._running: dict[int, tuple[int, int]] = {}
        self._last_key = 0
        self._draining = False
        self._preparing_for: StagedWeights | None = None
        self._preparing: asyncio.Task[None] | None = None

    def keep(self, kept: KeptSequences) -> None:
        """Keep what is generated in a journal, and continue what others have kept. Called before `run`."""
        self._kept = kept
        kept.begin(self._thread, self._interrupt)

    def use(self) -> EngineUse:
        """What the engine has done; of an engine that does not say so, the tokens of the responses that it returned."""
        engine = self._engine
        return engine.use() if isinstance(engine, ReportsUse) else EngineUse(self._finished_tokens)

    async def run(self) -> None:
        """Run until a drain is complete. Raises the error that ended the session."""
        while self._engine.running or not self._draining:
            if self._kept is not None:
                await self._kept.write_if_due()
            await self._swap_if_safe()
            if self._session.params.staged() is None or self._preparing is not None:
                self._admit()
                if self._pull is None and self._engine.room and not self._draining:
                    self._start_pull()
            if self._engine.running:
                await self._generate()
            elif not self._draining and (self._pull is None or not self._pull.done()):
                await self._wait_for_work()

    async def _generate(self) -> None:
        self._interrupt.clear()
        staged = self._session.params.staged() is not None and self._preparing is None
        in_flight = self._may_swap_in_flight
        if (staged and in_flight) or (not staged and self._pull is not None and self._pull.done()):
            return
        # The engine may compute all new prompts before it checks the interrupt for the first time.
        prefill_s = self._limits.prefill_s(self._new_tokens)
        probe_s = self._limits.probe_s if self._kept is None else min(self._limits.probe_s, self._kept.due_s)
        probe = asyncio.get_running_loop().call_later(probe_s, self._interrupt.set)
        try:
            with (
                self._session.timeline.busy("generate", rows=len(self._running)),
                self._session.progress.expected(prefill_s),
            ):
                run = self._thread.run(self._run_engine)
                finished = await (self._interrupt_when_staged(run) if in_flight else run)
        finally:
            probe.cancel()
            self._interrupt.set()  # a cancelled run goes on in its thread
        self._new_tokens = 0
        self._finished_tokens += sum(len(response.tokens) for response in finished)
        if finished:
            self._exact.difference_update(response.key for response in finished)
            self._tasks.create_task(self._commit(finished))

    def _run_engine(self) -> list[Response]:
        """Run the engine; called on its thread."""
        finished = self._engine.run(self._interrupt)
        if self._kept is not None:
            self._kept.note_returned(finished)
        return finished

    async def _interrupt_when_staged(self, run: Coroutine[Any, Any, list[Response]]) -> list[Response]:
        """Await the engine; interrupt it when new weights are staged or prepared. Returns the finished sequences."""
        running = asyncio.create_task(run)
        waited = self._session.params.wait_staged() if self._preparing is None else _wait_prepared(self._preparing)
        staged = asyncio.create_task(self._session.unless_ended(waited))
        try:
            await wait_any({running, staged}, LEASE, "the engine, or newer weights", "this worker's engine")
            self._interrupt.set()
            finished = await running
            if staged.done():
                staged.result()  # raises the error that ended the session
            return finished
        finally:
            self._interrupt.set()
            staged.cancel()

    async def _wait_for_work(self) -> None:
        staged = asyncio.create_task(self._session.unless_ended(self._session.params.wait_staged()))
        waits = {staged} if self._pull is None else {staged, self._pull}
        try:
            await wait_any(waits, PULL, "slots, or newer weights", CONTROLLER)
            if staged.done():
                staged.result()  # raises the error that ended the session
        finally:
            staged.cancel()

    async def _swap_if_safe(self) -> None:
        staged = self._preparing_for or self._session.params.staged()
        if staged is None or self._exact or (self._in_flight and await self._is_preparing(staged)):
            return
        if self._may_swap_in_flight or not self._engine.running:
            with (
                self._session.timeline.busy("swap"),
                self._session.progress.expected(self._limits.swap_s(self._engine.running)),
            ):
                await self._thread.run(self._engine.swap, staged.snapshot)
            self._session.params.applied(staged.model, staged.snapshot.version)
            self._version = staged.snapshot.version
            self._preparing_for = None

    @property
    def _may_swap_in_flight(self) -> bool:
        """Whether running sequences may continue with the staged weights.

        Sequences of an evaluation may not, nor may any sequence continue with older weights, which would make it too
        old to be trained.
        """
        staged = self._preparing_for or self._session.params.staged()
        return self._in_flight and not self._exact and not (staged is not None and staged.older)

    async def _is_preparing(self, staged: StagedWeights) -> bool:
        """Start the next step of preparing these weights; returns True while the swap must wait for it.

        False if the engine has no further step. Weights staged meanwhile wait until these are in use; otherwise
        frequent versions would keep any from being used.
        """
        if self._preparing is not None:
            if self._engine.running and not self._preparing.done():
                return True
            with self._session.progress.expected(self._limits.swap_s(self._engine.running)):
                await _wait_prepared(self._preparing)
            self._preparing.result()
            self._preparing = None
        if not isinstance(self._engine, SupportsInFlightUpdate):
            return False
        work = self._engine.prepare(staged.snapshot)
        if work is None:
            return False
        self._preparing_for = staged
        self._preparing = asyncio.create_task(asyncio.to_thread(work))
        return True

    def _start_pull(self) -> None:
        self._pull = self._tasks.create_task(self._pull_slots(self._engine.room))
        self._pull.add_done_callback(lambda _: self._interrupt.set())

    async def _pull_slots(self, slots: int) -> Pulled | None:
        """Pull slots, and read what journals have of them; returns None once this worker drains.

        An exception would cancel the task group and its running work.
        """
        try:
            batch = await self._session.pull("rollout", slots=slots)
        except Drained:
            return None
        if self._kept is None:
            return Pulled(batch, {})
        try:
            return Pulled(batch, await self._kept.read(batch))
        except asyncio.CancelledError:
            self._session.give_back("rollout", batch)
            raise

    def _admit(self) -> None:
        """Pass the pulled slots to the engine, if the pull is complete."""
        if self._pull is None or not self._pull.done():
            return
        pull = self._pull
        self._pull = None
        if pull.cancelled():
            return  # the running sequences are not affected; the next round pulls again
        pulled = pull.result()
        if pulled is None:
            self._draining = True
            return
        batch = pulled.batch
        grant = batch.grant
        prompts = []
        complete = []
        exact = grant.exact or (NO_VERSION,) * len(batch.slots)
        for row, slot in enumerate(batch.slots):
            if exact[row] not in (NO_VERSION, self._version):
                reason = f"it is of version {exact[row]}, and {self._version} is in use"
                self._session.give_back_slots("rollout", (slot,), (grant.lease,), reason)
                continue
            self._last_key += 1
            if exact[row] != NO_VERSION:
                self._exact.add(self._last_key)
            self._running[self._last_key] = slot, grant.lease
            if self._samples is not None:
                self._samples.started(self._last_key, batch, row)
            seed = sample_seed(
                self._seed, grant.prompts[row], grant.epochs[row], grant.members[row], grant.attempts[row]
            )
            prompt, is_eval = batch.tensors["prompt"][row], batch.flows[row] == EVAL
            greedy, sampling = is_eval and self._eval_sampling is None, self._eval_sampling if is_eval else None
            kept = pulled.kept.get(row)
            if self._kept is not None and not is_eval:
                self._kept.started(self._last_key, batch, row, kept)
            if kept is not None and kept.is_complete:
                complete.append(_response(self._last_key, kept))
                continue
            prefix = None if kept is None else kept.prefix
            limit = self._limits.lengths[is_eval]
            prompts.append(Prompt(self._last_key, prompt, seed, greedy, sampling, prefix, limit))
        self._new_tokens += sum(len(prompt.tokens) for prompt in prompts)
        self._new_tokens += sum(len(prompt.prefix.tokens) for prompt in prompts if prompt.prefix is not None)
        if prompts:
            self._engine.add(prompts)
        if complete:
            self._tasks.create_task(self._commit(complete))

    async def _commit(self, finished: list[Response]) -> None:
        slots, leases = zip(*(self._running.pop(response.key) for response in finished), strict=True)
        tensors = {
            "response": [response.tokens for response in finished],
            "logprobs": [response.logprobs for response in finished],
        }
        inline = {"truncated": [float(response.truncated) for response in finished]}
        if self._with_support:
            supports = [_support(response) for response in finished]
            tensors |= {"support": [support.tokens_E for support in supports]}
            tensors |= {"support_counts": [support.counts_T for support in supports]}
            inline |= {"support_size": [len(support.tokens_E) / len(support.counts_T) for support in supports]}
        spans = [response.spans for response in finished]
        keys = [response.key for response in finished]
        if self._samples is not None:
            self._samples.finished(keys)
        if self._kept is not None:
            self._kept.finished(finished)
        refused = await self._session.commit("rollout", slots, leases, tensors, inline, spans)
        if self._samples is not None:
            self._samples.send(keys, refused)
        if self._kept is not None:
            self._kept.release(refused)


def _lengths(config: RunConfig) -> tuple[int, int]:
    """`GenerationLimits.lengths` of a run."""
    of_eval = config.eval.max_new_tokens
    return (config.rollout.max_new_tokens, of_eval) if of_eval else (0, 0)


def _response(key: int, kept: KeptTokens) -> Response:
    prefix = kept.prefix
    return Response(key, prefix.tokens, prefix.logprobs, prefix.spans, kept.truncated, prefix.support)


def _support(response: Response) -> Support:
    """The support of a response. Raises EngineError if it has none."""
    if response.support is None:
        raise EngineError(
            "the rollout engine returned a response without support, which top-k, top-p and min-p sampling need; set "
            "rollout.top_k to 0, or let the engine record the tokens that could be drawn"
        )
    return response.support


async def _wait_prepared(preparing: asyncio.Task[None]) -> None:
    await wait_any({preparing}, LEASE, "newer weights to be prepared", "this worker's engine")


def start() -> None:
    """Entry point of the worker process."""
    main(ROLLOUT, run, drains=True)


if __name__ == "__main__":
    start()
