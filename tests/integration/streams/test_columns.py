"""Invalid writes to a column: a wrong dtype or shape, the lease of another worker, columns of another stage."""

import asyncio
from typing import Any

import pytest
import torch

from flowrt import api
from flowrt.errors import EXIT_DISMISSED
from flowrt.net.link import ClientLink
from flowrt.protocol import messages as m
from flowrt.protocol.messages import ColumnLengths, Part, Values
from tests.integration.streams.conftest import ANSWER_TIMEOUT_S, Run, Start

COLUMNS = (api.Column("data", "float32", "group"), api.Column("text", "float32", "slot"))
STAGES = (api.Stage("make", ("data",), ("text", "score")), api.Stage("read", ("data", "text", "score", "tag"), ()))
FLOW = api.Dataflow(COLUMNS, STAGES, tags=("tag",))


class RawClient:
    """Sends any message over a real connection and receives the replies."""

    def __init__(self, address: str, name: str) -> None:
        self._received: asyncio.Queue[m.Message] = asyncio.Queue()
        self._link = ClientLink(self._received.put_nowait, self._received.put_nowait)  # type: ignore[arg-type]
        self._link.connect(address)
        self.send(m.Hello(protocol=m.PROTOCOL, worker=name, role="raw", host="host", pid=1, lanes=("gloo",)))

    def send(self, message: m.Message) -> None:
        self._link.send(message)

    async def answer(self, kind: type[Any]) -> Any:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while not isinstance(message := await self._received.get(), kind):
                continue
        return message

    def close(self) -> None:
        self._link.close()


def commit(slots: tuple[int, ...], lease: int, parts: tuple[Part, ...], *inline: Values) -> m.Commit:
    return m.Commit(
        request=7, stage="make", slots=slots, leases=(lease,) * len(slots), parts=parts, inline=inline, spans=()
    )


@pytest.mark.parametrize(
    ("wrong", "expected"), [("double", r"1-D torch.float32, not 1-D torch.float64"), ("row2d", "not 2-D torch.float32")]
)
async def test_a_wrong_dtype_or_shape_raises_in_its_writer_only(
    run: Run, session_peer: Start, wrong: str, expected: str
) -> None:
    async with run(FLOW) as stream:
        maker, writer, reader = [await session_peer(stream.address, name) for name in ("maker", "writer", "reader")]
        await maker.do("offer", prompts=[1, 2, 3, 4])
        await maker.do("pull", stage="make", slots=2)
        await writer.do("pull", stage="make", slots=2)
        await maker.do("commit", stage="make", lengths={"text": 3}, inline=["score"])
        stream.received.clear()
        before = await writer.do("measure")
        writer.command("commit", stage="make", lengths={"text": 3}, inline=["score"], wrong=wrong)
        answer = await writer.answer()
        assert answer["error"] == "LocalProtocolError"
        assert "column 'text'" in answer["text"]
        assert expected in answer["text"]
        writer.command("offer", prompts=[9], wrong=wrong)
        answer = await writer.answer()
        assert answer["error"] == "LocalProtocolError"
        assert "column 'data'" in answer["text"]
        assert expected in answer["text"]
        after = await writer.do("measure")
        assert (after["tensors"], after["bytes"]) == (before["tensors"], before["bytes"])
        assert not [message for _, message in stream.received if isinstance(message, m.Commit | m.Offer)]
        # Earlier rows are unchanged (the reader compares every number), and the writer can commit valid rows.
        assert (await reader.do("pull", slots=4))["prompts"] == [1, 2]
        await writer.do("commit", stage="make", lengths={"text": 3}, inline=["score"])
        assert (await reader.do("pull", slots=4))["prompts"] == [3, 4]


async def test_commit_with_one_bad_row_stores_none(run: Run) -> None:
    async with run(FLOW) as stream:
        session = await api.connect(stream.address, "s", "s", ANSWER_TIMEOUT_S)
        good, bad = torch.ones(2), torch.ones(2, dtype=torch.float64)
        with pytest.raises(api.FlowError, match=r"column 'data' takes 1-D torch.float32, not 1-D torch.float64"):
            await session.offer_many("rows", [1, 2], tensors={"data": [good, bad]}, tags={"tag": [1.0, 2.0]})
        await session.offer_many("rows", [1, 2], tensors={"data": [good, good]}, tags={"tag": [1.0, 2.0]})
        batch = await session.pull("make", slots=2)
        with pytest.raises(api.FlowError, match=r"column 'text' takes 1-D torch.float32, not 1-D torch.float64"):
            await session.commit("make", batch.slots, batch.leases, {"text": [good, bad]}, {"score": [1.0, 2.0]})
        assert session.store.statistics()[0] == 2
        await session.close()


