"""A controller that is killed and restarted, over real sockets: what sessions report to it, what it refuses."""

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from flowrt import api
from flowrt.client.session import Session
from flowrt.controller.storage.ledger_reader import LedgerReader
from flowrt.controller.transitions.drain import RELEASED
from flowrt.errors import Drained, Stopped, WaitExpired
from flowrt.ids import OBSERVER
from flowrt.launcher.observer import Observer
from flowrt.protocol import messages as m
from flowrt.protocol.codec import encode
from flowrt.protocol.messages import ColumnLengths, Part, unpack
from tests.integration.helpers import small_controller
from tests.integration.test_sessions import WITHIN_S, Stranger


class Controllers:
    """Successive controller processes of one run at one address, each ended by SIGKILL."""

    def __init__(self, run_dir: Path, *options: str) -> None:
        self._run_dir = run_dir
        self._options = options
        self._popen: subprocess.Popen[str] | None = None
        self.address = "tcp://127.0.0.1:0"

    async def start(self) -> None:
        self.address = await asyncio.to_thread(self._start)
        assert self.address, "the controller did not start"

    def _start(self) -> str:
        arguments = [sys.executable, small_controller.__file__, str(self._run_dir), self.address, *self._options]
        self._popen = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert self._popen.stdout is not None
        return self._popen.stdout.readline().strip()

    def kill(self) -> None:
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait(WITHIN_S)
            assert self._popen.stdout is not None
            self._popen.stdout.close()
            self._popen = None

    async def restart(self) -> None:
        self.kill()
        await self.start()

    def events(self, state: str) -> Counter[int]:
        """Number of times that each prompt entered this state."""
        with LedgerReader(self._run_dir / "ledger.sqlite") as ledger:
            rows = ledger.query(f"SELECT prompt FROM events WHERE state = '{state}'")
        return Counter(prompt for (prompt,) in rows)


@pytest.fixture
def controllers(tmp_path: Path) -> Iterator[Controllers]:
    controllers = Controllers(tmp_path)
    yield controllers
    controllers.kill()


@pytest.fixture
def impatient_controllers(tmp_path: Path) -> Iterator[Controllers]:
    """As `controllers`, but they soon count workers that do not come back as gone."""
    controllers = Controllers(tmp_path, "rejoin=6")
    yield controllers
    controllers.kill()


async def wait_until_processed(session: Session) -> None:
    """Wait until the controller has processed all messages of this worker: it answers a later request."""
    with pytest.raises(api.FlowError, match="no stage 'nothing'"):
        await session.pull("nothing", slots=1)


async def test_work_continues_after_restarts_and_nothing_is_generated_twice(controllers: Controllers) -> None:
    await controllers.start()
    source, rollout, reward, trainer = [
        await api.connect(controllers.address, n, n, WITHIN_S) for n in ("s", "o", "w", "trainer")
    ]
    rollout.params.applied("policy", 0)
    assert await source.offer("train", 7, 0, 2, {"prompt": torch.arange(5, dtype=torch.int32)}) == 0
    batch = await rollout.pull("rollout", slots=2)
    responses = [torch.rand(3), torch.rand(4)]
    first, second = batch.slots
    assert not await rollout.commit("rollout", [first], batch.leases[:1], {"response": responses[:1]}, spans=[(0, 3)])
    await controllers.restart()
    # The second sample was still being generated, and no reward pull had been answered.
    assert not await rollout.commit("rollout", [second], batch.leases[:1], {"response": responses[1:]}, spans=[(0, 4)])
    to_score = await reward.pull("reward", slots=8)
    assert list(to_score.grant.attempts) == [0, 0]
    await reward.commit("reward", to_score.slots, to_score.leases, inline={"reward": [1.0, 1.0]})
    to_train = await trainer.pull("train", slots=0, step=0)
    assert all(torch.equal(a, b) for a, b in zip(to_train.tensors["response"], responses, strict=True))
    assert (await trainer.pull("train", slots=0, step=0)).closed
    controllers.kill()
    trainer.step_done(0, {"loss": 1.0})  # no controller is running: it has to be sent again
    waiting = asyncio.create_task(trainer.pull("train", slots=0, step=1))
    await controllers.start()
    assert await source.offer("train", 8, 0, 1, {"prompt": torch.arange(2, dtype=torch.int32)}) is not None
    third = await rollout.pull("rollout", slots=1)
    await rollout.commit("rollout", third.slots, third.leases, {"response": responses[:1]}, spans=[(0, 3)])
    to_score = await reward.pull("reward", slots=8)
    await reward.commit("reward", to_score.slots, to_score.leases, inline={"reward": [0.5]})
    assert list((await waiting).grant.prompts) == [8]
    for session in (source, rollout, reward, trainer):
        await session.close()
    assert controllers.events("trained") == {7: 1}
    assert controllers.events("dropped") == {}


