"""Rendezvous of the two ends of a lane."""

import pytest

from flowrt.errors import TransferError
from flowrt.protocol.messages import MAX_SIGNAL_BYTES
from flowrt.transport.lanes.channel import SignalStore


def test_oversized_rendezvous_key_fails_the_lane_and_is_not_sent() -> None:
    sent: list[bytes] = []
    store = SignalStore("a>b/samples/0", lambda key, value: sent.append(value), 1.0)
    store.set("root", bytes(MAX_SIGNAL_BYTES))
    with pytest.raises(TransferError, match=r"lane a>b/samples/0: .* 16385 bytes as key 'root', more than 16384"):
        store.set("root", bytes(MAX_SIGNAL_BYTES + 1))
    assert sent == [bytes(MAX_SIGNAL_BYTES)]
