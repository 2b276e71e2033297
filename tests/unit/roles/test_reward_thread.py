"""Long responses take seconds to decode: the event loop of a reward worker goes on, and its heartbeats with it."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch

from flowrt.client.sample_tensors import Batch
from flowrt.client.session import Session
from flowrt.engines.stopping import StopConditions
from flowrt.engines.tiny_model import wrap_tokenizer
from flowrt.protocol import messages as m
from flowrt.protocol.sample_records import ScoredSample, decode_record
from flowrt.recipes.config_io import parse
from flowrt.recipes.tasks.arithmetic import Arithmetic
from flowrt.roles import reward
from flowrt.roles.sample_records import ScoredSamples
from flowrt.runtime.clock import MonotonicClock
from flowrt.runtime.timeline import Timeline


def batch(rows: int) -> Batch:
    zeros = (0,) * rows
    numbers = tuple(range(rows))
    grant = m.Grant(
        request=1,
        lease=1,
        slots=numbers,
        flows=("train",) * rows,
        groups=zeros,
        members=numbers,
        prompts=zeros,
        epochs=zeros,
        attempts=zeros,
        spans=((0, 4),) * rows,
        inline=(),
        parts=(),
        incoming=(),
        closed=not rows,
        refused=(),
    )
    columns = {
        "response": [torch.tensor([3, 4, 5, 1], dtype=torch.int32)] * rows,
        "prompt": [torch.tensor([3], dtype=torch.int32)] * rows,
        "answer": [torch.tensor(list(b"7"), dtype=torch.uint8)] * rows,
    }
    return Batch(grant, cast(Any, columns), cast(Any, {"truncated": [0.0] * rows}))


class _Session:
    """A session with one batch."""

    def __init__(self) -> None:
        self.timeline = Timeline(MonotonicClock())
        self.batches = [batch(2), batch(0)]
        self.rewards: list[float] = []
        self.refused: tuple[int, ...] = ()
        self.records: list[ScoredSample] = []

    async def pull(self, stage: str, slots: int) -> Batch:
        return self.batches.pop(0)

    def start_commit(
        self, stage: str, slots: Any, leases: Any, tensors: Any, inline: Mapping[str, Sequence[float]]
    ) -> "asyncio.Task[m.Committed]":
        self.rewards += inline["reward"]
        return asyncio.create_task(asyncio.sleep(0, m.Committed(1, self.refused, "")))

    def send(self, message: m.SampleRecords) -> None:
        records = [decode_record(record) for record in message.records]
        self.records += [record for record in records if isinstance(record, ScoredSample)]


class _Scoring(Arithmetic):
    def reward(self, response: str, answer: str) -> float:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return float(len(response))


def score_all(session: _Session, samples_per_step: int) -> None:
    """Score the batches of a session."""
    config = parse(["--samples.per-step", str(samples_per_step)])
    stop = StopConditions((1,), (), wrap_tokenizer(Arithmetic(0, 1).tokenizer()))

    async def score() -> None:
        typed_session = cast(Session, session)
        await reward._run_task(typed_session, _Scoring(0, 1), stop, ScoredSamples(typed_session, config, stop))

    asyncio.run(asyncio.wait_for(score(), 120))


def test_the_run_s_task_scores_on_another_thread() -> None:
    session = _Session()
    score_all(session, 0)
    assert len(session.rewards) == 2
    assert min(session.rewards) > 0


def test_the_rewards_of_refused_slots_are_not_stored() -> None:
    """Another worker scores such a sample, and perhaps differently."""
    session = _Session()
    session.refused = (1,)
    score_all(session, 10**6)
    assert len(session.rewards) == 2
    assert [record.member for record in session.records] == [0]
