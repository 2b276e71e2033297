"""Connections whose descriptors are reused while messages are unread, and hellos that are awaited during a stall."""

import socket

import pytest

from flowrt.net import connection_filter
from flowrt.net.connection_filter import HELLO_TIMEOUT_S, UNJOINED_CHECK_S, ConnectionFilter, ReceiveBacklog

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


async def test_a_hello_is_awaited_by_time_in_which_the_controller_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(connection_filter, "monotonic", lambda: now)
    connections = ConnectionFilter(None, lambda: None)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        connections.on_accepted(accepted.fileno())
        now += 2 * HELLO_TIMEOUT_S  # the controller was stopped: the hello may be unread
        connections._check_unjoined()
        assert connections.refused.count == 0
        end_s = now + HELLO_TIMEOUT_S + 1
        while now < end_s:
            now += UNJOINED_CHECK_S
            connections._check_unjoined()
        assert connections.refused.count == 1
    connections.close()
