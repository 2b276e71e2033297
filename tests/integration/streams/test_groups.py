"""Groups of four samples: trained whole and unmixed in any order of commits; the policies for lost members."""

import signal

import pytest

from flowrt import api
from flowrt.controller.storage.ledger_reader import LedgerReader
from tests.integration.streams.conftest import Peer, Run, Start, Stream

COLUMNS = (api.Column("data", "float32", "group"), api.Column("text", "float32", "slot"))
STAGES = (
    api.Stage("make", ("data",), ("text",), generates=True),
    api.Stage("judge", ("text",), ("score",)),
    api.Stage("train", ("data", "text", "score"), (), flow="train", whole_groups=True),
)
FLOW = api.Dataflow(COLUMNS, STAGES, "train", "train", token_columns=("text",))
PROMPTS, MEMBERS = 3, 4
ORDERS = {
    "in order": list(range(12)),
    "backwards": list(range(11, -1, -1)),
    "member by member": [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11],
    "last member of each at the end": [8, 0, 9, 1, 4, 10, 5, 2, 6, 7, 11, 3],
}


def history(stream: Stream, prompt: int) -> list[str]:
    """The states of a prompt in the ledger, in chronological order."""
    ledger = stream.server.ledger
    ledger.commit()
    with LedgerReader(ledger._path) as reader:
        events = reader.history(prompt, None)
    return [f"{event.state}: {event.reason}" if event.reason else event.state for event in events]


async def connect_workers(stream: Stream, session_peer: Start, *names: str) -> list[Peer]:
    """Processes by name; makers have the initial weights."""
    peers = [await session_peer(stream.address, name) for name in names]
    for name, peer in zip(names, peers, strict=True):
        if name.startswith("maker"):
            await peer.do("applied")
    return peers


async def judge_all(judge: Peer, rows: int) -> None:
    await judge.do("pull", stage="judge", slots=rows)
    await judge.do("commit", stage="judge", inline=["score"])


async def end_step(stream: Stream, trainer: Peer) -> None:
    await trainer.do("step_done", step=0)
    await stream.until(lambda: not stream.table.slots)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
