"""A run that is killed and goes on, and one in which somebody drains, with every role slow, hung, missing or dead."""

import re
from pathlib import Path

import pytest

from flowrt.controller.events import MessageReceived, Send
from flowrt.controller.storage.ledger import Ledger
from flowrt.protocol.messages import Commit, Grant
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.degraded_runs import ABSENCE_S, LEASE_S, SILENCE_S, SLOW_S, STALL_S, DegradedRun, Kind, Phase
from tests.simulation.resumed_runs import ResumedRuns
from tests.simulation.run_invariants import assert_exact
from tests.simulation.scenario import Scenario
from tests.simulation.worker import Worker

ROLES = ("source", "rollout", "reward", "reference", "trainer", "evaluate")
CAN_DRAIN = ("rollout", "reward", "reference")
LITTLE_S = 10.0
MOST_SLOW_ACTIONS = 300
WELL, CUT_S = 250, 1.0
"""What happens before anything goes wrong; how long a run is in trouble before all of it is killed."""
TOLD = {
    0: "the run is complete",
    1: r"not heard of for 3[01] s|left before its part was complete",
    3: "no progress for 300 s: .* waits ",
}
NEVER_CAME = "no worker of these roles has joined within 300 s: {role}; start one of each"


def assert_ended_in_time_and_words(run: DegradedRun) -> int:
    assert run.core.ended is not None
    code, reason = run.core.ended.code, run.core.ended.reason
    never_came = code == 3 and run.phase is Phase.RESUME and run.kind is Kind.MISSING
    assert re.search(NEVER_CAME.format(role=run.victim.role) if never_came else TOLD[code], reason)
    limit_s = LEASE_S + SILENCE_S + LITTLE_S
    if code == 0 and run.kind is Kind.SLOW:
        limit_s = SLOW_S * MOST_SLOW_ACTIONS
    elif code == 1:
        assert run.victim.id in reason
        limit_s = SILENCE_S + ABSENCE_S + LITTLE_S
    elif code == 3:
        limit_s += STALL_S
    assert run.took_s <= limit_s
    return code


def assert_goes_on_exactly(lives: ResumedRuns, run: DegradedRun, code: int) -> None:
    """Whatever has happened: once all is well, the run is what it would have been."""
    lives.over(run, cut_short=code != 0)
    try:
        if code:
            lives.over(SimulatedCluster(run.scenario, lives.next_position()).run(), cut_short=False)
        assert_exact(lives, run.scenario)
    finally:
        lives.ledger.close()


def outcome_of_resume(role: str, kind: Kind) -> int:
    if role in ("evaluate", "rollout") or kind is Kind.SLOW:
        return 0  # nobody needs it to train, or there is another one
    return 1 if kind is Kind.DEAD else 3


@pytest.mark.parametrize("kind", Kind, ids=lambda one: one.name.lower())
@pytest.mark.parametrize("role", ROLES)
def test_a_run_in_trouble_that_is_killed_and_goes_on_in_trouble(role: str, kind: Kind, tmp_path: Path) -> None:
    """Resume: in trouble from its first word on, killed, and in the same trouble when it goes on once more."""
    lives = ResumedRuns(Ledger(tmp_path / "ledger.sqlite"))
    lives.over(SimulatedCluster(Scenario(checkpoint_every=1), lives.next_position()).run(WELL), cut_short=True)
    before = DegradedRun(Phase.RESUME, role, kind, 1, position=lives.next_position()).play(CUT_S)
    lives.over(before, cut_short=True)
    run = DegradedRun(Phase.RESUME, role, kind, 2, position=lives.next_position()).play()
    assert lives.positions[1].step > 0, "it began anew"
    code = assert_ended_in_time_and_words(run)
    assert code == outcome_of_resume(role, kind)
    assert_goes_on_exactly(lives, run, code)


def outcome_of_drain(drained: str, role: str, kind: Kind) -> int:
    if role == "trainer" or drained == role:
        # The only one of its role, or the last of it that would stay: as if nobody had been asked to leave.
        of_kind = {Kind.SLOW: 0, Kind.HUNG: 3, Kind.MISSING: int(role == "trainer"), Kind.DEAD: 1}
        return of_kind[kind]
    if role == "source":
        return {Kind.SLOW: 0, Kind.HUNG: 3, Kind.MISSING: 1, Kind.DEAD: 1}[kind]
    return 0  # there is another one


@pytest.mark.parametrize("kind", Kind, ids=lambda one: one.name.lower())
@pytest.mark.parametrize("role", [role for role in ROLES if role != "evaluate"])
@pytest.mark.parametrize("drained", CAN_DRAIN)
def test_one_that_drains_leaves_with_nothing_lost(drained: str, role: str, kind: Kind, tmp_path: Path) -> None:
    """It finishes what it has begun, and goes while the run goes on, whoever else is slow, hung, missing or dead."""
    lives = ResumedRuns(Ledger(tmp_path / "ledger.sqlite"))
    run = DegradedRun(Phase.DRAIN, role, kind, drained=drained, position=lives.next_position()).play()
    code = assert_ended_in_time_and_words(run)
    assert code == outcome_of_drain(drained, role, kind)
    # Unless it is the only one left, or the run has ended with its trainer.
    leaves = kind is not Kind.MISSING or role not in (drained, "trainer")
    assert run.drained is not None
    assert run.drained.leaving is leaves
    if code == 0 and leaves:
        assert run.left_s is not None
        assert run.left_s < run.clock.now()
    if run.left_s is not None:
        assert_nothing_went_with_it(run, run.drained)
    assert_goes_on_exactly(lives, run, code)


def assert_nothing_went_with_it(run: DegradedRun, drained: Worker) -> None:
    """What it made was used, and all that it had begun was finished: no lease of it ended without a result."""
    granted = [
        row
        for event in run.log
        if isinstance(event, Send) and event.worker == drained.id and isinstance(event.message, Grant)
        for row in event.message.slots
    ]
    committed = [
        row
        for event in run.log
        if isinstance(event, MessageReceived) and event.worker == drained.id and isinstance(event.message, Commit)
        for row in event.message.slots
    ]
    assert sorted(granted) == sorted(committed)
