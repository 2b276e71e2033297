"""A worker that was let in and then says one thing as fast as it can: python flooder.py ADDRESS KIND SECONDS."""

import sys
import time
from itertools import count

import zmq

from flowrt.lifeline import die_with_parent
from flowrt.wire import messages as m
from flowrt.wire.codec import encode

LONG, PIECES = "x" * 20_000, (("y" * 100_000, "z", 1.0, 2.0),) * 100
SAID = {
    "heartbeats": lambda _: m.Heartbeat(),
    "pulls": lambda number: m.Pull(number, "reward", 1, 0, -1),
    "pulls of nothing": lambda number: m.Pull(number, LONG, 1, 0, -1),
    "offers": lambda number: m.Offer(number, "train", (number,), 0, 2, 0, (), ()),
    "signals": lambda _: m.Signal("calm", "lane", "key", b"z" * 4000),
    "large reports": lambda _: m.Report((), (), PIECES),
    "numbers": lambda number: m.Report((), tuple((f"{number} {one}", 1.0) for one in range(1000)), ()),
    "long names": lambda number: m.Report((), ((f"{number}" * 1_000_000, 1.0),), ()),
}
GARBAGE = "garbage"
KINDS = (*SAID, GARBAGE)


def main(address: str, kind: str, seconds: float) -> int:
    """Says how often it has said it."""
    die_with_parent()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.send(encode(m.Hello(m.PROTOCOL, "flooder", "reward", "host", 1, ("gloo",))))
        socket.recv()
        sys.stdout.write("in\n")
        sys.stdout.flush()
        end_s = time.monotonic() + seconds
        for said in count():
            data = b"\xc1" * 100 if kind == GARBAGE else encode(SAID[kind](10 + said))
            while not socket.poll(50, zmq.POLLOUT):
                if time.monotonic() > end_s:
                    return said
            socket.send(data, zmq.NOBLOCK)
            if time.monotonic() > end_s:
                return said
    raise AssertionError


if __name__ == "__main__":
    sys.stdout.write(f"{main(sys.argv[1], sys.argv[2], float(sys.argv[3]))}\n")
