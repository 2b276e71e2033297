"""Errors of a worker whose controller closes the connection during the handshake."""

from pathlib import Path

import pytest

from flowrt.errors import ConfigError, FlowError
from flowrt.net import link
from flowrt.net.connection_filter import HandshakeFailure
from flowrt.net.curve_keys import Pair, WorkerKeys
from flowrt.net.link import CLOSED_HANDSHAKES_S, HandshakeMonitor


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(link, "monotonic", lambda: now[0])
    return now


def errors_of_closed_handshakes(keys: WorkerKeys | None, now: list[float]) -> list[FlowError]:
    """The errors when a controller closes ten handshakes a second, for longer than the limit."""
    errors: list[FlowError] = []
    monitor = HandshakeMonitor(keys, errors.append)
    monitor.address = "tcp://127.0.0.1:5557"
    begin_s = now[0]
    while not errors and now[0] < begin_s + 1.5 * CLOSED_HANDSHAKES_S:
        monitor.on_failure(HandshakeFailure.CLOSED)
        now[0] += 0.1
    assert now[0] > begin_s + CLOSED_HANDSHAKES_S  # a controller that is shutting down does so, too
    return errors


def test_repeatedly_closed_handshakes_without_keys_suggest_the_option(now: list[float]) -> None:
    # Which end detects the missing keys first is chance; the worker may be second a hundred times in a row.
    (error,) = errors_of_closed_handshakes(None, now)
    assert isinstance(error, ConfigError)
    assert "tcp://127.0.0.1:5557 closes the connection during the handshake" in str(error)
    assert "--keys DIR" in str(error)


def test_repeatedly_closed_handshakes_with_keys_name_the_expected_key(now: list[float]) -> None:
    keys = WorkerKeys(Pair("p" * 40, "s" * 40), "c" * 40, Path("keys/worker.key"))
    (error,) = errors_of_closed_handshakes(keys, now)
    assert isinstance(error, ConfigError)
    assert "is keys/controller.pub the key of this controller?" in str(error)
