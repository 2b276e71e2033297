"""Noise against the codec, the core and a live controller: nothing crashes or grows, a refusal changes nothing."""

import asyncio
import contextlib
import dataclasses
import struct
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgpack
import psutil
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt import api
from flowrt.controller.events import MessageReceived, Send
from flowrt.errors import RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.net.connection_guard import MAX_REPLIES_UNJOINED
from flowrt.net.curve_keys import controller_keys, worker_keys, write_keys
from flowrt.protocol import codec
from flowrt.protocol import messages as m
from flowrt.protocol.codec import decode, encode
from flowrt.protocol.messages import Incoming, LaneTurn, Part
from tests.effort import examples
from tests.simulation.core_driver import CoreDriver
from tests.simulation.message_fuzzer import NAMES, MessageFuzzer
from tests.simulation.scenario import grpo_dataflow, offered_lengths, whole

WORKERS = NAMES[:6]
GROWN_BYTES = 64 * 2**20
TURN = LaneTurn(sender="source0", receiver="rollout0", kind="samples", incarnation=0, sequence=0, transport="gloo")
SENSIBLE: tuple[m.Message, ...] = (
    m.Offer(
        request=1, flow="train", prompts=(3,), epoch=0, members=2, at_least=0, lengths=offered_lengths(4, 1), tags=()
    ),
    m.Offer(
        request=2, flow="eval", prompts=(3,), epoch=0, members=1, at_least=0, lengths=offered_lengths(4, 1), tags=()
    ),
    m.Pull(request=3, stage="rollout", slots=1, tokens=0, step=-1),
    m.Pull(request=4, stage="reward", slots=1, tokens=0, step=-1),
    m.Pull(request=5, stage="train", slots=0, tokens=0, step=0),
    m.Publish((whole(1),), ()),
    m.WeightsActivated("policy", 0),
    m.StepCompleted(0, ()),
    m.TransferFailed(Incoming(TURN, (Part("prompt", (0,), (4,)),)), ""),
)


@given(st.integers(0, 2**32))
@settings(max_examples=examples(300))
def test_mangled_messages_are_refused_or_messages(seed: int) -> None:
    noise = MessageFuzzer(seed)
    for _ in range(10):
        data = noise.data()
        with contextlib.suppress(RemoteProtocolError):
            encode(decode(data))


@given(st.integers(0, 2**32))
@settings(max_examples=examples(300))
def test_what_the_core_refuses_changes_nothing(seed: int) -> None:
    noise, driver = MessageFuzzer(seed), CoreDriver(members=2, groups_per_step=2)
    draw, sensible = noise.random, list(SENSIBLE)
    for _ in range(25):
        base = draw.choice(sensible)
        message = draw.choice((base, noise.changed(base), noise.message()))
        if isinstance(message, m.Offer) and message.members > 64:
            continue  # what a source may do, and slow to compare
        before = driver.snapshot()
        try:
            commands = driver.core.transition(MessageReceived(WorkerId(draw.choice(WORKERS)), message), driver.now)
        except RemoteProtocolError:
            assert driver.snapshot() == before, f"{message} was refused and changed something"
            continue
        driver.core.check()
        said = [command.message for command in commands if isinstance(command, Send)]
        sensible += [driver.generated(one) for one in said if isinstance(one, m.Grant) and len(one.slots) == 1]
        for one in said:
            decode(encode(one))
        if driver.core.ended:
            return


# ---- what noise has found


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        ("rollout1", m.ReleaseLease(stage="rollout", slots=(3, 1), leases=(2,), lost=True, reason="")),
        ("rollout0", m.TransferFailed(Incoming(dataclasses.replace(TURN, receiver="rollout1"), ()), "")),
        ("rollout0", m.TransferFailed(Incoming(TURN, (Part("no such column", (0,), (1,)),)), "")),
        ("rollout1", m.FetchFailed(TURN, whole(0), "")),
    ],
    ids=["leases for some of the slots", "lane of another", "column that is not there", "fetch of another"],
)
def test_found_by_noise_in_the_core(worker: str, message: m.Message) -> None:
    driver = CoreDriver()
    driver.ready_to_train()
    driver.assert_illegal(worker, message)


