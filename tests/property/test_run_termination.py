"""Every phase of a run, with every role slow, hung, missing or dead: it ends in bounded time, with a reason."""

import re

import pytest

from tests.effort import combinations
from tests.simulation.degraded_runs import (
    ACT_S,
    CANCELLED,
    LEASE_S,
    SILENCE_S,
    SLOW_S,
    STALL_S,
    DegradedRun,
    Kind,
    Phase,
)

ROLES = ("source", "rollout", "reward", "reference", "trainer", "evaluate")
PHASES = [phase for phase in Phase if phase not in (Phase.RESUME, Phase.DRAIN)]
"""The other two are in test_run_termination_after_resume."""
MARGIN_S = 10.0
"""Duration of a run without faults from any of its phases on."""
MAX_SLOW_ACTIONS = 300


def outcome(phase: Phase, role: str, kind: Kind) -> int:
    """The expected exit code."""
    if role == "evaluate" or (role == "rollout" and kind is Kind.HUNG and phase is not Phase.DEPARTURE):
        return CANCELLED if phase is Phase.CANCEL else 0  # training does not need it, or there is another one
    if kind is Kind.SLOW:
        return CANCELLED if phase is Phase.CANCEL else 0
    if role == "rollout" and phase is Phase.DEPARTURE:
        return 3  # the other one has left, and rollout workers may leave: none remains to generate
    if kind is Kind.HUNG:
        return CANCELLED if phase is Phase.CANCEL else 3
    if kind is Kind.MISSING:
        if phase is Phase.START:
            return 0 if role == "rollout" else 3
        return 1
    if phase is Phase.CANCEL:
        return CANCELLED
    return 0 if role == "rollout" and phase in (Phase.START, Phase.EVALUATION) else 1


@pytest.mark.parametrize(("phase", "role", "kind"), combinations(PHASES, ROLES, Kind))
def test_a_run_with_a_faulty_role_ends_in_bounded_time_with_a_reason(phase: Phase, role: str, kind: Kind) -> None:
    """Start-up, training, evaluation, cancellation, departure, end of data and end of run, with every faulty role.

    Among the known deadlocks: a straggler blocks the buffer; a drain waits for the longest rollout; the source ends
    early and the trainer waits; the last step waits for a version that is never published; a consumer waits forever.
    """
    run = DegradedRun(phase, role, kind).play()
    ended = run.core.ended
    assert ended is not None
    assert ended.code == outcome(phase, role, kind), ended.reason
    if ended.code == 0:
        limit_s = SLOW_S * MAX_SLOW_ACTIONS if kind is Kind.SLOW else LEASE_S + SILENCE_S + MARGIN_S
        assert ended.reason == "the run is complete"
    elif ended.code == 3:
        limit_s = STALL_S + LEASE_S + SILENCE_S + MARGIN_S
        if kind is Kind.MISSING and phase is Phase.START:
            assert f"no worker of these roles has joined within 300 s: {role}; start one of each" in ended.reason
        else:
            assert "no progress for 300 s" in ended.reason
            assert " waits " in ended.reason
    elif ended.code == CANCELLED:
        limit_s = 2 * ACT_S
        assert ended.reason == "cancelled"
    else:
        limit_s = SILENCE_S + MARGIN_S
        assert ended.reason.startswith(f"{role}0: ")
        assert re.search(
            # The last message came up to a heartbeat interval before its death.
            r"not heard of for 3[01] s" if kind is Kind.DEAD else "left before its part was complete",
            ended.reason,
        )
    assert run.took_s <= limit_s


def test_the_lease_of_a_hung_worker_expires_and_another_does_its_work() -> None:
    """An engine that hangs while its worker sends heartbeats: only the deadline of the lease detects it."""
    run = DegradedRun(Phase.TRAINING, "rollout", Kind.HUNG).play()
    assert run.core.ended is not None
    assert run.core.ended.code == 0
    assert LEASE_S <= run.took_s < LEASE_S + MARGIN_S


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "phase",
    [phase for phase in PHASES if phase not in (Phase.CANCEL, Phase.DEPARTURE)],
    ids=lambda phase: phase.name.lower(),
)
def test_a_slow_rollout_worker_does_not_slow_down_the_run(phase: Phase, seed: int) -> None:
    """One of two workers takes 400 times as long as the other: the run keeps the pace of the other."""
    run = DegradedRun(phase, "rollout", Kind.SLOW, seed).play()
    assert run.core.ended is not None
    assert run.core.ended.code == 0
    assert run.took_s < SLOW_S * 40
