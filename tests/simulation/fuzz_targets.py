"""What a fuzzer drives: bytes in, and an AssertionError when something is believed that should not have been.

``codec`` takes the bytes of one message. ``core`` takes a conversation: for each message a byte that says who speaks,
a byte with its length, and its bytes.
"""

from flowrt.controller.events import MessageReceived, Send
from flowrt.errors import RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.codec import decode, encode
from tests.simulation.core_driver import CoreDriver
from tests.simulation.message_fuzzer import NAMES, MessageFuzzer

SPEAKERS = NAMES[:6]
MOST_MEMBERS = 64
"""A legal offer may open thousands of slots: that costs time, and finds nothing."""
MOST_MESSAGES = 40


def codec(data: bytes) -> None:
    """What is taken can be sent on, and says the same again."""
    try:
        message = decode(data)
    except RemoteProtocolError:
        return
    again = encode(message)
    assert encode(decode(again)) == again, f"{message} does not come back as it was"


def core(data: bytes) -> None:
    """Whatever is refused has changed nothing, and whatever is taken leaves the state sound."""
    driver = CoreDriver(members=2, groups_per_step=2)
    for who, words in _spoken(data):
        try:
            message = decode(words)
        except RemoteProtocolError:
            continue
        if isinstance(message, m.Offer) and message.members * max(len(message.prompts), 1) > MOST_MEMBERS:
            continue
        hear(driver, who, message)
        if driver.core.ended:
            return


def hear(driver: CoreDriver, who: str, message: m.Message) -> bool:
    """Hand a message to the core; True if it was accepted. Every answer must be encodable."""
    before = driver.snapshot()
    try:
        commands = driver.core.transition(MessageReceived(WorkerId(who), message), driver.now)
    except RemoteProtocolError:
        assert driver.snapshot() == before, f"refused, and changed something: {message}"
        return False
    driver.core.check()
    for command in commands:
        if isinstance(command, Send):
            encode(command.message)
    return True


def conversation(seed: int) -> bytes:
    """One to begin with, as ``core`` takes it: messages that nearly make sense, some of them said again or changed."""
    noise, spoken = MessageFuzzer(seed), b""
    said = [noise.message() for _ in range(6)]
    for message in said + [noise.changed(noise.random.choice(said)) for _ in range(4)]:
        words = encode(message)
        if len(words) < 256:
            spoken += bytes([noise.random.randrange(len(SPEAKERS)), len(words)]) + words
    return spoken


def _spoken(data: bytes) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    at = 0
    while at + 2 <= len(data) and len(found) < MOST_MESSAGES:
        who, size = data[at], data[at + 1]
        found.append((SPEAKERS[who % len(SPEAKERS)], data[at + 2 : at + 2 + size]))
        at += 2 + size
    return found