async def test_a_worker_that_is_terminated_while_no_controller_is_there_drains_when_one_is_back(
    controllers: Controllers,
) -> None:
    await controllers.start()
    worker = await api.connect(controllers.address, "w", "w", WITHIN_S)
    await wait_until_processed(worker)
    controllers.kill()
    worker.drain()
    await controllers.start()
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(Stopped, match=RELEASED):
            await worker.wait_stopped()
    await worker.close()


async def test_an_order_to_end_the_run_is_repeated_to_a_restarted_controller(controllers: Controllers) -> None:
    await controllers.start()
    connected = asyncio.Event()
    observer = Observer(controllers.address, lambda status: connected.set(), None, 30.0, follow=())
    async with asyncio.timeout(2 * WITHIN_S):
        await connected.wait()
        controllers.kill()
        observer.end_run("a worker has bad input", 2)
        await controllers.start()
        while not observer.end_reason:
            connected.clear()
            await connected.wait()
    assert observer.end_reason == "a worker has bad input"
    observer.close()


async def test_a_drain_that_an_operator_ordered_goes_on_under_the_next_controller(controllers: Controllers) -> None:
    await controllers.start()
    source = await api.connect(controllers.address, "s", "s", WITHIN_S)
    await source.offer("train", 7, 0, 1, {"prompt": torch.arange(5, dtype=torch.int32)})
    worker = await api.connect(controllers.address, "o", "rollout", WITHIN_S)
    worker.params.applied("policy", 0)
    batch = await worker.pull("rollout", slots=1)
    operator = Stranger(controllers.address)
    operator.send(encode(m.Hello(protocol=m.PROTOCOL, worker="x", role=OBSERVER, host="host", pid=1, lanes=())))
    assert isinstance(await operator.receive(), m.Welcome)
    operator.send(encode(m.Drain(1, "o")))
    with pytest.raises(Drained):
        await worker.pull("rollout", slots=1)
    operator.close()
    await controllers.restart()
    await wait_until_processed(worker)
    worker.give_back("rollout", batch)
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(Stopped, match=RELEASED):
            await worker.wait_stopped()
    await worker.close()
    await source.close()


async def test_stale_commit_is_refused_with_a_reason(controllers: Controllers) -> None:
    await controllers.start()
    source = await api.connect(controllers.address, "s", "s", WITHIN_S)
    await source.offer("train", 7, 0, 1, {"prompt": torch.arange(5, dtype=torch.int32)})
    stale = Stranger(controllers.address)
    stale.send(encode(m.Hello(protocol=m.PROTOCOL, worker="o", role="rollout", host="host", pid=1, lanes=("gloo",))))
    assert isinstance(await stale.receive(), m.Welcome)
    stale.send(encode(m.WeightsActivated("policy", 0)))
    stale.send(encode(m.Pull(request=1, stage="rollout", slots=1, tokens=0, step=-1)))
    grant = await stale.receive()
    assert isinstance(grant, m.Grant)
    stale.close()
    await controllers.restart()
    stale = Stranger(controllers.address)
    stale.send(
        encode(m.Hello(protocol=m.PROTOCOL, worker="o", role="rollout", host="host", pid=1, lanes=("gloo",), term=1))
    )
    welcome = await stale.receive()
    assert isinstance(welcome, m.Welcome)
    assert welcome.term == 2
    stale.send(encode(m.Inventory((), ())))  # without the lease that it holds
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
    answer = await stale.receive()
    assert isinstance(answer, m.Committed)
    assert answer.refused == grant.slots
    assert "was given by a controller that is gone, and was not renewed" in answer.reason
    stale.close()
    await source.close()


