"""Noise for a controller that has come back: what its workers claim to have had is refused, or fits together."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.events import AppendReplay, MessageReceived, Tick, WorkerConnected
from flowrt.errors import RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import Part, Position
from tests.effort import examples
from tests.simulation.cluster import make_core
from tests.simulation.controller_restart import Durable
from tests.simulation.core_driver import CoreDriver
from tests.simulation.message_fuzzer import NAMES, MessageFuzzer
from tests.simulation.scenario import MODEL, Scenario, whole
from tests.simulation.state_dump import snapshot

SHAPE: dict[str, Any] = {"members": 1, "groups_per_step": 1, "references": 0}
WORKERS = NAMES[:6]


class Remembered(CoreDriver):
    """A conversation of which the ledger keeps what it is told to."""

    def __init__(self) -> None:
        self.durable = Durable()
        super().__init__(**SHAPE)

    def event(self, event: Any) -> list[Any]:
        commands = super().event(event)
        for command in commands:
            if isinstance(command, AppendReplay):
                self.durable.keep(command.entry)
        return commands


def begun() -> tuple[CoreDriver, list[m.Message]]:
    """A controller that came back in the middle of a step, and what its workers may say if they tell the truth."""
    before = Remembered()
    before.ready_to_train()
    before.offer(prompt=1)
    grant = before.pull("rollout1", "rollout")
    assert grant is not None
    truth: list[m.Message] = [
        m.RenewLease(lease=grant.lease, stage="rollout", step=-1, slots=grant.slots, attempts=grant.attempts),
        m.Inventory((Part("response", (0,), (3,)),), (whole(0),)),
        m.Inventory((Part("prompt", (0, 1), (4, 4)),), ()),
        m.WeightsActivated(MODEL, 0),
        m.Pull(request=9, stage="rollout", slots=1, tokens=0, step=-1),
        m.StepCompleted(0, ()),
    ]
    after = CoreDriver.__new__(CoreDriver)
    after.core, after.now = make_core(Scenario(**SHAPE), Position(), 2, before.durable.recovered()), 0.0
    for worker in WORKERS:
        after.event(WorkerConnected(worker=WorkerId(worker), role=worker[:-1], host="host", lanes=(), term=1))
    assert after.core.state.recovery.is_active
    return after, truth


@pytest.mark.slow
@given(st.integers(0, 2**32))
@settings(max_examples=examples(300))
def test_what_is_claimed_is_refused_or_fits_together(seed: int) -> None:
    noise, (driver, truth) = MessageFuzzer(seed), begun()
    draw = noise.random
    for _ in range(25):
        base = draw.choice(truth)
        message = draw.choice((base, noise.changed(base), noise.message((m.RenewLease, m.Inventory))))
        before = snapshot(driver.core)
        try:
            driver.core.transition(MessageReceived(WorkerId(draw.choice(WORKERS)), message), driver.now)
        except RemoteProtocolError:
            assert snapshot(driver.core) == before, f"{message} was refused and changed something"
            continue
        driver.core.check()
        if driver.core.ended:
            return
    driver.now += 1000.0
    driver.event(Tick())
    assert not driver.core.state.recovery.is_active
