"""A controller that is killed and comes back, over real sockets: what sessions tell it, and what it refuses."""

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flowrt import api
from flowrt.client.session import Session
from flowrt.controller.storage.reader import LedgerReader
from flowrt.errors import WaitExpired
from flowrt.protocol import messages as m
from flowrt.protocol.codec import encode
from flowrt.protocol.messages import ColumnLengths, Part, unpack
from tests.integration.helpers import small_controller
from tests.integration.helpers.small_controller import REGROUP_S
from tests.integration.test_sessions import Stranger


class Reign:
    """Controllers of one run, one after another at one address, each killed without warning."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._popen: subprocess.Popen[str] | None = None
        self.address = "tcp://127.0.0.1:0"

    async def begin(self) -> None:
        self.address = await asyncio.to_thread(self._start)
        assert self.address, "the controller did not begin"

    def _start(self) -> str:
        arguments = [sys.executable, small_controller.__file__, str(self._run_dir), self.address]
        self._popen = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert self._popen.stdout is not None
        return self._popen.stdout.readline().strip()

    def kill(self) -> None:
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait(10)
            assert self._popen.stdout is not None
            self._popen.stdout.close()
            self._popen = None

    async def come_back(self) -> None:
        self.kill()
        await self.begin()

    def events(self, state: str) -> Counter[int]:
        """How often each prompt was in this state."""
        with LedgerReader(self._run_dir / "ledger.sqlite") as ledger:
            found = ledger.query(f"SELECT prompt FROM events WHERE state = '{state}'")
        return Counter(prompt for (prompt,) in found)


@pytest.fixture
def reign(tmp_path: Path) -> Iterator[Reign]:
    one = Reign(tmp_path)
    yield one
    one.kill()


async def settled(session: Session) -> None:
    """Everything that this worker has said so far is heard: a later request is answered."""
    with pytest.raises(api.FlowError, match="no stage 'nothing'"):
        await session.pull("nothing", slots=1)


async def test_work_continues_and_nothing_is_generated_twice(reign: Reign) -> None:
    await reign.begin()
    source, rollout, reward, trainer = [await api.connect(reign.address, n, n, 20) for n in ("s", "o", "w", "trainer")]
    rollout.params.applied("policy", 0)
    assert await source.offer("train", 7, 0, 2, {"prompt": torch.arange(5, dtype=torch.int32)}) == 0
    batch = await rollout.pull("rollout", slots=2)
    made = [torch.rand(3), torch.rand(4)]
    first, second = batch.slots
    assert not await rollout.commit("rollout", [first], batch.leases[:1], {"response": made[:1]}, spans=[(0, 3)])
    await reign.come_back()
    # The other sample was in the making, and the pull for rewards had been answered by nobody.
    assert not await rollout.commit("rollout", [second], batch.leases[:1], {"response": made[1:]}, spans=[(0, 4)])
    judged = await reward.pull("reward", slots=8)
    assert list(judged.grant.attempts) == [0, 0]
    await reward.commit("reward", judged.slots, judged.leases, inline={"reward": [1.0, 1.0]})
    learned = await trainer.pull("train", slots=0, step=0)
    assert all(torch.equal(a, b) for a, b in zip(learned.tensors["response"], made, strict=True))
    assert (await trainer.pull("train", slots=0, step=0)).closed
    reign.kill()
    trainer.step_done(0, {"loss": 1.0})  # into the void: it has to be said again
    waiting = asyncio.create_task(trainer.pull("train", slots=0, step=1))
    await reign.begin()
    assert await source.offer("train", 8, 0, 1, {"prompt": torch.arange(2, dtype=torch.int32)}) is not None
    again = await rollout.pull("rollout", slots=1)
    await rollout.commit("rollout", again.slots, again.leases, {"response": made[:1]}, spans=[(0, 3)])
    judged = await reward.pull("reward", slots=8)
    await reward.commit("reward", judged.slots, judged.leases, inline={"reward": [0.5]})
    assert list((await waiting).grant.prompts) == [8]
    for session in (source, rollout, reward, trainer):
        await session.close()
    assert reign.events("trained") == {7: 1}
    assert reign.events("dropped") == {}


async def test_stale_commit_is_refused_with_a_reason(reign: Reign) -> None:
    await reign.begin()
    source = await api.connect(reign.address, "s", "s", 20)
    await source.offer("train", 7, 0, 1, {"prompt": torch.arange(5, dtype=torch.int32)})
    stale = Stranger(reign.address)
    stale.send(encode(m.Hello(protocol=m.PROTOCOL, worker="o", role="rollout", host="host", pid=1, lanes=("gloo",))))
    assert isinstance(await stale.hear(), m.Welcome)
    stale.send(encode(m.WeightsActivated("policy", 0)))
    stale.send(encode(m.Pull(request=1, stage="rollout", slots=1, tokens=0, step=-1)))
    grant = await stale.hear()
    assert isinstance(grant, m.Grant)
    stale.close()
    await reign.come_back()
    stale = Stranger(reign.address)
    stale.send(
        encode(m.Hello(protocol=m.PROTOCOL, worker="o", role="rollout", host="host", pid=1, lanes=("gloo",), term=1))
    )
    welcome = await stale.hear()
    assert isinstance(welcome, m.Welcome)
    assert welcome.term == 2
    stale.send(encode(m.Inventory((), ())))  # and not a word of what it works on
    part = Part("response", grant.slots, (3,))
    stale.send(
        encode(
            m.Commit(
                request=2,
                stage="rollout",
                slots=grant.slots,
                leases=(grant.lease,),
                parts=(part,),
                inline=(),
                spans=((0, 3),),
            )
        )
    )
    answer = await stale.hear()
    assert isinstance(answer, m.Committed)
    assert answer.refused == grant.slots
    assert "was given by a controller that is gone, and was not renewed" in answer.reason
    stale.close()
    await source.close()


async def test_worker_that_reconnects_too_late_receives_the_reason(reign: Reign) -> None:
    await reign.begin()
    source = await api.connect(reign.address, "s", "s", 20)
    late = Stranger(reign.address)
    late.send(encode(m.Hello(protocol=m.PROTOCOL, worker="late", role="rollout", host="host", pid=1, lanes=("gloo",))))
    await late.hear()
    late.close()
    await reign.come_back()
    # Answered once the late one is not waited for any more.
    waited = asyncio.get_running_loop().time()
    assert await source.offer("train", 7, 0, 1, {"prompt": torch.arange(5, dtype=torch.int32)}) is not None
    assert asyncio.get_running_loop().time() - waited < REGROUP_S + 10
    late = Stranger(reign.address)
    late.send(
        encode(m.Hello(protocol=m.PROTOCOL, worker="late", role="rollout", host="host", pid=1, lanes=("gloo",), term=1))
    )
    refusal = await late.hear()
    assert isinstance(refusal, m.Rejected)
    assert refusal.request == m.PERMANENT
    assert "late counts as gone" in refusal.reason
    late.close()
    await source.close()


async def test_source_replaced_while_the_controller_was_down_continues_at_the_same_position(
    reign: Reign,
) -> None:
    """What only the dead one could send is unread again, but not before all that were in have had time to come back."""
    await reign.begin()
    hello = m.Hello(protocol=m.PROTOCOL, worker="source", role="source", host="host", pid=1, lanes=("gloo",))
    offer = m.Offer(
        request=1,
        flow="train",
        prompts=(7,),
        epoch=0,
        members=1,
        at_least=-1,
        lengths=(ColumnLengths("prompt", (5,)),),
        tags=(),
    )
    source, rollout = Stranger(reign.address), Stranger(reign.address)
    source.send(encode(hello))
    rollout.send(encode(m.Hello(protocol=m.PROTOCOL, worker="o", role="rollout", host="host", pid=1, lanes=("gloo",))))
    assert isinstance(await source.hear(), m.Welcome)
    assert isinstance(await rollout.hear(), m.Welcome)
    source.send(encode(offer))
    assert isinstance(await source.hear(), m.OfferAccepted)
    source.close()
    rollout.close()
    await reign.come_back()
    source, rollout = Stranger(reign.address), Stranger(reign.address)
    source.send(encode(hello))
    rollout.send(
        encode(m.Hello(protocol=m.PROTOCOL, worker="o", role="rollout", host="host", pid=1, lanes=("gloo",), term=1))
    )
    assert isinstance(await rollout.hear(), m.Welcome)
    rollout.send(encode(m.Inventory((), ())))
    welcome = await source.hear()
    assert isinstance(welcome, m.Welcome)
    assert unpack(welcome.position.passed).get(0, frozenset()) == frozenset()
    source.send(encode(offer))
    assert isinstance(await source.hear(), m.OfferAccepted)
    source.close()
    rollout.close()


async def test_worker_gives_up_on_a_controller_that_stays_away(reign: Reign) -> None:
    await reign.begin()
    rollout = await api.connect(reign.address, "o", "o", 20)
    rollout.welcome.reconnect_timeout_s = 0.5
    waiting = asyncio.create_task(rollout.pull("rollout", slots=1))
    await settled(rollout)
    reign.kill()
    with pytest.raises(WaitExpired, match=r"went away and did not come back within 0 s: no answer"):
        await waiting
    await rollout.close()
