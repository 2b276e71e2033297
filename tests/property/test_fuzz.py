"""Random input to the codec, the core and a live controller: no crash, no growth, a refusal changes nothing."""

import asyncio
import contextlib
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import psutil
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt import api
from flowrt.controller.events import MessageReceived, Send
from flowrt.errors import RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.net.connection_filter import MAX_REPLIES_UNJOINED
from flowrt.net.curve_keys import controller_keys, worker_keys, write_keys
from flowrt.protocol import messages as m
from flowrt.protocol.codec import MAX_ITEMS, decode, encode
from flowrt.protocol.messages import Incoming, LaneTurn, Part
from tests.effort import examples
from tests.property.test_codec import peak_bytes
from tests.simulation.core_driver import CoreDriver
from tests.simulation.message_fuzzer import NAMES, MessageFuzzer
from tests.simulation.scenario import grpo_dataflow, offered_lengths, whole

WORKERS = NAMES[:6]
MAX_GROWTH_BYTES = 64 * 2**20
TURN = LaneTurn(sender="source0", receiver="rollout0", kind="samples", incarnation=0, sequence=0, transport="gloo")
VALID: tuple[m.Message, ...] = (
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
def test_mangled_messages_are_refused_or_decode_to_messages(seed: int) -> None:
    fuzzer = MessageFuzzer(seed)
    for _ in range(10):
        data = fuzzer.data()
        with contextlib.suppress(RemoteProtocolError):
            encode(decode(data))


@given(st.integers(0, 2**32))
@settings(max_examples=examples(300))
def test_messages_that_the_core_refuses_change_nothing(seed: int) -> None:
    fuzzer, driver = MessageFuzzer(seed), CoreDriver(members=2, groups_per_step=2)
    draw, valid = fuzzer.random, list(VALID)
    for _ in range(25):
        base = draw.choice(valid)
        message = draw.choice((base, fuzzer.changed(base), fuzzer.message()))
        if isinstance(message, m.Offer) and message.members > 64:
            continue  # legal, but slow to compare
        before = driver.snapshot()
        try:
            commands = driver.core.transition(MessageReceived(WorkerId(draw.choice(WORKERS)), message), driver.now)
        except RemoteProtocolError:
            assert driver.snapshot() == before, f"{message} was refused, but changed the state"
            continue
        driver.core.check()
        replies = [command.message for command in commands if isinstance(command, Send)]
        valid += [driver.generated(reply) for reply in replies if isinstance(reply, m.Grant) and len(reply.slots) == 1]
        for reply in replies:
            decode(encode(reply))
        if driver.core.ended:
            return


# ---- bugs found by fuzzing


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        ("rollout1", m.ReleaseLease(stage="rollout", slots=(3, 1), leases=(2,), lost=True, reason="")),
        ("rollout0", m.TransferFailed(Incoming(msgspec.structs.replace(TURN, receiver="rollout1"), ()), "")),
        ("rollout0", m.TransferFailed(Incoming(TURN, (Part("no such column", (0,), (1,)),)), "")),
        ("rollout1", m.FetchFailed(TURN, whole(0), "")),
    ],
    ids=["leases for some of the slots", "lane of another worker", "unknown column", "fetch of another worker"],
)
def test_illegal_messages_found_by_fuzzing_are_refused(worker: str, message: m.Message) -> None:
    driver = CoreDriver()
    driver.ready_to_train()
    driver.assert_illegal(worker, message)


def test_a_failed_transfer_on_an_unknown_lane_is_accepted() -> None:
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


def test_a_second_pull_with_an_open_request_number_is_refused() -> None:
    driver = CoreDriver()
    driver.send("trainer0", m.Pull(request=1, stage="rollout", slots=1, tokens=0, step=-1))
    driver.assert_illegal("trainer0", m.Pull(request=1, stage="reward", slots=1, tokens=0, step=-1))
    driver.send("trainer0", m.Leave("gone"))
    driver.offer()  # its pull was once parked twice and removed once: the departed worker got the lease


def test_integers_beyond_signed_64_bits_are_refused() -> None:
    data = msgpack.packb([m.MESSAGES.index(m.OfferAccepted), 2**64 - 1, 0])
    with pytest.raises(RemoteProtocolError, match=r"OfferAccepted\.request: Expected `int` <="):
        decode(data)  # msgpack accepts it, SQLite does not: a ledger commit ended the controller's ticker


def release(item: bytes, count: int) -> bytes:
    """The bytes of a `ReleaseTensors` of this many equal texts."""
    return b"\x94" + bytes([m.MESSAGES.index(m.ReleaseTensors)]) + array(item, count) + b"\x90\x90"


def commit_of(item: bytes, count: int) -> bytes:
    """The bytes of a `Commit` of this many equal spans."""
    return b"\x98" + bytes([m.MESSAGES.index(m.Commit)]) + b"\x01\xa1s\x90\x90\x90\x90" + array(item, count)


def array(item: bytes, count: int) -> bytes:
    return b"\xdd" + struct.pack(">I", count) + item * count


