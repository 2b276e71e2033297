"""Connections whose descriptors are reused while messages of their earlier peers are unread."""

from flowrt.net.connection_guard import ReceiveBacklog

DESCRIPTOR = 7
"""No connection of this process: the kernel has received nothing over it."""


def descriptor() -> int:
    return DESCRIPTOR


def test_a_late_message_of_a_closed_connection_does_not_count_for_the_connection_that_reuses_its_descriptor() -> None:
    backlog = ReceiveBacklog(lambda _: None)
    backlog.add(DESCRIPTOR)
    backlog.deliver(b"first", 10, descriptor)
    backlog.remove(DESCRIPTOR)
    backlog.add(DESCRIPTOR)
    backlog.deliver(b"second", 10, descriptor)
    backlog.deliver(b"first", 10, descriptor)  # it was read after the connection had closed
    assert backlog.peer(DESCRIPTOR) == b"second"
    assert backlog.remove(DESCRIPTOR) == b"second"
    assert backlog._delivered == {}


def test_a_peer_that_left_before_its_hello_was_handled_is_forgotten_when_its_descriptor_is_reused() -> None:
    backlog = ReceiveBacklog(lambda _: None)
    backlog.add(DESCRIPTOR)
    backlog.remove(DESCRIPTOR)
    backlog.add(DESCRIPTOR)
    backlog.deliver(b"first", 10, descriptor)
    backlog.deliver(b"second", 10, descriptor)
    assert backlog.peer(DESCRIPTOR) == b"second"
    backlog.remove(DESCRIPTOR)
    assert backlog._delivered == {}
