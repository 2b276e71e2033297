"""What the two ends of a lane tell each other when they meet."""

import pytest

from flowrt.errors import TransferError
from flowrt.transport.rendezvous import SignalStore
from flowrt.wire.records import MAX_SIGNAL_BYTES


def test_a_key_that_the_controller_would_refuse_fails_the_lane_and_is_not_sent() -> None:
    said: list[bytes] = []
    store = SignalStore("a>b/samples/0", lambda key, value: said.append(value), 1.0)
    store.set("root", bytes(MAX_SIGNAL_BYTES))
    with pytest.raises(TransferError, match=r"lane a>b/samples/0: .* 16385 bytes as 'root', and at most 16384 can be"):
        store.set("root", bytes(MAX_SIGNAL_BYTES + 1))
    assert said == [bytes(MAX_SIGNAL_BYTES)]
