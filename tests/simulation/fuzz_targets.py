"""Fuzz targets: they take bytes, and raise AssertionError if invalid input is accepted.

``codec`` takes the bytes of one message. ``core`` takes several messages: for each one byte for the sender, one byte
for the length, and its bytes.
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
"""A legal offer may open thousands of slots, which takes time and finds nothing."""
MOST_MESSAGES = 40


def codec(data: bytes) -> None:
    """An accepted message round-trips."""
    try:
        message = decode(data)
    except RemoteProtocolError:
        return
    again = encode(message)
    assert encode(decode(again)) == again, f"{message} does not round-trip"


def core(data: bytes) -> None:
    """A refused message changes nothing, and an accepted one leaves the state consistent."""
    driver = CoreDriver(members=2, groups_per_step=2)
    for sender, encoded in parse_conversation(data):
        try:
            message = decode(encoded)
        except RemoteProtocolError:
            continue
        if isinstance(message, m.Offer) and message.members * max(len(message.prompts), 1) > MOST_MEMBERS:
            continue
        deliver(driver, sender, message)
        if driver.core.ended:
            return


def deliver(driver: CoreDriver, sender: str, message: m.Message) -> bool:
    """Hand a message to the core; True if it was accepted. Every reply must be encodable."""
    before = driver.snapshot()
    try:
        commands = driver.core.transition(MessageReceived(WorkerId(sender), message), driver.now)
    except RemoteProtocolError:
        assert driver.snapshot() == before, f"refused, but changed the state: {message}"
        return False
    driver.core.check()
    for command in commands:
        if isinstance(command, Send):
            encode(command.message)
    return True


def conversation(seed: int) -> bytes:
    """A seed input for ``core``: nearly valid messages, some of them again with one changed field."""
    fuzzer, data = MessageFuzzer(seed), b""
    messages = [fuzzer.message() for _ in range(6)]
    for message in messages + [fuzzer.changed(fuzzer.random.choice(messages)) for _ in range(4)]:
        encoded = encode(message)
        if len(encoded) < 256:
            data += bytes([fuzzer.random.randrange(len(SPEAKERS)), len(encoded)]) + encoded
    return data


def parse_conversation(data: bytes) -> list[tuple[str, bytes]]:
    messages: list[tuple[str, bytes]] = []
    at = 0
    while at + 2 <= len(data) and len(messages) < MOST_MESSAGES:
        sender, size = data[at], data[at + 1]
        messages.append((SPEAKERS[sender % len(SPEAKERS)], data[at + 2 : at + 2 + size]))
        at += 2 + size
    return messages
