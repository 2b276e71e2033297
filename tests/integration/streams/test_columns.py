"""Who may write a column, and with what: a wrong dtype or shape, a slot of somebody else, columns of another stage."""

import asyncio
from typing import Any

import pytest
import torch

from flowrt import api
from flowrt.wire import messages as m
from flowrt.wire.link import ClientLink
from flowrt.wire.records import Lengths, Part, Values

COLUMNS = (api.Column("data", "float32", "group"), api.Column("text", "float32", "slot"))
STAGES = (api.Stage("make", ("data",), ("text", "score")), api.Stage("read", ("data", "text", "score", "tag"), ()))
FLOW = api.Dataflow(COLUMNS, STAGES, tags=("tag",))


class RawClient:
    """Says any message over a real connection; hears what comes back."""

    def __init__(self, address: str, name: str) -> None:
        self._heard: asyncio.Queue[m.Message] = asyncio.Queue()
        self._link = ClientLink(self._heard.put_nowait, self._heard.put_nowait)  # type: ignore[arg-type]
        self._link.connect(address)
        self.say(m.Hello(m.PROTOCOL, name, "raw", "host", 1, ("gloo",)))

    def say(self, message: m.Message) -> None:
        self._link.send(message)

    async def hear(self, kind: type[Any]) -> Any:
        async with asyncio.timeout(10):
            while not isinstance(message := await self._heard.get(), kind):
                continue
        return message

    def close(self) -> None:
        self._link.close()


def commit(slots: tuple[int, ...], lease: int, parts: tuple[Part, ...], *inline: Values) -> m.Commit:
    return m.Commit(7, "make", slots, (lease,) * len(slots), parts, inline, ())


@pytest.mark.parametrize(
    ("wrong", "says"), [("double", r"1-D torch.float32, not 1-D torch.float64"), ("row2d", "not 2-D torch.float32")]
)
async def test_a_wrong_dtype_or_shape_is_refused_to_its_writer_alone(run, puppet, wrong: str, says: str) -> None:
    async with run(FLOW) as stream:
        maker, writer, reader = [await puppet(stream.address, name) for name in ("maker", "writer", "reader")]
        await maker.do("offer", prompts=[1, 2, 3, 4])
        await maker.do("pull", stage="make", slots=2)
        await writer.do("pull", stage="make", slots=2)
        await maker.do("commit", stage="make", makes={"text": 3}, inline=["score"])
        stream.heard.clear()
        before = await writer.do("measure")
        writer.tell("commit", stage="make", makes={"text": 3}, inline=["score"], wrong=wrong)
        answer = await writer.hear()
        assert answer["error"] == "LocalProtocolError"
        assert "column 'text'" in answer["text"]
        assert says in answer["text"]
        writer.tell("offer", prompts=[9], wrong=wrong)
        answer = await writer.hear()
        assert answer["error"] == "LocalProtocolError"
        assert "column 'data'" in answer["text"]
        assert says in answer["text"]
        after = await writer.do("measure")
        assert (after["tensors"], after["bytes"]) == (before["tensors"], before["bytes"])
        assert not [message for _, message in stream.heard if isinstance(message, m.Commit | m.Offer)]
        # What was there stays right (the reader compares every number), and the writer may do better.
        assert (await reader.do("pull", slots=4))["prompts"] == [1, 2]
        await writer.do("commit", stage="make", makes={"text": 3}, inline=["score"])
        assert (await reader.do("pull", slots=4))["prompts"] == [3, 4]


async def test_one_bad_row_among_good_ones_keeps_none_of_them(run) -> None:
    async with run(FLOW) as stream:
        session = await api.connect(stream.address, "s", "s", 5)
        good, bad = torch.ones(2), torch.ones(2, dtype=torch.float64)
        with pytest.raises(api.FlowError, match=r"column 'data' takes 1-D torch.float32, not 1-D torch.float64"):
            await session.offer_many("rows", [1, 2], tensors={"data": [good, bad]}, tags={"tag": [1.0, 2.0]})
        await session.offer_many("rows", [1, 2], tensors={"data": [good, good]}, tags={"tag": [1.0, 2.0]})
        batch = await session.pull("make", slots=2)
        with pytest.raises(api.FlowError, match=r"column 'text' takes 1-D torch.float32, not 1-D torch.float64"):
            await session.commit("make", batch.slots, batch.leases, {"text": [good, bad]}, {"score": [1.0, 2.0]})
        assert session.store.statistics()[0] == 2
        await session.close()


async def test_a_commit_of_somebody_elses_slot_is_refused_and_disturbs_nobody(run, puppet) -> None:
    async with run(FLOW) as stream:
        maker, reader = await puppet(stream.address, "maker"), await puppet(stream.address, "reader")
        await maker.do("offer", prompts=[5, 6])
        held = await maker.do("pull", stage="make", slots=2)
        thief = RawClient(stream.address, "thief")
        slots = tuple(held["slots"])
        parts = (Part("text", slots, (1, 1)),)
        thief.say(commit(slots, held["lease"], parts, Values("score", (0.0, 0.0))))
        refused = await thief.hear(m.Committed)
        assert refused.refused == slots
        assert refused.reason == "the lease on stage make had ended"
        assert (await maker.do("commit", stage="make", makes={"text": 3}, inline=["score"]))["refused"] == []
        # A second time, now that it is done: by the thief and by the maker itself.
        thief.say(commit(slots, held["lease"], parts, Values("score", (0.0, 0.0))))
        assert (await thief.hear(m.Committed)).refused == slots
        assert (await maker.do("commit", stage="make", makes={"text": 7}, inline=["score"]))["refused"] == list(slots)
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
async def test_a_commit_with_wrong_columns_ends_the_run_by_name(run, parts, inline) -> None:
    async with run(FLOW) as stream:
        raw = RawClient(stream.address, "raw")
        raw.say(m.Offer(1, "rows", (1,), 0, 1, 0, (Lengths("data", (1,)),), (Values("tag", (1.0,)),)))
        await raw.hear(m.Opened)
        raw.say(m.Pull(2, "make", 1, 0, -1))
        grant = await raw.hear(m.Grant)
        raw.say(commit(grant.slots, grant.lease, parts, *inline))
        stop = await raw.hear(m.Stop)
        assert "raw: commit of stage 'make' by raw: it" in stop.reason
        assert stop.code == 1
        assert not stream.board.is_done(stream.board.slots[0], "make")
        raw.say(m.Bye(""))
        await stream.until(lambda: "raw" not in stream.core.roster)
        raw.close()
