"""What is said while messages are received goes out together: in order, none too many, and whoever is gone is named."""

import asyncio
import contextlib
import time
from collections.abc import Callable

import pytest
import zmq

from flowrt.net.link import ServerLink
from flowrt.protocol import messages as m
from flowrt.protocol.codec import decode, encode

DEADLINE_S = 20.0
AT_ONCE = 100
CROWD, TRIPS = 24, 100
Say = Callable[[ServerLink, bytes, m.Message], object]


def talk(address: str, count: int) -> list[int]:
    """Say so many things at once; returns the numbers of the answers."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, int(1000 * DEADLINE_S))
        socket.connect(address)
        for number in range(count):
            socket.send(encode(m.CancelRequest(number)))
        return [number_of(socket.recv()) for _ in range(count)]


def number_of(data: bytes) -> int:
    answer = decode(data)
    assert isinstance(answer, m.OfferAccepted)
    return answer.request


def answer_by_turns(link: ServerLink, peer: bytes, message: m.Message) -> None:
    """Two of three are posted, the third is sent at once: after those."""
    assert isinstance(message, m.CancelRequest)
    answer = m.OfferAccepted(message.request, 0)
    if message.request % 3:
        link.post(peer, answer)
    else:
        assert link.send(peer, answer)


def answer_later(link: ServerLink, peer: bytes, message: m.Message) -> None:
    """As one who writes down first what it says: outside of receiving."""
    assert isinstance(message, m.CancelRequest)

    def say(answer: m.Message) -> None:
        link.post(peer, answer)
        link.flush()

    asyncio.get_running_loop().call_soon(say, m.OfferAccepted(message.request, 0))


@pytest.mark.parametrize("say", [answer_by_turns, answer_later])
async def test_answers_come_in_order(say: Say) -> None:
    def receive(peer: bytes, message: m.Message) -> None:
        say(link, peer, message)

    link = ServerLink(receive, lambda peer, why: None, lambda: None)
    address = link.bind("tcp://127.0.0.1:0")
    async with asyncio.timeout(DEADLINE_S):
        assert await asyncio.to_thread(talk, address, AT_ONCE) == list(range(AT_ONCE))
    link.close()


def trips(address: str) -> int:
    """Everybody asks again as soon as there is an answer; returns how many answers there were."""
    with zmq.Context() as context:
        crowd = [context.socket(zmq.DEALER) for _ in range(CROWD)]
        poller, left = zmq.Poller(), dict.fromkeys(crowd, TRIPS)
        for one in crowd:
            one.connect(address)
            poller.register(one, zmq.POLLIN)
            one.send(encode(m.CancelRequest(TRIPS)))
        while left and (ready := poller.poll(int(1000 * DEADLINE_S))):
            for one, _ in ready:
                left[one] -= 1
                assert number_of(one.recv()) == left[one] + 1
                if left[one]:
                    one.send(encode(m.CancelRequest(left[one])))
                else:
                    del left[one]
        for one in crowd:
            one.close(0)
        return CROWD * TRIPS - sum(left.values())


@pytest.mark.parametrize("say", [answer_by_turns, answer_later])
async def test_no_request_of_many_clients_is_overlooked(say: Say) -> None:
    """ZeroMQ wakes its reader once; what comes while something is sent has to be looked for."""

    def receive(peer: bytes, message: m.Message) -> None:
        say(link, peer, message)

    link = ServerLink(receive, lambda peer, why: None, lambda: None)
    address = link.bind("tcp://127.0.0.1:0")
    async with asyncio.timeout(2 * DEADLINE_S):
        assert await asyncio.to_thread(trips, address) == CROWD * TRIPS
    link.close()


def until_readable(link: ServerLink) -> None:
    """Return when a message can be read, of which ZeroMQ has said so by then: it will not wake the reader for it."""
    end_s = time.monotonic() + DEADLINE_S
    while not link._socket.is_readable():
        assert time.monotonic() < end_s


async def test_messages_that_arrive_during_a_flush_are_read() -> None:
    heard: asyncio.Queue[m.Message] = asyncio.Queue()
    link = ServerLink(lambda _, message: heard.put_nowait(message), lambda peer, why: None, lambda: None)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(link.bind("tcp://127.0.0.1:0"))
        async with asyncio.timeout(DEADLINE_S):
            socket.send(encode(m.Heartbeat()))
            await heard.get()  # its handshake, of which there is more to say, is over
            socket.send(encode(m.Heartbeat()))
            until_readable(link)
            link.flush()
            await heard.get()
    link.close()


async def test_messages_that_arrive_during_the_last_send_are_read() -> None:
    third: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:

        def hear(peer: bytes, message: m.Message) -> None:
            assert isinstance(message, m.CancelRequest)
            link.post(peer, m.OfferAccepted(message.request, 0))
            heard.append(message.request)
            if message.request == 1:
                until_readable(link)  # the second
            elif message.request == 3:
                third.set_result(3)

        def send_when_the_third_is_here(frame: bytes, *flags: int) -> object:
            if heard == [1, 2] and not sent:
                sent.append(3)
                socket.send(encode(m.CancelRequest(3)))
                until_readable(link)
            return send_frame(frame, *flags)

        heard, sent = list[int](), list[int]()
        link = ServerLink(hear, lambda peer, why: None, lambda: None)
        send_frame, link._socket._send_frame = link._socket._send_frame, send_when_the_third_is_here  # type: ignore[assignment]
        socket.connect(link.bind("tcp://127.0.0.1:0"))
        for number in (1, 2):
            socket.send(encode(m.CancelRequest(number)))
        async with asyncio.timeout(DEADLINE_S):
            assert await third == 3
    link.close()


async def test_answer_does_not_wait_for_other_requests() -> None:
    """The second is answered; what comes after it takes its time, and the answer has gone out before the last of it."""
    done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:

        def hear(peer: bytes, message: m.Message) -> None:
            assert isinstance(message, m.CancelRequest)
            if message.request == 3:
                done.set_result(bool(socket.poll(int(1000 * DEADLINE_S))))
                return
            until_readable(link)  # the next one
            if message.request == 1:
                link.post(peer, m.OfferAccepted(1, 0))
            elif message.request == 2:
                while time.monotonic() < link._socket._posted_until_s:
                    assert not done.done()

        link = ServerLink(hear, lambda peer, why: None, lambda: None)
        socket.connect(link.bind("tcp://127.0.0.1:0"))
        for number in range(4):
            socket.send(encode(m.CancelRequest(number)))
        async with asyncio.timeout(2 * DEADLINE_S):
            assert await done, "while the last work is done, the answer is there"
    link.close()


async def test_unreachable_recipients_are_reported() -> None:
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    left, gone = asyncio.Event(), list[bytes]()
    link = ServerLink(lambda peer, _: heard.set_result(peer), lambda peer, why: None, left.set)
    with contextlib.closing(link):
        link.on_unreachable(gone.append)
        address = link.bind("tcp://127.0.0.1:0")
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(address)
            socket.send(encode(m.Heartbeat()))
            async with asyncio.timeout(DEADLINE_S):
                peer = await heard
        async with asyncio.timeout(DEADLINE_S):
            await left.wait()
            while not gone:  # the I/O thread reports a closed connection before the socket has forgotten its peer
                link.post(peer, m.Heartbeat())
                link.flush()
                await asyncio.sleep(0)
        assert gone == [peer]
