"""What a rollout worker keeps of its sequences: of each slot one sequence, and all that has ended when it stops."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from flowrt import api
from flowrt.client.sample_tensors import Batch, Columns, Numbers
from flowrt.client.session import Session
from flowrt.engines.base import Interrupt, NewTokens, Prefix, Prompt, Response
from flowrt.protocol.journals import SampleKey
from flowrt.protocol.messages import Grant
from flowrt.recipes.grpo import POLICY
from flowrt.roles import journal as journal_module
from flowrt.roles.journal import Journal, KeptJournals, KeptTokens, prompt_checksum
from flowrt.roles.kept_sequences import KeptSequences
from flowrt.roles.rollout import RolloutLoop
from flowrt.runtime.compute_thread import ComputeThread
from flowrt.transport.weights.snapshot import Snapshot

PROMPT = torch.tensor([5, 6, 7], dtype=torch.int32)
SLOT, PROMPT_NUMBER = 7, 3
TIMEOUT_S = 120.0
FLOW = api.Dataflow(
    (
        api.Column("prompt", "int32", "group"),
        api.Column("response", "int32", "slot"),
        api.Column("logprobs", "float32", "slot"),
    ),
    (api.Stage("rollout", needs=("prompt",), makes=("response", "logprobs", "truncated"), generates=True),),
)
POLICIES = api.Policies(api.StrictLag(1), api.Fifo(), api.TokenBudget(1), api.DelayedUpdate())


class Engine:
    """An engine whose sequences have the tokens that a test gives them. Its runs last until they are interrupted."""

    version = 0

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ends: list[Response] = []
        self.is_in_run = threading.Event()

    @property
    def running(self) -> int:
        return len(self.tokens)

    @property
    def room(self) -> int:
        return 2 - self.running

    def add(self, prompts: Sequence[Prompt]) -> None:
        self.tokens |= {prompt.key: [] for prompt in prompts}

    def run(self, interrupt: Interrupt) -> list[Response]:
        self.is_in_run.set()
        assert interrupt.wait(TIMEOUT_S)
        return self.take_ends()

    def take_ends(self) -> list[Response]:
        ended, self.ends = self.ends, []
        for end in ended:
            del self.tokens[end.key]
        return ended

    def swap(self, snapshot: Snapshot) -> None:
        raise AssertionError

    def new_tokens(self, starts: Mapping[int, int]) -> Mapping[int, NewTokens]:
        ends = {key: len(tokens) for key, tokens in self.tokens.items() if len(tokens) > starts.get(key, 0)}
        return {key: prefix(self.tokens[key]).after(starts.get(key, 0)) for key in ends}


class ExternalEngine(Engine):
    """One that generates between its runs: its sequences end after it was asked for their tokens."""

    later: Sequence[Response] = ()

    def start(self) -> None: ...

    def close(self) -> None: ...

    def new_tokens(self, starts: Mapping[int, int]) -> Mapping[int, NewTokens]:
        kept = super().new_tokens(starts)
        self.ends += self.later
        return kept


def prefix(tokens: Sequence[int]) -> Prefix:
    ids = torch.tensor(tokens, dtype=torch.int32)
    return Prefix(ids, -ids.float(), (0, len(tokens)))


def response(key: int, tokens: Sequence[int]) -> Response:
    kept = prefix(tokens)
    return Response(key, kept.tokens, kept.logprobs, kept.spans, truncated=False)


def batch(slot: int = SLOT, prompt: int = PROMPT_NUMBER) -> Batch:
    grant = Grant(0, 0, (slot,), ("train",), (0,), (0,), (prompt,), (0,), (0,), (), (), (), (), False)
    return Batch(grant, Columns({"prompt": [PROMPT]}), Numbers())


def keep(run_dir: Path, engine: Engine, session: Session | None = None, interval_s: float = 0.0) -> KeptSequences:
    return KeptSequences(
        session or cast(Session, SimpleNamespace()),
        engine,
        Journal(run_dir / "w", lambda: -1),  # no checkpoint needs what is released
        KeptJournals(run_dir),
        interval_s=interval_s,
        continues=True,
        max_new_tokens=100,
    )


async def begun(run_dir: Path, engine: Engine) -> KeptSequences:
    sequences = keep(run_dir, engine)
    sequences.begin(ComputeThread(), threading.Event())
    return sequences


def read(run_dir: Path, prompt: int = PROMPT_NUMBER) -> KeptTokens | None:
    return KeptJournals(run_dir).read("w", SampleKey(0, prompt, 0, 0), prompt_checksum(PROMPT))


async def test_of_two_sequences_of_a_slot_only_the_later_one_is_written(tmp_path: Path) -> None:
    """The lease of the first has expired, and the slot was granted again."""
    engine = Engine()
    sequences = await begun(tmp_path, engine)
    sequences.started(1, batch(), 0, None)
    engine.tokens = {1: [1, 2, 3]}
    await sequences._write_running()
    sequences.started(2, batch(), 0, None)
    engine.tokens = {1: [1, 2, 3], 2: [11, 12, 13]}
    await sequences._write_running()
    engine.tokens[1] += [4, 5]
    await sequences.save()
    kept = read(tmp_path)
    assert kept is not None
    assert kept.prefix.tokens.tolist() == [11, 12, 13]


async def test_a_refused_sequence_leaves_the_later_one_of_its_slot_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SLACK_BYTES", 0)
    engine = Engine()
    sequences = await begun(tmp_path, engine)
    for key in (1, 2):
        sequences.started(key, batch(), 0, None)
    engine.tokens = {1: [1], 2: [11, 12, 13]}
    await sequences._write_running()
    sequences.finished([response(1, [1, 2])])
    sequences.release([SLOT])
    engine.tokens = {2: [11, 12, 13, 14]}
    await sequences.save()
    kept = read(tmp_path)
    assert kept is not None
    assert kept.prefix.tokens.tolist() == [11, 12, 13, 14]


async def test_a_sequence_that_ends_while_the_others_are_taken_is_written(tmp_path: Path) -> None:
    engine = ExternalEngine()
    sequences = await begun(tmp_path, engine)
    sequences.started(1, batch(), 0, None)
    sequences.started(2, batch(SLOT + 1, prompt=9), 0, None)
    engine.tokens, engine.later = {1: [], 2: [8]}, [response(1, [1, 2])]
    await sequences.save()
    first, second = read(tmp_path), read(tmp_path, 9)
    assert first is not None
    assert (first.is_complete, first.prefix.tokens.tolist()) == (True, [1, 2])
    assert second is not None
    assert (second.is_complete, second.prefix.tokens.tolist()) == (False, [8])


async def test_what_the_disk_lags_behind_with_is_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MAX_PENDING_BYTES", 100)
    engine = Engine()
    sequences = await begun(tmp_path, engine)
    for key in range(3):
        sequences.started(key, batch(SLOT + key, prompt=key), 0, None)
        engine.tokens[key] = list(range(1 + key, 10 + key))
    await sequences.save()
    for key in range(3):
        kept = read(tmp_path, key)
        assert kept is not None
        assert kept.prefix.tokens.tolist() == engine.tokens[key]


async def test_without_a_disk_the_engine_is_not_interrupted(tmp_path: Path) -> None:
    (tmp_path / "w").write_text("a file in place of the directory")
    engine = Engine()
    sequences = keep(tmp_path, engine, interval_s=1e-9)
    sequences.begin(ComputeThread(), threading.Event())
    assert sequences.due_s == 0
    sequences.started(1, batch(), 0, None)
    engine.tokens = {1: [1]}
    await sequences.write_if_due()
    await sequences._journal.close()
    assert sequences.due_s == float("inf")


async def test_a_sequence_that_ends_in_the_run_that_the_end_of_the_session_interrupts_is_kept(tmp_path: Path) -> None:
    engine = Engine()
    async with api.controller(FLOW, api.Settings(), POLICIES, tmp_path) as (_, address), asyncio.timeout(TIMEOUT_S):
        source, rollout = [await api.connect(address, role, role, 60) for role in ("source", "rollout")]
        rollout.params.applied(POLICY, 0)
        sequences = keep(tmp_path, engine, rollout)

        async def generate() -> None:
            async with asyncio.TaskGroup() as tasks:
                loop = RolloutLoop(rollout, engine, 0, tasks)
                loop.keep(sequences)
                await loop.run()

        generating = asyncio.create_task(generate())
        await source.offer("data", PROMPT_NUMBER, 0, 1, {"prompt": PROMPT})
        await asyncio.to_thread(engine.is_in_run.wait, TIMEOUT_S)
        [key] = engine.tokens
        engine.ends = [response(key, [1, 2, 3])]
        generating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await generating
        await sequences.save()
        for session in (source, rollout):
            await session.close()
    kept = read(tmp_path)
    assert kept is not None
    assert (kept.is_complete, kept.prefix.tokens.tolist()) == (True, [1, 2, 3])