async def test_groups_are_trained_whole_and_unmixed_in_any_order(
    run: Run, session_peer: Start, order: list[int]
) -> None:
    async with run(FLOW, steps=1, groups_per_step=PROMPTS) as stream:
        source, maker, judge, trainer = await connect_workers(
            stream, session_peer, "source", "maker", "judge", "trainer"
        )
        await source.do("offer", prompts=[10, 11, 12], members=MEMBERS, flow="train", tags=[])
        held = await maker.do("pull", stage="make", slots=12)
        assert held["prompts"] == [10] * 4 + [11] * 4 + [12] * 4
        done: dict[int, set[int]] = {10: set(), 11: set(), 12: set()}
        trained: list[int] = []
        trainer.command("pull", stage="train", slots=0, step=0)
        for place in order:
            await maker.do("commit", stage="make", only=[place], lengths={"text": 2}, spans=True)
            await judge_all(judge, 1)
            done[10 + place // MEMBERS].add(place % MEMBERS)
            complete = {prompt for prompt, members in done.items() if len(members) == MEMBERS}
            while complete != set(trained):
                batch = await trainer.answer()
                assert batch["members"] == [0, 1, 2, 3]
                [prompt] = set(batch["prompts"])
                trained.append(prompt)
                assert prompt in complete
                trainer.command("pull", stage="train", slots=0, step=0)
            waits = stream.waits.get("trainer")
            assert waits is None or waits.startswith("a full micro-batch of step 0: 0 of")
        assert (await trainer.answer())["closed"]
        await end_step(stream, trainer)
        stream.assert_empty()
        for prompt in (10, 11, 12):
            assert history(stream, prompt) == ["in_flight", "ready", "leased", "trained"]


async def group_with_a_lost_member(stream: Stream, session_peer: Start, how: str) -> tuple[Peer, Peer, Peer, Peer]:
    """A group of four whose first member is lost: reported by its worker, or killed with its only holder."""
    names = ("source", "maker", "maker-2", "judge", "trainer")
    source, maker, second, judge, trainer = await connect_workers(stream, session_peer, *names)
    await source.do("offer", prompts=[10], members=MEMBERS, flow="train", tags=[])
    await maker.do("pull", stage="make", slots=1)
    await second.do("pull", stage="make", slots=3)
    await second.do("commit", stage="make", lengths={"text": 2}, spans=True)
    await judge_all(judge, 3)
    trainer.command("pull", stage="train", slots=0, step=0)
    # Messages of different processes arrive in any order: the trainer is known to wait only from here on.
    await stream.until(lambda: "trainer" in stream.waits)
    if how == "reported":
        await maker.do("lost", stage="make", reason="the environment broke")
    else:
        await maker.do("commit", stage="make", lengths={"text": 2}, spans=True)
        maker.signal(signal.SIGKILL)
        await stream.until(lambda: "maker" not in stream.core.state.membership)
    return source, second, judge, trainer


REASONS = {"reported": "make failed: the environment broke", "killed": "its holder left"}


@pytest.mark.parametrize("how", REASONS)
async def test_lost_member_is_regenerated(run: Run, session_peer: Start, how: str) -> None:
    async with run(FLOW, steps=1, groups_per_step=1, on_lost_sample=api.OnLostSample.REGENERATE) as stream:
        _, maker, judge, trainer = await group_with_a_lost_member(stream, session_peer, how)
        again = await maker.do("pull", stage="make", slots=4)
        assert (again["prompts"], again["members"]) == ([10], [0])
        assert again["attempts"] == [1 if how == "reported" else 0]
        assert stream.waits["trainer"] == "a full micro-batch of step 0: 0 of 1 groups complete"
        await maker.do("commit", stage="make", lengths={"text": 2}, spans=True)
        await judge_all(judge, 4)
        assert (await trainer.answer())["members"] == [0, 1, 2, 3]
        await end_step(stream, trainer)
        lost = [f"dropped: {REASONS[how]}", "in_flight: offered again"] if how == "reported" else []
        assert history(stream, 10) == ["in_flight", *lost, "ready", "leased", "trained"]


@pytest.mark.parametrize("how", REASONS)
async def test_a_group_that_lost_a_member_is_dropped_whole_and_replaced(
    run: Run, session_peer: Start, how: str
) -> None:
    async with run(FLOW, steps=1, groups_per_step=1, on_lost_sample=api.OnLostSample.DROP_GROUP) as stream:
        source, maker, judge, trainer = await group_with_a_lost_member(stream, session_peer, how)
        await stream.until(lambda: not stream.table.slots)
        assert (await maker.do("measure"))["tensors"] == 0
        reason = f"dropped: {REASONS[how]}; that was attempt 1 at sample 0"
        assert history(stream, 10) == ["in_flight", reason]
        await source.do("offer", prompts=[11], members=MEMBERS, flow="train", tags=[])
        await maker.do("pull", stage="make", slots=4)
        await maker.do("commit", stage="make", lengths={"text": 2}, spans=True)
        await judge_all(judge, 4)
        assert (await trainer.answer())["prompts"] == [11] * 4
        await end_step(stream, trainer)
        assert history(stream, 11)[-1] == "trained"
        assert stream.server.status()["dropped"] == {REASONS[how]: 1}


@pytest.mark.parametrize("how", REASONS)
async def test_the_rest_of_a_group_that_lost_a_member_is_trained(run: Run, session_peer: Start, how: str) -> None:
    async with run(FLOW, steps=1, groups_per_step=1, on_lost_sample=api.OnLostSample.TRAIN_REMAINING) as stream:
        _, _, _, trainer = await group_with_a_lost_member(stream, session_peer, how)
        batch = await trainer.answer()
        assert (batch["prompts"], batch["members"]) == ([10, 10, 10], [1, 2, 3])
        await end_step(stream, trainer)
        assert history(stream, 10) == ["in_flight", "ready: without a lost sample", "leased", "trained"]
        assert stream.server.status()["dropped"] == {REASONS[how]: 1}


async def test_sample_that_keeps_failing_is_dropped_after_the_attempt_limit(run: Run, session_peer: Start) -> None:
    async with run(FLOW, steps=1, groups_per_step=1, attempts=3) as stream:
        source, maker = await connect_workers(stream, session_peer, "source", "maker")
        await source.do("offer", prompts=[10], members=MEMBERS, flow="train", tags=[])
        for attempt in range(3):
            held = await maker.do("pull", stage="make", slots=1)
            assert (held["members"], held["attempts"]) == ([0], [attempt])
            await maker.do("lost", stage="make", reason="no luck")
        await stream.until(lambda: not stream.table.slots)
        again = ["dropped: make failed: no luck", "in_flight: offered again"]
        last = "dropped: make failed: no luck; that was attempt 3 at sample 0"
        assert history(stream, 10) == ["in_flight", *again, *again, last]
