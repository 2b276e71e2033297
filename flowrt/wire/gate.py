"""The gate to the controller: who is let in, who is turned away, and what both sides say of it."""

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from time import monotonic

from flowrt.errors import ConfigError, FlowError
from flowrt.wire.arrears import Arrears
from flowrt.wire.keys import ADMITTED, KEYS_VARIABLE, PUBLIC, WorkerKeys
from flowrt.wire.silence import AGAIN_MS, Watch, look_at

log = logging.getLogger(__name__)
QUIET_S = 1.0
REMEMBERED = 4096
STRANGE_WORDS = 16
"""Messages of somebody who is not in that are answered; then its connection ends."""
_AUTHENTICATION, _ACCEPTED, _REFUSED = b"1.0", b"200", b"400"
_ASKED = 9  # frames of a question: peer, nothing, version, number, domain, address, routing id, mechanism, key
SILENT_S = 5.0
BETWEEN_S = 0.02


class Failure(Enum):
    """How a handshake failed, as the controller's log says it."""

    UNKNOWN_KEY = "its key is not in the list"
    OTHER_WAYS = "it has no key, or another controller's, or does not speak ZeroMQ"
    SILENT = "it left during the handshake, or took too long over it"


class Complaints:
    """Counts every complaint and logs at most one a second: whoever makes trouble does not also fill the disk."""

    def __init__(self) -> None:
        self.count = 0
        self._unsaid = 0
        self._next_s = 0.0

    def say(self, text: str, *values: object) -> None:
        self.count += 1
        now = monotonic()
        if now < self._next_s:
            self._unsaid += 1
            return
        self._next_s = now + QUIET_S
        log.warning(text + (" (and %d more before that)" if self._unsaid else "%.0s"), *values, self._unsaid)
        self._unsaid = 0