def test_a_lane_that_never_was_can_be_given_up() -> None:
    driver = CoreDriver()
    driver.send(
        "rollout0",
        m.TransferFailed(
            Incoming(
                LaneTurn(sender="x", receiver="rollout0", kind="samples", incarnation=-1, sequence=0, transport="gloo"),
                (),
            ),
            "",
        ),
    )


def test_a_number_is_not_waited_under_twice() -> None:
    driver = CoreDriver()
    driver.send("trainer0", m.Pull(request=1, stage="rollout", slots=1, tokens=0, step=-1))
    driver.assert_illegal("trainer0", m.Pull(request=1, stage="reward", slots=1, tokens=0, step=-1))
    driver.send("trainer0", m.Leave("gone"))
    driver.offer()  # its pull was parked twice and forgotten once: this was leased to somebody who had left


def test_whole_numbers_have_64_bits() -> None:
    epoch = msgpack.packb([m.MESSAGES.index(m.OfferAccepted), 2**64 - 1, 0])
    with pytest.raises(RemoteProtocolError, match="64 bits"):
        decode(epoch)  # msgpack takes it, the ledger's SQLite does not: its commit killed the controller's ticker


def peak_bytes(data: bytes) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            decode(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_nested_claims_cost_no_more_than_the_bytes_that_back_them() -> None:
    assert peak_bytes((b"\xdd" + struct.pack(">I", 10_000)) * 1000 + bytes(5000)) < 2**20  # 78 MiB, once


@pytest.mark.slow
@pytest.mark.parametrize("item", [b"\x91\xc0", b"\x80", b"\xa2ab"], ids=["arrays of one", "empty maps", "short texts"])
def test_a_large_message_of_tiny_items_is_refused_before_they_are_made(item: bytes) -> None:
    count = 600_000
    array = b"\xdd" + struct.pack(">I", count) + item * count
    assert peak_bytes(b"\x93\x04" + array + array) < 2**20


def test_a_large_message_of_many_real_items_passes() -> None:
    slots = tuple(range(40_000))
    commit = m.Commit(
        request=1,
        stage="rollout",
        slots=slots,
        leases=slots,
        parts=(),
        inline=(),
        spans=tuple((slot, 1) for slot in slots),
    )
    assert len(encode(commit)) > codec._COUNT_FROM_BYTES
    assert decode(encode(commit)) == commit


# ---- a live controller


class Peer:
    """A bare DEALER, with a valid key."""

    def __init__(self, address: str, keys: Path) -> None:
        own = worker_keys(keys, "worker")
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt_string(zmq.CURVE_SERVERKEY, own.controller)
        self.socket.setsockopt_string(zmq.CURVE_PUBLICKEY, own.own.public)
        self.socket.setsockopt_string(zmq.CURVE_SECRETKEY, own.own.secret)
        self.socket.connect(address)

    def close(self) -> None:
        self.socket.close()
        self._context.term()


def has_refused_more(server: api.Server, than: int) -> bool:
    return server.refused_messages > than


def is_in(server: api.Server, worker: str) -> bool:
    return worker in server.status()["workers"]


def is_over_or_out(server: api.Server, worker: str) -> bool:
    return server.ended is not None or not is_in(server, worker)


async def until(condition: Callable[[], object], deadline_s: float = 10.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.01)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    write_keys(tmp_path / "keys", [])
    return tmp_path / "keys"


def controller(keys: Path) -> "contextlib.AbstractAsyncContextManager[tuple[api.Server, str]]":
    assert controller_keys(keys).admitted
    flow = grpo_dataflow(reference=False)
    policies = api.Policies(api.StrictLag(1), api.Fifo(), api.TokenBudget(1), api.DelayedUpdate())
    return api.controller(flow, api.Settings(steps=2), policies, keys.parent, keys=keys)


async def test_noise_of_a_stranger_changes_nothing(keys: Path) -> None:
    noise = MessageFuzzer(1)
    async with controller(keys) as (server, address):
        worker = await api.connect(address, "reward0", "reward", 5, worker_keys(keys, "reward0"))
        before = server.status() | {"waits": [], "graph": {}}
        grown, kinds = psutil.Process().memory_info().rss, set()
        for _ in range(60):
            peer, seen = Peer(address, keys), server.refused_messages
            for _ in range(20):
                message = noise.message()
                data = encode(message) if noise.random.random() < 0.3 else noise.mangled(encode(message))
                with contextlib.suppress(RemoteProtocolError):
                    if isinstance(whole_one := decode(data), m.Hello):
                        continue
                    kinds.add(type(whole_one))
                peer.socket.send(data)
            await until(partial(has_refused_more, server, seen))
            peer.close()
        assert server.ended is None
        assert kinds == set(m.MESSAGES) - {m.Hello}
        assert server.status() | {"waits": [], "graph": {}} == before
        assert psutil.Process().memory_info().rss - grown < GROWN_BYTES
        await worker.close()


async def test_a_stranger_that_never_reads_is_cut_off(keys: Path) -> None:
    async with controller(keys) as (server, address):
        peer = Peer(address, keys)
        ends = peer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        for _ in range(MAX_REPLIES_UNJOINED + 1):
            peer.socket.send(encode(m.Heartbeat()))
        await until(lambda: ends.poll(0))
        assert server.refused_messages == MAX_REPLIES_UNJOINED + 1
        peer.socket.disable_monitor()
        ends.close()
        peer.close()


async def test_a_worker_that_sends_no_messages_loses_its_connection_by_name(keys: Path) -> None:
    async with controller(keys) as (server, address):
        peer = Peer(address, keys)
        peer.socket.send(
            encode(m.Hello(protocol=m.PROTOCOL, worker="liar", role="reward", host="host", pid=1, lanes=("gloo",)))
        )
        await until(lambda: "liar" in server.status()["workers"])
        peer.socket.send(b"\xc1")
        await until(lambda: "liar" not in server.status()["workers"])
        assert server.ended is None
        peer.close()


async def test_noise_of_a_worker_is_taken_or_dismisses_it(keys: Path) -> None:
    for seed in range(8):
        noise = MessageFuzzer(seed)
        async with controller(keys) as (server, address):
            peer = Peer(address, keys)
            peer.socket.send(
                encode(m.Hello(protocol=m.PROTOCOL, worker="liar", role="reward", host="host", pid=1, lanes=("gloo",)))
            )
            await until(partial(is_in, server, "liar"))
            for _ in range(50):
                peer.socket.send(encode(noise.message()))
            await until(partial(is_over_or_out, server, "liar"))
            peer.close()


@pytest.mark.parametrize("kind", m.MESSAGES, ids=lambda kind: kind.__name__)
async def test_each_kind_of_message_of_a_worker_is_taken_or_refused(
    keys: Path, caplog: pytest.LogCaptureFixture, kind: type[m.Message]
) -> None:
    """Nothing that a worker can say is a mistake of the controller's, which would end the run for it."""
    noise = MessageFuzzer(7)
    async with controller(keys) as (server, address):
        peer = Peer(address, keys)
        peer.socket.send(
            encode(m.Hello(protocol=m.PROTOCOL, worker="liar", role="reward", host="host", pid=1, lanes=("gloo",)))
        )
        await until(lambda: "liar" in server.status()["workers"])
        for _ in range(12):
            peer.socket.send(encode(noise.message((kind,))))
        peer.socket.send(encode(m.Leave("")))
        await until(lambda: server.ended is not None or "liar" not in server.status()["workers"])
        assert server.ended is None or "the controller failed" not in server.ended.reason
        peer.close()
    assert "Traceback" not in caplog.text