async def test_worker_that_reconnects_too_late_receives_the_reason(impatient_controllers: Controllers) -> None:
    controllers = impatient_controllers
    await controllers.start()
    source = await api.connect(controllers.address, "s", "s", WITHIN_S)
    late = Stranger(controllers.address)
    late.send(encode(m.Hello(protocol=m.PROTOCOL, worker="late", role="rollout", host="host", pid=1, lanes=("gloo",))))
    await late.receive()
    late.close()
    await controllers.restart()
    # Answered once the controller no longer waits for the late worker.
    assert await source.offer("train", 7, 0, 1, {"prompt": torch.arange(5, dtype=torch.int32)}) is not None
    late = Stranger(controllers.address)
    late.send(
        encode(m.Hello(protocol=m.PROTOCOL, worker="late", role="rollout", host="host", pid=1, lanes=("gloo",), term=1))
    )
    refusal = await late.receive()
    assert isinstance(refusal, m.Rejected)
    assert refusal.request == m.PERMANENT
    assert "late counts as gone" in refusal.reason
    late.close()
    await source.close()


async def test_source_replaced_during_controller_downtime_continues_at_its_position(
    impatient_controllers: Controllers,
) -> None:
    """Prompts that only the dead source held are unread again, once all workers have had time to reconnect."""
    controllers = impatient_controllers
    await controllers.start()
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
    source, rollout = Stranger(controllers.address), Stranger(controllers.address)
    source.send(encode(hello))
    rollout.send(encode(m.Hello(protocol=m.PROTOCOL, worker="o", role="rollout", host="host", pid=1, lanes=("gloo",))))
    assert isinstance(await source.receive(), m.Welcome)
    assert isinstance(await rollout.receive(), m.Welcome)
    source.send(encode(offer))
    assert isinstance(await source.receive(), m.OfferAccepted)
    source.close()
    rollout.close()
    await controllers.restart()
    source, rollout = Stranger(controllers.address), Stranger(controllers.address)
    source.send(encode(hello))
    rollout.send(
        encode(m.Hello(protocol=m.PROTOCOL, worker="o", role="rollout", host="host", pid=1, lanes=("gloo",), term=1))
    )
    assert isinstance(await rollout.receive(), m.Welcome)
    rollout.send(encode(m.Inventory((), ())))
    welcome = await source.receive()
    assert isinstance(welcome, m.Welcome)
    assert unpack(welcome.position.passed).get(0, frozenset()) == frozenset()
    source.send(encode(offer))
    assert isinstance(await source.receive(), m.OfferAccepted)
    source.close()
    rollout.close()


async def test_worker_times_out_if_the_controller_does_not_return(controllers: Controllers) -> None:
    await controllers.start()
    rollout = await api.connect(controllers.address, "o", "o", WITHIN_S)
    rollout._connection.welcome = replace(rollout.welcome, reconnect_timeout_s=0.5)
    waiting = asyncio.create_task(rollout.pull("rollout", slots=1))
    await wait_until_processed(rollout)
    controllers.kill()
    with pytest.raises(WaitExpired, match=r"went away and did not come back within 0 s: no answer"):
        await waiting
    await rollout.close()
