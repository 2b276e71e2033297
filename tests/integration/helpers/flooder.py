"""An accepted worker that sends one kind of message as fast as it can: python flooder.py ADDRESS KIND SECONDS."""

import sys
import time
from collections.abc import Callable
from itertools import count

import zmq

from flowrt.protocol import messages as m
from flowrt.protocol.codec import encode
from flowrt.runtime.parent_death import die_with_parent

LONG, SPANS = "x" * 20_000, (("y" * 100_000, "z", 1.0, 2.0),) * 100
MESSAGES: dict[str, Callable[[int], m.Message]] = {
    "heartbeats": lambda _: m.Heartbeat(),
    "pulls": lambda number: m.Pull(request=number, stage="reward", slots=1, tokens=0, step=-1),
    "pulls of an unknown stage": lambda number: m.Pull(request=number, stage=LONG, slots=1, tokens=0, step=-1),
    "offers": lambda number: m.Offer(
        request=number, flow="train", prompts=(number,), epoch=0, members=2, at_least=0, lengths=(), tags=()
    ),
    "rendezvous keys": lambda _: m.RendezvousKey("calm", "lane", "key", b"z" * 4000),
    "large reports": lambda _: m.Report((), (), SPANS),
    "numbers": lambda number: m.Report((), tuple((f"{number} {index}", 1.0) for index in range(1000)), ()),
    "long names": lambda number: m.Report((), ((f"{number}" * 1_000_000, 1.0),), ()),
}
GARBAGE = "garbage"
KINDS = (*MESSAGES, GARBAGE)


def main(address: str, kind: str, seconds: float) -> int:
    """The number of messages sent."""
    die_with_parent()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.send(
            encode(m.Hello(protocol=m.PROTOCOL, worker="flooder", role="reward", host="host", pid=1, lanes=("gloo",)))
        )
        socket.recv()
        sys.stdout.write("joined\n")
        sys.stdout.flush()
        end_s = time.monotonic() + seconds
        for sent in count():
            data = b"\xc1" * 100 if kind == GARBAGE else encode(MESSAGES[kind](10 + sent))
            while not socket.poll(50, zmq.POLLOUT):
                if time.monotonic() > end_s:
                    return sent
            socket.send(data, zmq.NOBLOCK)
            if time.monotonic() > end_s:
                return sent
    raise AssertionError


if __name__ == "__main__":
    sys.stdout.write(f"{main(sys.argv[1], sys.argv[2], float(sys.argv[3]))}\n")
