"""What a rollout worker keeps of its sequences, and takes over of those that other processes have kept.

Complete samples of the flow that is trained are written as they end. Sequences in generation are written every
``interval_s`` seconds, and when the session ends, if the engine continues sequences.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import itemgetter
from time import monotonic

import torch

from flowrt.client.sample_tensors import Batch
from flowrt.client.session import Session
from flowrt.engines.base import (
    ContinuesSequences,
    ExternalEngine,
    Interrupt,
    NewTokens,
    Prefix,
    Response,
    RolloutEngine,
)
from flowrt.errors import EngineError, WaitExpired
from flowrt.protocol.journals import SampleKey
from flowrt.roles.journal import Journal, KeptJournals, KeptTokens, NewPart, prompt_checksum
from flowrt.roles.main import SAVE_S
from flowrt.runtime.compute_thread import ComputeThread
from flowrt.runtime.waits import wait_until

log = logging.getLogger("flowrt")
NOT_KEPT = "sequences in generation are not kept:"


@dataclass(slots=True)
class _KeptSequence:
    slot: int
    key: SampleKey
    prompt: torch.Tensor
    written: int = 0
    """Number of its tokens in the journal."""

    def part(self, new: NewTokens) -> NewPart:
        """Tokens that follow those in the journal; the sequence goes on."""
        return NewPart(self.slot, self.key, self.prompt, new)


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
        self._reader = ComputeThread()  # a pull that is cancelled may still read when the next one begins to
        self._interval_s = interval_s
        self._max_new = max_new_tokens
        self._running: dict[int, _KeptSequence] = {}  # by the engine's key
        self._written_s = monotonic()
        self._thread: ComputeThread | None = None
        self._interrupt: threading.Event | None = None
        self._returned: Sequence[Response] = ()  # by the engine's last run
        session.on_freed = self._on_freed

    def begin(self, thread: ComputeThread, interrupt: threading.Event) -> None:
        """Set the thread on which the engine runs, and the flag that interrupts it."""
        self._thread, self._interrupt = thread, interrupt

    async def read(self, batch: Batch) -> dict[int, KeptTokens]:
        """What journals have of the slots of a batch, by row; prefixes only if the engine continues them."""
        if not batch.grant.kept:
            return {}
        return await self._reader.run(self._read, batch)

    def _read(self, batch: Batch) -> dict[int, KeptTokens]:
        kept: dict[int, KeptTokens] = {}
        for row, journals in sorted(enumerate(batch.grant.kept), key=itemgetter(1)):  # each file once
            if not journals:
                continue
            tokens = self._others.read(journals, _key(batch, row), prompt_checksum(batch.tensors["prompt"][row]))
            if tokens is None:
                continue
            fits = self._engine is not None and len(tokens.prefix.tokens) < self._max_new
            if tokens.is_complete or fits:
                kept[row] = tokens
        return kept

    def started(self, key: int, batch: Batch, row: int, kept: KeptTokens | None) -> None:
        """Note a sequence of the engine; what was kept of it is written to this journal too.

        Of a slot that is granted again while its earlier sequence runs, only the later one is written from then on.
        """
        prompt, slot = batch.tensors["prompt"][row], batch.slots[row]
        for other in [other for other, earlier in self._running.items() if earlier.slot == slot]:
            del self._running[other]
        sequence = self._running[key] = _KeptSequence(slot, _key(batch, row), prompt)
        if kept is not None and not kept.is_complete:
            self._write([(sequence, sequence.part(kept.prefix.after(0)))])

    def note_returned(self, responses: Sequence[Response]) -> None:
        """Note what the engine has returned; called on its thread, also after the role has stopped waiting for it."""
        self._returned = responses

    def finished(self, responses: Sequence[Response], *, is_last: bool = False) -> None:
        """Write sequences that are complete."""
        complete: list[tuple[_KeptSequence, NewPart]] = []
        for response in responses:
            sequence = self._running.pop(response.key, None)
            if sequence is not None:
                whole = Prefix(response.tokens, response.logprobs, response.spans, response.support)
                part = sequence.part(whole.after(sequence.written))
                complete.append((sequence, replace(part, is_complete=True, truncated=response.truncated)))
        self._write(complete, is_last=is_last)

    def release(self, slots: Sequence[int]) -> None:
        """Note that these slots are not needed any more, but those of which a sequence runs again."""
        running = {sequence.slot for sequence in self._running.values()}
        self._journal.release([slot for slot in slots if slot not in running])

    @property
    def due_s(self) -> float:
        """Seconds until the sequences in generation are to be written."""
        if self._engine is None or not self._interval_s or not self._journal.is_open:
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
        except WaitExpired as error:
            log.warning("%s %s", NOT_KEPT, error)
        finally:
            self._session.is_saving = False

    async def _save(self) -> None:
        if self._thread is not None and self._interrupt is not None and self._running:
            self._interrupt.set()
            try:
                await self._write_running(is_last=True)
                self.finished(await self._thread.run(self._take_ended, self._interrupt), is_last=True)
            except EngineError as error:
                log.warning("%s %s", NOT_KEPT, error)
        await self._journal.close()

    def _take_ended(self, interrupt: Interrupt) -> Sequence[Response]:
        """The sequences that have ended since the role stopped waiting; called on the engine's thread."""
        ended = self._returned
        if self._engine is not None and isinstance(self._engine, ExternalEngine):  # it generates between runs
            ended = [*ended, *self._engine.run(interrupt)]
        return ended

    async def _write_running(self, *, is_last: bool = False) -> None:
        if self._engine is None or self._thread is None:
            return
        starts = {key: sequence.written for key, sequence in self._running.items()}
        generated = await self._thread.run(self._engine.new_tokens, starts)
        running = [(sequence, generated[key]) for key, sequence in self._running.items() if key in generated]
        following = [(sequence, new) for sequence, new in running if sequence.written == new.start]
        self._write([(sequence, sequence.part(new)) for sequence, new in following], is_last=is_last)

    def _write(self, new: Sequence[tuple[_KeptSequence, NewPart]], *, is_last: bool = False) -> None:
        count = self._journal.add([part for _, part in new], is_last=is_last)
        for sequence, part in new[:count]:
            sequence.written = part.tokens.end

    def _on_freed(self, columns: Sequence[str], slots: Sequence[int]) -> None:
        if not columns or "response" in columns:
            self.release(slots)


def _key(batch: Batch, row: int) -> SampleKey:
    grant = batch.grant
    return SampleKey(grant.epochs[row], grant.prompts[row], grant.members[row], grant.attempts[row])