@pytest.mark.parametrize(
    ("message", "item", "items"),
    [(commit_of, b"\x91\x00", 2), (release, b"\xa2ab", 1), (release, b"\xd9\x01a", 1)],
    ids=["arrays of one", "short texts", "texts with a length"],
)
def test_a_large_message_of_tiny_items_is_refused_before_allocation(
    message: Callable[[bytes, int], bytes], item: bytes, items: int
) -> None:
    assert isinstance(decode(message(item, 1000)), m.Commit | m.ReleaseTensors)
    assert peak_bytes(message(item, MAX_ITEMS // items)) < 2**20


def test_a_large_message_of_many_items_round_trips() -> None:
    slots = tuple(range(300_000))
    commit = m.Commit(
        request=1,
        stage="rollout",
        slots=slots,
        leases=slots,
        parts=(),
        inline=(),
        spans=tuple((slot, 1) for slot in slots),
    )
    assert len(encode(commit)) > MAX_ITEMS
    assert decode(encode(commit)) == commit


# ---- a live controller


class Peer:
    """A bare DEALER socket with a valid key."""

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


def state_of(server: api.Server) -> dict[str, Any]:
    """The status without times and waits: the joined worker reports its own waits with its heartbeats."""
    status = server.status()
    of_waits = dict.fromkeys(("waits", "graph", "cut_off", "time", "counts"))
    return status | of_waits | {"applying": status["counts"]["versions"]}


def has_joined(server: api.Server, worker: str) -> bool:
    return worker in server.status()["workers"]


def has_ended_or_left(server: api.Server, worker: str) -> bool:
    return server.ended is not None or not has_joined(server, worker)


async def until(condition: Callable[[], object], deadline_s: float = 120.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 (the condition has no event)
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


async def test_random_messages_of_a_peer_without_hello_change_nothing(keys: Path) -> None:
    fuzzer = MessageFuzzer(1)
    async with controller(keys) as (server, address):
        worker = await api.connect(address, "reward0", "reward", 60, worker_keys(keys, "reward0"))
        before = state_of(server)
        rss_before, kinds = psutil.Process().memory_info().rss, set()
        for _ in range(60):
            peer, seen = Peer(address, keys), server.refused_messages
            for _ in range(20):
                message = fuzzer.message()
                data = encode(message) if fuzzer.random.random() < 0.3 else fuzzer.mangled(encode(message))
                with contextlib.suppress(RemoteProtocolError):
                    if isinstance(decoded := decode(data), m.Hello):
                        continue
                    kinds.add(type(decoded))
                peer.socket.send(data)
            await until(partial(has_refused_more, server, seen))
            peer.close()
        assert server.ended is None
        assert kinds == set(m.MESSAGES) - {m.Hello}
        assert state_of(server) == before
        assert psutil.Process().memory_info().rss - rss_before < MAX_GROWTH_BYTES
        await worker.close()


async def test_a_peer_without_hello_that_never_reads_is_disconnected(keys: Path) -> None:
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


async def test_a_worker_that_sends_an_undecodable_message_is_removed(keys: Path) -> None:
    async with controller(keys) as (server, address):
        peer = Peer(address, keys)
        peer.socket.send(
            encode(m.Hello(protocol=m.PROTOCOL, worker="faulty0", role="reward", host="host", pid=1, lanes=("gloo",)))
        )
        await until(lambda: "faulty0" in server.status()["workers"])
        peer.socket.send(b"\xc1")
        await until(lambda: "faulty0" not in server.status()["workers"])
        assert server.ended is None
        peer.close()


async def test_random_messages_of_a_worker_are_accepted_or_dismiss_it(keys: Path) -> None:
    for seed in range(8):
        fuzzer = MessageFuzzer(seed)
        async with controller(keys) as (server, address):
            peer = Peer(address, keys)
            peer.socket.send(
                encode(
                    m.Hello(protocol=m.PROTOCOL, worker="faulty0", role="reward", host="host", pid=1, lanes=("gloo",))
                )
            )
            await until(partial(has_joined, server, "faulty0"))
            for _ in range(50):
                peer.socket.send(encode(fuzzer.message()))
            await until(partial(has_ended_or_left, server, "faulty0"))
            peer.close()


@pytest.mark.parametrize("kind", m.MESSAGES, ids=lambda kind: kind.__name__)
async def test_each_message_type_of_a_worker_is_accepted_or_refused(
    keys: Path, caplog: pytest.LogCaptureFixture, kind: type[m.Message]
) -> None:
    """No message of a worker is an internal error of the controller, which would end the run."""
    fuzzer = MessageFuzzer(7)
    async with controller(keys) as (server, address):
        peer = Peer(address, keys)
        peer.socket.send(
            encode(m.Hello(protocol=m.PROTOCOL, worker="faulty0", role="reward", host="host", pid=1, lanes=("gloo",)))
        )
        await until(lambda: "faulty0" in server.status()["workers"])
        for _ in range(12):
            peer.socket.send(encode(fuzzer.message((kind,))))
        peer.socket.send(encode(m.Leave("")))
        await until(lambda: server.ended is not None or "faulty0" not in server.status()["workers"])
        assert server.ended is None or "the controller failed" not in server.ended.reason
        peer.close()
    assert "Traceback" not in caplog.text
