"""Answers posted while messages are received are sent in a batch, in order; unreachable recipients are reported."""

import asyncio
import contextlib
import time
from collections.abc import Callable

import pytest
import zmq

from flowrt.errors import FlowError
from flowrt.net.link import ClientLink, ServerLink
from flowrt.protocol import messages as m
from flowrt.protocol.codec import decode, encode

DEADLINE_S = 20.0
REQUESTS = 100
CLIENTS, ROUND_TRIPS = 24, 100
Reply = Callable[[ServerLink, bytes, m.Message], object]


def send_requests(address: str, count: int) -> list[int]:
    """Send ``count`` requests at once; return the numbers of the answers."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, int(1000 * DEADLINE_S))
        socket.connect(address)
        for number in range(count):
            socket.send(encode(m.CancelRequest(number)))
        return [request_number(socket.recv()) for _ in range(count)]


def request_number(data: bytes) -> int:
    answer = decode(data)
    assert isinstance(answer, m.OfferAccepted)
    return answer.request


def answer_posted_or_sent(link: ServerLink, peer: bytes, message: m.Message) -> None:
    """Two of three answers are posted; the third is sent immediately, after them."""
    assert isinstance(message, m.CancelRequest)
    answer = m.OfferAccepted(message.request, 0)
    if message.request % 3:
        link.post(peer, answer)
    else:
        assert link.send(peer, answer)


def answer_later(link: ServerLink, peer: bytes, message: m.Message) -> None:
    """Answer outside of the receive callback, as a server does that writes to disk first."""
    assert isinstance(message, m.CancelRequest)

    def send_answer(answer: m.Message) -> None:
        link.post(peer, answer)
        link.flush()

    asyncio.get_running_loop().call_soon(send_answer, m.OfferAccepted(message.request, 0))


@pytest.mark.parametrize("reply", [answer_posted_or_sent, answer_later])
async def test_answers_arrive_in_request_order(reply: Reply) -> None:
    def receive(peer: bytes, message: m.Message) -> None:
        reply(link, peer, message)

    link = ServerLink(receive, lambda peer, why: None, lambda: None)
    address = link.bind("tcp://127.0.0.1:0")
    async with asyncio.timeout(DEADLINE_S):
        assert await asyncio.to_thread(send_requests, address, REQUESTS) == list(range(REQUESTS))
    link.close()


def round_trips(address: str) -> int:
    """Each client sends its next request after an answer; return the number of answers."""
    with zmq.Context() as context:
        clients = [context.socket(zmq.DEALER) for _ in range(CLIENTS)]
        poller, remaining = zmq.Poller(), dict.fromkeys(clients, ROUND_TRIPS)
        for client in clients:
            client.connect(address)
            poller.register(client, zmq.POLLIN)
            client.send(encode(m.CancelRequest(ROUND_TRIPS)))
        while remaining and (ready := poller.poll(int(1000 * DEADLINE_S))):
            for socket, _ in ready:
                remaining[socket] -= 1
                assert request_number(socket.recv()) == remaining[socket] + 1
                if remaining[socket]:
                    socket.send(encode(m.CancelRequest(remaining[socket])))
                else:
                    del remaining[socket]
        for client in clients:
            client.close(0)
        return CLIENTS * ROUND_TRIPS - sum(remaining.values())


@pytest.mark.parametrize("reply", [answer_posted_or_sent, answer_later])
async def test_every_request_of_many_clients_is_answered(reply: Reply) -> None:
    """ZeroMQ wakes its reader once; messages that arrive during a send need an explicit check."""

    def receive(peer: bytes, message: m.Message) -> None:
        reply(link, peer, message)

    link = ServerLink(receive, lambda peer, why: None, lambda: None)
    address = link.bind("tcp://127.0.0.1:0")
    async with asyncio.timeout(2 * DEADLINE_S):
        assert await asyncio.to_thread(round_trips, address) == CLIENTS * ROUND_TRIPS
    link.close()


def wait_until_readable(link: ServerLink) -> None:
    """Return once a message is readable: ZeroMQ has signalled it by then and will not wake the reader again."""
    end_s = time.monotonic() + DEADLINE_S
    while not link._socket.is_readable():
        assert time.monotonic() < end_s


async def test_messages_that_arrive_during_a_flush_are_read() -> None:
    received: asyncio.Queue[m.Message] = asyncio.Queue()
    link = ServerLink(lambda _, message: received.put_nowait(message), lambda peer, why: None, lambda: None)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(link.bind("tcp://127.0.0.1:0"))
        async with asyncio.timeout(DEADLINE_S):
            socket.send(encode(m.Heartbeat()))
            await received.get()  # the handshake, which causes further events, is over
            socket.send(encode(m.Heartbeat()))
            wait_until_readable(link)
            link.flush()
            await received.get()
    link.close()


async def test_messages_that_arrive_during_the_last_send_are_read() -> None:
    third: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:

        def receive(peer: bytes, message: m.Message) -> None:
            assert isinstance(message, m.CancelRequest)
            link.post(peer, m.OfferAccepted(message.request, 0))
            received.append(message.request)
            if message.request == 1:
                wait_until_readable(link)  # the second
            elif message.request == 3:
                third.set_result(3)

        def send_after_the_third_arrived(frame: bytes, *flags: int) -> object:
            if received == [1, 2] and not sent:
                sent.append(3)
                socket.send(encode(m.CancelRequest(3)))
                wait_until_readable(link)
            return send_frame(frame, *flags)

        received, sent = list[int](), list[int]()
        link = ServerLink(receive, lambda peer, why: None, lambda: None)
        send_frame, link._socket._send_frame = link._socket._send_frame, send_after_the_third_arrived  # type: ignore[assignment]
        socket.connect(link.bind("tcp://127.0.0.1:0"))
        for number in (1, 2):
            socket.send(encode(m.CancelRequest(number)))
        async with asyncio.timeout(DEADLINE_S):
            assert await third == 3
    link.close()


async def test_answer_does_not_wait_for_other_requests() -> None:
    """A posted answer is sent at its deadline, while later requests of the same batch are still handled."""
    done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:

        def receive(peer: bytes, message: m.Message) -> None:
            assert isinstance(message, m.CancelRequest)
            if message.request == 3:
                done.set_result(bool(socket.poll(int(1000 * DEADLINE_S))))
                return
            wait_until_readable(link)  # the next request
            if message.request == 1:
                link.post(peer, m.OfferAccepted(1, 0))
            elif message.request == 2:
                while time.monotonic() < link._socket._posted_until_s:
                    assert not done.done()

        link = ServerLink(receive, lambda peer, why: None, lambda: None)
        socket.connect(link.bind("tcp://127.0.0.1:0"))
        for number in range(4):
            socket.send(encode(m.CancelRequest(number)))
        async with asyncio.timeout(2 * DEADLINE_S):
            assert await done, "the answer arrives while the last request is handled"
    link.close()


async def test_unreachable_recipients_are_reported() -> None:
    received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    disconnected, unreachable = asyncio.Event(), list[bytes]()
    link = ServerLink(lambda peer, _: received.set_result(peer), lambda peer, why: None, disconnected.set)
    with contextlib.closing(link):
        link.on_unreachable(unreachable.append)
        address = link.bind("tcp://127.0.0.1:0")
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(address)
            socket.send(encode(m.Heartbeat()))
            async with asyncio.timeout(DEADLINE_S):
                peer = await received
        async with asyncio.timeout(DEADLINE_S):
            await disconnected.wait()
            while not unreachable:  # the I/O thread reports a closed connection before the socket drops its peer
                link.post(peer, m.Heartbeat())
                link.flush()
                await asyncio.sleep(0)
        assert unreachable == [peer]


async def test_a_connection_is_known_before_its_first_message_is_handled() -> None:
    """The event that it was accepted comes over another socket, whose callback may run after that of the message."""
    joined: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

    def receive(peer: bytes, _: m.Message) -> None:
        link.filter.on_joined(peer, source := link.source())
        joined.set_result((source, link.filter.address(source)))

    link = ServerLink(receive, lambda peer, why: None, lambda: None)
    with contextlib.closing(link):
        address = link.bind("tcp://127.0.0.1:0")
        asyncio.get_running_loop().remove_reader(link._monitor._descriptor)
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(address)
            socket.send(encode(m.Heartbeat()))
            async with asyncio.timeout(DEADLINE_S):
                source, peer_address = await joined
            link._monitor.drain()
            assert peer_address
            assert link.filter.is_open(source, peer_address)
            assert source in link.filter._liveness._watched
            assert source not in link.filter._unjoined


def send_and_leave(address: str) -> None:
    """Send a message and close the connection."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(address)
        socket.send(encode(m.Heartbeat()))