class Gate:
    """Knows the keys of those who may come in, and the addresses of those who are knocking."""

    def __init__(self, admitted: Mapping[bytes, str], closed: Callable[[], None]) -> None:
        self._admitted = admitted
        self._closed = closed
        self._knocking: dict[int, str] = {}
        self._watch = Watch()
        self.arrears = Arrears(self._spoke)
        self._round: Iterator[list[int]] | None = None  # of looking at all connections
        self._failure: Failure | None = None
        self._strange: dict[bytes, int] = {}
        self._shunned: dict[bytes, None] = {}
        self.refused = Complaints()

    def answer(self, frames: list[bytes]) -> list[bytes]:
        """The answer to one question of the ZeroMQ Authentication Protocol (RFC 27): 200 for a key that is known."""
        version, number, mechanism, keys = frames[2], frames[3], frames[7], frames[8:]
        name = self._admitted.get(keys[0], "") if len(frames) == _ASKED and mechanism == b"CURVE" else ""
        status = [_ACCEPTED, b""] if name and version == _AUTHENTICATION else [_REFUSED, b"unknown key"]
        return [frames[0], b"", version, number, *status, name.encode(), b""]

    def knocked(self, descriptor: int) -> None:
        """A connection was accepted; what it wants is not known yet."""
        self._knocking[descriptor] = _peer_of(descriptor)
        self.arrears.begin(descriptor)

    def look(self) -> None:
        """Whether another connection could be accepted, and who fills our memory; called again and again.

        ZeroMQ's own word of the first would come without end.
        """
        for descriptor in self.arrears.excessive():
            self._end_greedy(descriptor)
        try:
            os.close(os.dup(0))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self.refused.say("cannot accept more connections: %s; raise the limit (ulimit -n)", error.strerror)

    def failed(self, failure: Failure) -> None:
        """The connection that closes next has failed its handshake."""
        self._failure = failure

    def left(self, descriptor: int) -> None:
        """A connection has closed."""
        address = self._knocking.pop(descriptor, "an unknown address")
        self._watch.end(descriptor)
        self.arrears.end(descriptor)
        if self._failure is None:
            self._closed()
        else:
            self.refused.say("refused a connection from %s: %s", address, self._failure.value)
            self._failure = None

    def bears(self, peer: bytes) -> bool:
        """Whether one more word of a stranger may be answered: answers to one who does not read them pile up here."""
        if len(self._strange) >= REMEMBERED:
            self._strange.clear()
        self._strange[peer] = words = self._strange.get(peer, 0) + 1
        return words <= STRANGE_WORDS

    def shun(self, peer: bytes, descriptor: int) -> None:
        """End the connection over which this peer speaks. ZeroMQ has no call for that: it finds it ended."""
        self._strange.pop(peer, None)
        if len(self._shunned) >= REMEMBERED:
            del self._shunned[next(iter(self._shunned))]
        self._shunned[peer] = None
        address = _peer_of(descriptor)
        if address != self._knocking.get(descriptor, address):
            return  # it has gone by itself, and its descriptor is perhaps another's by now
        _shut(descriptor)

    def address(self, descriptor: int) -> str:
        """Whose connection this is; empty when it has closed."""
        return self._knocking.get(descriptor, "")

    def quiet_s(self, descriptor: int, address: str) -> float:
        """For how long nothing at all has come over a connection, not even an answer of ZeroMQ's own threads."""
        look = look_at(descriptor) if self.is_open(descriptor, address) else None
        return float("inf") if look is None else look.heard_ms / 1000

    def is_open(self, descriptor: int, address: str) -> bool:
        """Whether this is still the connection that it was."""
        return bool(address) and self.address(descriptor) == address

    @property
    def has_cuts(self) -> bool:
        """Whether there is any connection over which nothing comes any more."""
        return bool(self._watch.cut)

    def cut_since_s(self, descriptor: int, address: str) -> float | None:
        """Since when nothing has come over a connection, where that is too long for a link that is whole."""
        return self._watch.cut.get(descriptor) if self.is_open(descriptor, address) else None

    def lets_in(self, peer: bytes, size: int, descriptor: Callable[[], int]) -> bool:
        """A message of a peer is here; ``descriptor`` says over which connection it came.

        False when its connection was ended: what it had sent before that is not looked at.
        """
        if (greedy := self.arrears.deliver(peer, size, descriptor)) >= 0:
            self._end_greedy(greedy)
        return peer not in self._shunned

    def _spoke(self, descriptor: int) -> None:
        """Its first message is here; perhaps it has closed since, and the descriptor will be another's."""
        if descriptor in self._knocking:
            self._watch.begin(descriptor)

    def _end_greedy(self, descriptor: int) -> None:
        address = self._knocking.get(descriptor, "an unknown address")
        self.refused.say("ended the connection from %s: it sends more than can be read", address)
        _shut(descriptor)

    def end_stopped(self) -> None:
        """End the connections of processes that are stopped; called again and again."""
        if self._round is None:
            self._round = self._watch.stopped()
            self._look_at_more()

    def _look_at_more(self) -> None:
        """A few connections at a time, and between them whoever has something to say."""
        assert self._round is not None
        found = next(self._round, None)
        if found is None:
            self._round = None
            return
        loop = asyncio.get_running_loop()
        for descriptor in found:
            loop.call_later(AGAIN_MS / 1000, self._end_if_stopped, descriptor)
        loop.call_later(BETWEEN_S, self._look_at_more)

    def _end_if_stopped(self, descriptor: int) -> None:
        if self._watch.still_stopped(descriptor):
            log.warning("the process at %s does not answer although its host does", self._knocking[descriptor])
            _shut(descriptor)


class Doorstep:
    """A worker's side: knows what a failed handshake means to it."""

    def __init__(self, keys: WorkerKeys | None, say: Callable[[FlowError], None]) -> None:
        self.address = ""
        self._keys = keys
        self._say = say
        self._silent_since_s: float | None = None

    def failed(self, failure: Failure) -> None:
        """ZeroMQ tries again and again; what will not get better by that is said at once."""
        where = f"controller {self.address}"
        needed = f"lets nobody in without keys; give the worker its directory with --keys DIR or {KEYS_VARIABLE}"
        if failure is Failure.SILENT:
            # A controller that cannot read our keys hangs up without a word, but so does one that is just ending; and
            # one that wants keys may see that we have none before we have read that it does, every time.
            now = monotonic()
            self._silent_since_s = self._silent_since_s or now
            if now - self._silent_since_s <= SILENT_S:
                return
            if self._keys is None:
                self._say(ConfigError(f"{where} hangs up before a word is said. Perhaps it {needed}"))
            else:
                public = self._keys.path.with_name(PUBLIC)
                self._say(ConfigError(f"{where} hangs up on our keys: is {public} the key of this controller?"))
        elif self._keys is None:
            self._say(ConfigError(f"{where} {needed}"))
        elif failure is Failure.UNKNOWN_KEY:
            self._say(ConfigError(f"{where} does not know the key {self._keys.path}; add its public key to {ADMITTED}"))
        else:
            self._say(ConfigError(f"{where} runs without keys (or is none); start it with keys, or leave --keys away"))


def _shut(descriptor: int) -> None:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def _peer_of(descriptor: int) -> str:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            host, port = connection.getpeername()[:2]
    except (OSError, ValueError):
        return "an address that is gone already"
    return f"{host}:{port}"