async def test_a_tag_reaches_stages_that_need_it_and_raises_key_error_in_others(run: Run) -> None:
    async with run(FLOW) as stream:
        session = await api.connect(stream.address, "s", "s", ANSWER_TIMEOUT_S)
        await session.offer_many("rows", [1], tensors={"data": [torch.ones(2)]}, tags={"tag": [3.0]})
        batch = await session.pull("make", slots=1)
        with pytest.raises(KeyError, match=r"no numbers 'tag', and no others: .* receives the columns and tags of its"):
            batch.inline["tag"]
        assert batch.inline.get("tag") is None
        await session.commit("make", batch.slots, batch.leases, {"text": [torch.ones(1)]}, {"score": [1.0]})
        assert (await session.pull("read", slots=1)).inline == {"score": [1.0], "tag": [3.0]}
        await session.close()


async def test_commit_under_another_workers_lease_dismisses_its_sender_only(run: Run, session_peer: Start) -> None:
    async with run(FLOW) as stream:
        maker, reader = await session_peer(stream.address, "maker"), await session_peer(stream.address, "reader")
        await maker.do("offer", prompts=[5, 6])
        held = await maker.do("pull", stage="make", slots=2)
        thief = RawClient(stream.address, "thief")
        slots = tuple(held["slots"])
        parts = (Part("text", slots, (1, 1)),)
        thief.send(commit(slots, held["lease"], parts, Values("score", (0.0, 0.0))))
        stop = await thief.answer(m.Stop)
        assert f"thief uses lease {held['lease']} for stage 'make', which is of maker" in stop.reason
        assert stop.code == EXIT_DISMISSED
        thief.close()
        assert (await maker.do("commit", stage="make", lengths={"text": 3}, inline=["score"]))["refused"] == []
        # Again, after the lease has ended: its owner is no longer known.
        thief = RawClient(stream.address, "second")
        thief.send(commit(slots, held["lease"], parts, Values("score", (0.0, 0.0))))
        late = await thief.answer(m.Committed)
        assert (late.refused, late.reason) == (slots, "the lease on stage make had ended")
        assert (await maker.do("commit", stage="make", lengths={"text": 7}, inline=["score"]))["refused"] == list(slots)
        assert (await reader.do("pull", slots=4))["prompts"] == [5, 6]
        thief.close()


@pytest.mark.parametrize(
    ("parts", "inline"),
    [
        ((), (Values("score", (0.0,)),)),
        ((Part("text", (0,), (1,)),), ()),
        ((Part("data", (0,), (1,)),), (Values("score", (0.0,)),)),
        ((Part("text", (0,), (1,)),), (Values("score", (0.0, 1.0)),)),
    ],
)
async def test_a_commit_with_wrong_columns_dismisses_its_worker(
    run: Run, parts: tuple[Part, ...], inline: tuple[Values, ...]
) -> None:
    async with run(FLOW) as stream:
        raw = RawClient(stream.address, "raw")
        raw.send(
            m.Offer(
                request=1,
                flow="rows",
                prompts=(1,),
                epoch=0,
                members=1,
                at_least=0,
                lengths=(ColumnLengths("data", (1,)),),
                tags=(Values("tag", (1.0,)),),
            )
        )
        await raw.answer(m.OfferAccepted)
        raw.send(m.Pull(request=2, stage="make", slots=1, tokens=0, step=-1))
        grant = await raw.answer(m.Grant)
        raw.send(commit(grant.slots, grant.lease, parts, *inline))
        stop = await raw.answer(m.Stop)
        assert "protocol violation: commit of stage 'make' by raw: it" in stop.reason
        assert stop.code == EXIT_DISMISSED
        assert "raw" not in stream.core.state.membership
        assert stream.server.ended is None
        assert not stream.table.slots  # the only worker with the row was dismissed
        raw.close()
