"""A run that is killed and resumed, and one with a draining worker, with every role slow, hung, missing or dead."""

import re
from pathlib import Path

import pytest

from flowrt.controller.events import MessageReceived, Send
from flowrt.controller.storage.ledger import Ledger
from flowrt.protocol.messages import Commit, Grant
from tests.effort import combinations
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.degraded_runs import ABSENCE_S, LEASE_S, SILENCE_S, SLOW_S, STALL_S, DegradedRun, Kind, Phase
from tests.simulation.resumed_runs import ResumedRuns
from tests.simulation.run_invariants import assert_exact
from tests.simulation.scenario import Scenario
from tests.simulation.worker import Worker

ROLES = ("source", "rollout", "reward", "reference", "trainer", "evaluate")
CAN_DRAIN = ("rollout", "reward", "reference")
MARGIN_S = 10.0
MAX_SLOW_ACTIONS = 300
HEALTHY_ACTIONS, FAULTY_S = 250, 1.0
"""Actions before the fault; duration of the fault before the run is killed."""
REASONS = {
    0: "the run is complete",
    1: r"not heard of for 3[01] s|left before its part was complete",
    3: "no progress for 300 s: .* waits ",
}
NEVER_JOINED = "no worker of these roles has joined within 300 s: {role}; start one of each"


def assert_ended_in_time_with_a_reason(run: DegradedRun) -> int:
    assert run.core.ended is not None
    code, reason = run.core.ended.code, run.core.ended.reason
    never_joined = code == 3 and run.phase is Phase.RESUME and run.kind is Kind.MISSING
    assert re.search(NEVER_JOINED.format(role=run.victim.role) if never_joined else REASONS[code], reason)
    limit_s = LEASE_S + SILENCE_S + MARGIN_S
    if code == 0 and run.kind is Kind.SLOW:
        limit_s = SLOW_S * MAX_SLOW_ACTIONS
    elif code == 1:
        assert run.victim.id in reason
        limit_s = SILENCE_S + ABSENCE_S + MARGIN_S
    elif code == 3:
        limit_s += STALL_S
    assert run.took_s <= limit_s
    return code


def assert_resumes_exactly(runs: ResumedRuns, run: DegradedRun, code: int) -> None:
    """Resumed without faults, the run trains what an uninterrupted one would have trained."""
    runs.add(run, interrupted=code != 0)
    try:
        if code:
            runs.add(SimulatedCluster(run.scenario, runs.next_position()).run(), interrupted=False)
        assert_exact(runs, run.scenario)
    finally:
        runs.ledger.close()


def outcome_of_resume(role: str, kind: Kind) -> int:
    if role in ("evaluate", "rollout") or kind is Kind.SLOW:
        return 0  # training does not need it, or there is another one
    return 1 if kind is Kind.DEAD else 3


@pytest.mark.parametrize(("role", "kind"), combinations(ROLES, Kind))
def test_a_run_that_is_killed_and_resumed_with_the_same_fault_ends_in_time(
    role: str, kind: Kind, tmp_path: Path
) -> None:
    """A resumed run is faulty from its start on, is killed, and has the same fault when it is resumed again."""
    runs = ResumedRuns(Ledger(tmp_path / "ledger.sqlite"))
    runs.add(
        SimulatedCluster(Scenario(checkpoint_every=1), runs.next_position()).run(HEALTHY_ACTIONS), interrupted=True
    )
    before = DegradedRun(Phase.RESUME, role, kind, 1, position=runs.next_position()).play(FAULTY_S)
    runs.add(before, interrupted=True)
    run = DegradedRun(Phase.RESUME, role, kind, 2, position=runs.next_position()).play()
    assert runs.positions[1].step > 0, "the run did not resume"
    code = assert_ended_in_time_with_a_reason(run)
    assert code == outcome_of_resume(role, kind)
    assert_resumes_exactly(runs, run, code)


def outcome_of_drain(drained: str, role: str, kind: Kind) -> int:
    if role == "trainer" or drained == role:
        # The only worker of its role, or the last one that would stay: the same as without a drain.
        of_kind = {Kind.SLOW: 0, Kind.HUNG: 3, Kind.MISSING: int(role == "trainer"), Kind.DEAD: 1}
        return of_kind[kind]
    if role == "source":
        return {Kind.SLOW: 0, Kind.HUNG: 3, Kind.MISSING: 1, Kind.DEAD: 1}[kind]
    return 0  # there is another one


@pytest.mark.parametrize(
    ("drained", "role", "kind"), combinations(CAN_DRAIN, [role for role in ROLES if role != "evaluate"], Kind)
)
def test_a_drained_worker_leaves_and_nothing_is_lost(drained: str, role: str, kind: Kind, tmp_path: Path) -> None:
    """It finishes its work and leaves during the run, while another worker is slow, hung, missing or dead."""
    runs = ResumedRuns(Ledger(tmp_path / "ledger.sqlite"))
    run = DegradedRun(Phase.DRAIN, role, kind, drained=drained, position=runs.next_position()).play()
    code = assert_ended_in_time_with_a_reason(run)
    assert code == outcome_of_drain(drained, role, kind)
    # Unless it is the only one left, or the run has ended with its trainer.
    leaves = kind is not Kind.MISSING or role not in (drained, "trainer")
    assert run.drained is not None
    assert run.drained.leaving is leaves
    if code == 0 and leaves:
        assert run.left_s is not None
        assert run.left_s < run.clock.now()
    if run.left_s is not None:
        assert_all_granted_slots_committed(run, run.drained)
    assert_resumes_exactly(runs, run, code)


def assert_all_granted_slots_committed(run: DegradedRun, drained: Worker) -> None:
    """No lease of the drained worker ended without a result."""
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
