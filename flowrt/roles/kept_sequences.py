"""What a rollout worker keeps of its sequences, and takes over of those that other processes have kept.

Complete samples of the flow that is trained are written as they end. Sequences in generation are written every
``interval_s`` seconds, and when the session ends, if the engine continues sequences.
"""

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic

import torch

from flowrt.client.samples import Batch
from flowrt.client.session import Session
from flowrt.engines.base import ContinuesSequences, Prefix, Response, RolloutEngine
from flowrt.errors import EngineError, WaitExpired
from flowrt.protocol.journals import SampleKey
from flowrt.roles.journal import Journal, KeptJournals, KeptTokens, NewPart, prompt_checksum
from flowrt.roles.main import SAVE_S
from flowrt.runtime.compute_thread import ComputeThread
from flowrt.runtime.waits import wait_until

log = logging.getLogger("flowrt")


@dataclass(slots=True)
class _KeptSequence:
    slot: int
    key: SampleKey
    prompt: torch.Tensor
    written: int = 0
    """Number of its tokens in the journal."""


class KeptSequences:
    """Keeps the sequences of one worker.

    Args:
        session: the worker's session.
        engine: generates the sequences.
        journal: of this process.
        others: the journals of other processes.
        interval_s: seconds after which sequences in generation are written; 0: only at the end.
        continues: whether sequences are continued. They are not in a deterministic run, because a prefill rounds
            differently from decoding; they are generated again from their seeds.
        max_new_tokens: maximum length of a response, in tokens.
    """

    def __init__(
        self,
        session: Session,
        engine: RolloutEngine,
        journal: Journal,
        others: KeptJournals,
        *,
        interval_s: float,
        continues: bool,
        max_new_tokens: int,
    ) -> None:
        self._session = session
        self._engine = engine if continues and isinstance(engine, ContinuesSequences) else None
        self._journal = journal
        self._others = others
        self._interval_s = interval_s
        self._max_new = max_new_tokens
        self._running: dict[int, _KeptSequence] = {}  # by the engine's key
        self._written_s = monotonic()
        self._thread: ComputeThread | None = None
        self._interrupt: threading.Event | None = None
        session.on_freed = self._on_freed

    def begin(self, thread: ComputeThread, interrupt: threading.Event) -> None:
        """Set the thread on which the engine runs, and the flag that interrupts it."""
        self._thread, self._interrupt = thread, interrupt

    async def read(self, batch: Batch) -> dict[int, KeptTokens]:
        """What journals have of the slots of a batch, by row; prefixes only if the engine continues them."""
        if not batch.grant.kept:
            return {}
        return await asyncio.to_thread(self._read, batch)

    def _read(self, batch: Batch) -> dict[int, KeptTokens]:
        kept: dict[int, KeptTokens] = {}
        for row, journal in enumerate(batch.grant.kept):
            if not journal:
                continue
            tokens = self._others.read(journal, _key(batch, row), prompt_checksum(batch.tensors["prompt"][row]))
            if tokens is None:
                continue
            fits = self._engine is not None and len(tokens.prefix.tokens) < self._max_new
            if tokens.is_complete or fits:
                kept[row] = tokens
        return kept

    def started(self, key: int, batch: Batch, row: int, kept: KeptTokens | None) -> None:
        """Note a sequence of the engine; what was kept of it is written to this journal too."""
        prompt = batch.tensors["prompt"][row]
        sequence = self._running[key] = _KeptSequence(batch.slots[row], _key(batch, row), prompt)
        if kept is not None and not kept.is_complete:
            self._write([(sequence, kept)])

    def finished(self, responses: Sequence[Response]) -> None:
        """Write sequences that are complete."""
        complete: list[tuple[_KeptSequence, KeptTokens]] = []
        for one in responses:
            sequence = self._running.pop(one.key, None)
            if sequence is not None:
                prefix = Prefix(one.tokens, one.logprobs, one.spans, one.support)
                complete.append((sequence, KeptTokens(prefix, is_complete=True, truncated=one.truncated)))
        self._write(complete)

    def release(self, slots: Sequence[int]) -> None:
        """Note that these slots are not needed any more."""
        self._journal.release(slots)

    @property
    def due_s(self) -> float:
        """Seconds until the sequences in generation are to be written."""
        if self._engine is None or not self._interval_s:
            return inf
        return max(self._written_s + self._interval_s - monotonic(), 0.0)

    async def write_if_due(self) -> None:
        """Write the sequences in generation if it is time; the engine does not run meanwhile."""
        if not self.due_s:
            await self._write_running()
            self._written_s = monotonic()

    async def save(self) -> None:
        """Write the sequences in generation, and return when the journal is on disk. Called when the session ends."""
        self._session.is_saving = True
        try:
            await wait_until(self._save(), SAVE_S, "the sequences in generation to be written", "the engine")
        except (EngineError, WaitExpired) as error:
            log.warning("sequences in generation are not kept: %s", error)
        finally:
            self._session.is_saving = False

    async def _save(self) -> None:
        if self._interrupt is not None:
            self._interrupt.set()
        if self._running:
            await self._write_running()
        await self._journal.close()

    async def _write_running(self) -> None:
        if self._engine is None or self._thread is None:
            return
        new: list[tuple[_KeptSequence, KeptTokens]] = []
        for key, prefix in (await self._thread.run(self._engine.prefixes)).items():
            sequence = self._running.get(key)
            if sequence is not None and len(prefix.tokens) > sequence.written:
                new.append((sequence, KeptTokens(prefix, is_complete=False, truncated=False)))
        self._write(new)

    def _write(self, new: Sequence[tuple[_KeptSequence, KeptTokens]]) -> None:
        parts = [NewPart(one.slot, one.key, one.prompt, one.written, tokens) for one, tokens in new]
        if parts and self._journal.add(parts):
            for one, tokens in new:
                one.written = len(tokens.prefix.tokens)

    def _on_freed(self, columns: Sequence[str], slots: Sequence[int]) -> None:
        if not columns or "response" in columns:
            self._journal.release(slots)


def _key(batch: Batch, row: int) -> SampleKey:
    grant = batch.grant
    return SampleKey(grant.epochs[row], grant.prompts[row], grant.members[row], grant.attempts[row])