async def test_a_connection_that_closed_before_its_first_message_was_handled_is_not_kept() -> None:
    received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    disconnected = asyncio.Event()
    link = ServerLink(lambda peer, _: received.set_result(peer), lambda peer, why: None, disconnected.set)
    with contextlib.closing(link):
        address = link.bind("tcp://127.0.0.1:0")
        asyncio.get_running_loop().remove_reader(link._socket._descriptor)
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.to_thread(send_and_leave, address)
            await disconnected.wait()
            while not received.done():
                link.drain()
                await asyncio.sleep(0)
        peer = received.result()
        assert not link.filter.carries(link.source(), peer)
        assert link.filter.backlog._delivered == {}


async def test_a_message_after_a_failed_handshake_is_dropped_and_the_failure_reported() -> None:
    """A controller with keys closes the connection of a worker without keys, perhaps before its hello is sent."""
    _, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as controller:
        controller.setsockopt(zmq.CURVE_SERVER, 1)
        controller.setsockopt(zmq.CURVE_SECRETKEY, secret)
        port = controller.bind_to_random_port("tcp://127.0.0.1")
        for _ in range(10):  # ZeroMQ connects again in between, and then takes the message
            failure: asyncio.Future[FlowError] = asyncio.get_running_loop().create_future()
            link = ClientLink(lambda _: None, failure.set_result)
            link.connect(f"tcp://127.0.0.1:{port}")
            with contextlib.closing(link):
                error = await asyncio.wait_for(failure, DEADLINE_S)
                for number in range(1000):
                    link.send(m.CancelRequest(number))
            assert "keys" in str(error)
