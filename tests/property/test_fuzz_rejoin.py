"""Random input to a restarted controller: what its workers report is refused or consistent."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.events import AppendRestartLog, MessageReceived, Tick, WorkerConnected
from flowrt.errors import RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import Part, Position
from tests.effort import examples
from tests.simulation.cluster import make_core
from tests.simulation.controller_restart import DurableState
from tests.simulation.core_driver import CoreDriver
from tests.simulation.message_fuzzer import NAMES, MessageFuzzer
from tests.simulation.scenario import MODEL, Scenario, whole
from tests.simulation.state_dump import snapshot

SHAPE: dict[str, Any] = {"members": 1, "groups_per_step": 1, "references": 0}
WORKERS = NAMES[:6]


class DurableCoreDriver(CoreDriver):
    """A `CoreDriver` whose restart entries are kept as in a ledger."""

    def __init__(self) -> None:
        self.durable = DurableState()
        super().__init__(**SHAPE)

    def event(self, event: Any) -> list[Any]:
        commands = super().event(event)
        for command in commands:
            if isinstance(command, AppendRestartLog):
                self.durable.keep(command.entry)
        return commands


def restarted() -> tuple[CoreDriver, list[m.Message]]:
    """A controller that restarted in the middle of a step, and valid messages of its workers."""
    before = DurableCoreDriver()
    before.ready_to_train()
    before.offer(prompt=1)
    grant = before.pull("rollout1", "rollout")
    assert grant is not None
    valid: list[m.Message] = [
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
    return after, valid


@pytest.mark.slow
@given(st.integers(0, 2**32))
@settings(max_examples=examples(300))
def test_random_reports_to_a_restarted_controller_are_refused_or_consistent(seed: int) -> None:
    fuzzer, (driver, valid) = MessageFuzzer(seed), restarted()
    draw = fuzzer.random
    for _ in range(25):
        base = draw.choice(valid)
        message = draw.choice((base, fuzzer.changed(base), fuzzer.message((m.RenewLease, m.Inventory))))
        before = snapshot(driver.core)
        try:
            driver.core.transition(MessageReceived(WorkerId(draw.choice(WORKERS)), message), driver.now)
        except RemoteProtocolError:
            assert snapshot(driver.core) == before, f"{message} was refused, but changed the state"
            continue
        driver.core.check()
        if driver.core.ended:
            return
    driver.now += 1000.0
    driver.event(Tick())
    assert not driver.core.state.recovery.is_active
