"""Noise for a controller that has come back: what its workers claim to have had is refused, or fits together."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.events import Joined, Keep, Said, Tick
from flowrt.errors import RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.testing.noise import NAMES, Noise
from flowrt.testing.scenario import MODEL, Scenario, whole
from flowrt.testing.sim import make_core
from flowrt.testing.simreturn import Durable
from flowrt.testing.snapshot import snapshot
from flowrt.testing.talk import Talk
from flowrt.wire import messages as m
from flowrt.wire.records import Part, Position

SHAPE: dict[str, Any] = {"members": 1, "groups_per_step": 1, "references": 0}
WORKERS = NAMES[:6]


class Remembered(Talk):
    """A conversation of which the ledger keeps what it is told to."""

    def __init__(self) -> None:
        self.durable = Durable()
        super().__init__(**SHAPE)

    def event(self, event: Any) -> list[Any]:
        commands = super().event(event)
        for command in commands:
            if isinstance(command, Keep):
                self.durable.keep(command.entry)
        return commands


def begun() -> tuple[Talk, list[m.Message]]:
    """A controller that came back in the middle of a step, and what its workers may say if they tell the truth."""
    before = Remembered()
    before.ready_to_train()
    before.offer(prompt=1)
    grant = before.pull("rollout1", "rollout")
    assert grant is not None
    truth: list[m.Message] = [
        m.Renew(grant.lease, "rollout", -1, grant.slots, grant.attempts),
        m.Holds((Part("response", (0,), (3,)),), (whole(0),)),
        m.Holds((Part("prompt", (0, 1), (4, 4)),), ()),
        m.Applied(MODEL, 0),
        m.Pull(9, "rollout", 1, 0, -1),
        m.StepDone(0, ()),
    ]
    after = Talk.__new__(Talk)
    after.core, after.now = make_core(Scenario(**SHAPE), Position(), 2, before.durable.remains()), 0.0
    for worker in WORKERS:
        after.event(Joined(WorkerId(worker), worker[:-1], "host", (), 1))
    assert after.core.regroup.is_open
    return after, truth


@given(st.integers(0, 2**32))
@settings(max_examples=300)
def test_what_is_claimed_is_refused_or_fits_together(seed: int) -> None:
    noise, (talk, truth) = Noise(seed), begun()
    draw = noise.random
    for _ in range(25):
        base = draw.choice(truth)
        message = draw.choice((base, noise.changed(base), noise.message((m.Renew, m.Holds))))
        before = snapshot(talk.core)
        try:
            talk.core.handle(Said(WorkerId(draw.choice(WORKERS)), message), talk.now)
        except RemoteProtocolError:
            assert snapshot(talk.core) == before, f"{message} was refused and changed something"
            continue
        talk.core.check()
        if talk.core.ended:
            return
    talk.now += 1000.0
    talk.event(Tick())
    assert not talk.core.regroup.is_open
