"""What a worker makes of a controller that closes the connection during the handshake."""

from pathlib import Path

import pytest

from flowrt.errors import ConfigError, FlowError
from flowrt.net import link
from flowrt.net.connection_guard import HandshakeFailure
from flowrt.net.curve_keys import Pair, WorkerKeys
from flowrt.net.link import CLOSED_HANDSHAKES_S, HandshakeMonitor


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(link, "monotonic", lambda: now[0])
    return now


def hung_up_on(keys: WorkerKeys | None, now: list[float]) -> list[FlowError]:
    """What is said of a controller that hangs up every tenth of a second, for longer than can be borne."""
    said: list[FlowError] = []
    monitor = HandshakeMonitor(keys, said.append)
    monitor.address = "tcp://127.0.0.1:5557"
    begin_s = now[0]
    while not said and now[0] < begin_s + 1.5 * CLOSED_HANDSHAKES_S:
        monitor.on_failure(HandshakeFailure.CLOSED)
        now[0] += 0.1
    assert now[0] > begin_s + CLOSED_HANDSHAKES_S  # one that is just ending does so, too
    return said


def test_hanging_up_for_good_is_said_to_a_worker_without_keys(now: list[float]) -> None:
    # Which end sees first that only one has keys is chance; some see it second a hundred times in a row.
    (error,) = hung_up_on(None, now)
    assert isinstance(error, ConfigError)
    assert "tcp://127.0.0.1:5557 closes the connection during the handshake" in str(error)
    assert "--keys DIR" in str(error)


def test_hanging_up_for_good_on_keys_names_the_key_that_was_expected(now: list[float]) -> None:
    keys = WorkerKeys(Pair("p" * 40, "s" * 40), "c" * 40, Path("keys/worker.key"))
    (error,) = hung_up_on(keys, now)
    assert isinstance(error, ConfigError)
    assert "is keys/controller.pub the key of this controller?" in str(error)
