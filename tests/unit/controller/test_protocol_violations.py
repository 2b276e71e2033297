"""A worker that breaks the protocol is dismissed by name: its leases are released, the run continues."""

import copy
import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.events import Dismiss, EndRun, MessageReceived, WorkerConnected
from flowrt.errors import RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import Part, Values
from tests.effort import examples
from tests.simulation.cluster import make_core
from tests.simulation.core_driver import SHARED, CoreDriver
from tests.simulation.message_fuzzer import NAMES, MessageFuzzer
from tests.simulation.scenario import MODEL, Scenario, offer_one, whole


def granted_driver(**scenario: Any) -> tuple[CoreDriver, m.Grant]:
    driver = CoreDriver(**scenario)
    driver.offer()
    grant = driver.pull("rollout0", "rollout")
    assert grant is not None
    return driver, grant


def changed(commit: m.Commit, **fields: Any) -> m.Commit:
    return m.Commit(**{name: getattr(commit, name) for name in m.Commit.__struct_fields__} | fields)


INVALID_COMMITS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown stage": ({"stage": "sing"}, "stage 'sing', which is not in this dataflow"),
    "missing column": ({"parts": (Part("response", (0,), (3,)),)}, "the stage makes"),
    "wrong length": ({"leases": ()}, "rows for 1 slots"),
    "negative length": ({"parts": tuple(Part(c, (0,), (-3,)) for c in ("response", "logprobs"))}, "negative length"),
    "version of the future": ({"spans": ((5, 3),)}, "pairs of a published version"),
}


@pytest.mark.parametrize("kind", INVALID_COMMITS)
def test_an_invalid_commit_dismisses_its_worker_and_the_sample_is_granted_again(kind: str) -> None:
    fields, expected = INVALID_COMMITS[kind]
    driver, grant = granted_driver()
    reason, commands = driver.dismissed("rollout0", changed(driver.generated(grant), **fields))
    assert reason.startswith("protocol violation: ")
    assert "rollout0" in reason
    assert expected in reason
    assert not [command for command in commands if isinstance(command, EndRun)]
    again = driver.pull("rollout1", "rollout")
    assert again is not None
    assert again.slots == grant.slots
    ((_, answer),) = driver.sent(driver.send("rollout1", driver.generated(again)), m.Committed)
    assert answer.refused == ()


def test_a_protocol_violation_of_a_critical_worker_ends_the_run() -> None:
    driver = CoreDriver()
    driver.configure(critical_roles=("trainer",))
    _, commands = driver.dismissed("trainer0", m.StepCompleted(7, ()))
    (end,) = [command for command in commands if isinstance(command, EndRun)]
    assert end.code == 1
    assert end.reason.startswith("trainer0: protocol violation: trainer0 ended step 7")


@pytest.mark.parametrize("divergence", [math.nan, math.inf, -1.0])
def test_a_publication_with_an_invalid_divergence_ends_the_run_of_a_critical_trainer(divergence: float) -> None:
    driver = CoreDriver()
    driver.configure(critical_roles=("trainer",))
    reason, _ = driver.dismissed("trainer0", m.Publish((whole(1),), ((0, divergence),)))
    assert "a divergence that is no number of at least 0" in reason
    assert driver.core.state.models.policy.newest == 0
    assert driver.core.ended is not None
    assert (driver.core.ended.code, driver.core.ended.reason.partition(":")[0]) == (1, "trainer0")


def test_violations_after_the_end_of_the_run_change_nothing() -> None:
    driver = CoreDriver()
    driver.core.state.end("the run is complete", 0)
    before = driver.snapshot()
    assert driver.core.handle(MessageReceived(WorkerId("rollout0"), m.OfferAccepted(1, 1)), 0.0) == []
    assert driver.snapshot() == before


def test_a_message_of_an_unknown_worker_dismisses_it_and_changes_nothing() -> None:
    driver = CoreDriver()
    before = driver.snapshot()
    (command,) = driver.core.handle(MessageReceived(WorkerId("stranger"), m.WeightsActivated(MODEL, 0)), 0.0)
    assert isinstance(command, Dismiss)
    assert "stranger" in command.reason
    assert driver.snapshot() == before


# ---- roles


FORBIDDEN_MESSAGES: dict[str, tuple[str, m.Message, str]] = {
    "stop": ("reward0", m.Stop("complete", 0), "only observer may"),
    "exhausted": ("reward0", m.EndOfData("train"), "only source may"),
    "publish": ("reward0", m.Publish((whole(10**9),), ()), "only trainer may"),
    "step done": ("source0", m.StepCompleted(0, ()), "only trainer may"),
    "saved": ("rollout0", m.CheckpointWritten(1, 0), "only trainer may"),
    "renew": (
        "rollout0",
        m.RenewLease(lease=0, stage="rollout", step=-1, slots=(0,), attempts=(0,)),
        "did not come back",
    ),
    "holds": ("rollout0", m.Inventory((), (whole(10**9),)), "did not come back"),
    "flow": ("source0", m.EndOfData("nowhere"), "no stage is for flow 'nowhere'"),
    "applied": ("rollout0", m.WeightsActivated(MODEL, 10**9), "0 is the newest"),
    "negative version": ("rollout0", m.WeightsActivated(MODEL, -1), "0 is the newest"),
}


@pytest.mark.parametrize("kind", FORBIDDEN_MESSAGES)
def test_a_message_forbidden_for_a_role_dismisses_only_its_sender(kind: str) -> None:
    worker, message, expected = FORBIDDEN_MESSAGES[kind]
    driver = CoreDriver()
    driver.configure(critical_roles=("trainer",))
    driver.assert_illegal(worker, message)
    reason, commands = driver.dismissed(worker, message)
    assert reason.startswith(f"protocol violation: {worker} ")
    assert expected in reason
    assert driver.core.ended is None
    assert not [command for command in commands if isinstance(command, EndRun)]


def test_a_forbidden_publication_does_not_affect_the_next_of_the_trainer() -> None:
    driver = CoreDriver()
    driver.configure(critical_roles=("trainer",))
    driver.dismissed("reward0", m.Publish((whole(10**9),), ()))
    driver.send("trainer0", m.Publish((whole(1),), ()))
    assert driver.core.state.models.policy.newest == 1
    assert driver.core.ended is None


def test_an_observer_may_cancel_the_run_but_not_with_exit_code_0() -> None:
    driver = CoreDriver()
    for name in ("observer-1", "observer-2"):
        driver.event(WorkerConnected(WorkerId(name), "observer", "host"))
    reason, _ = driver.dismissed("observer-1", m.Stop("complete", 0))
    assert "exit code 0" in reason
    assert driver.core.ended is None
    driver.send("observer-2", m.Stop("cancelled", 130))
    assert driver.core.ended == EndRun("cancelled", 130)


@pytest.mark.parametrize(
    ("worker", "request_", "expected"),
    [
        (
            "reward0",
            offer_one(request=5, members=1),
            "offers prompts.*only source may",
        ),
        ("reward0", m.Pull(request=5, stage="train", slots=0, tokens=0, step=0), "trains.*only trainer may"),
        (
            "source0",
            offer_one(request=5, members=1, flow="nowhere"),
            "no stage is for flow 'nowhere'",
        ),
    ],
)
def test_a_forbidden_request_is_rejected_and_changes_nothing(worker: str, request_: m.Message, expected: str) -> None:
    driver = CoreDriver()
    driver.ready_to_train()
    before = driver.snapshot()
    ((_, refused),) = driver.sent(driver.send(worker, request_), m.Rejected)
    assert re.search(expected, refused.reason)
    assert driver.snapshot() == before


def test_negative_prompt_numbers_are_rejected_and_large_ones_are_accepted() -> None:
    driver = CoreDriver()
    before = driver.snapshot()
    ((_, refused),) = driver.sent(driver.offer(prompt=-1), m.Rejected)
    assert "prompt -1 is not a number from 0 to 2^63 - 1" in refused.reason
    assert driver.snapshot() == before
    assert driver.sent(driver.send("source0", offer_of(2**62)), m.OfferAccepted)
    grant = driver.pull("rollout0", "rollout")
    assert grant is not None
    assert grant.prompts == (2**62,)


def offer_of(prompt: int) -> m.Offer:
    return offer_one(request=1, prompt=prompt, members=1)


def test_without_checkpointing_roles_only_a_worker_that_trains_may_end_a_step() -> None:
    core = make_core(Scenario(members=1, groups_per_step=1, references=0), checkpointing_roles=(), source_roles=())
    driver = CoreDriver.__new__(CoreDriver)
    driver.core, driver.now = core, 0.0
    for worker in ("one", "other"):
        driver.event(WorkerConnected(WorkerId(worker), "any", "host"))
    driver.pull("one", "train", 0)
    reason, _ = driver.dismissed("other", m.StepCompleted(0, ()))
    assert "has never pulled 'train'" in reason


# ---- leases


def test_use_of_a_foreign_or_unknown_lease_dismisses_the_worker() -> None:
    driver, grant = granted_driver()
    foreign = m.ReleaseLease(stage="rollout", slots=grant.slots, leases=(grant.lease,), lost=True, reason="")
    reason, _ = driver.dismissed("reward0", foreign)
    assert f"reward0 uses lease {grant.lease}, which is of rollout0" in reason
    reason, _ = driver.dismissed("rollout1", changed(driver.generated(grant), leases=(10**15,)))
    assert f"uses lease {10**15} for stage 'rollout', which was never given" in reason
    ((_, answer),) = driver.sent(driver.send("rollout0", driver.generated(grant)), m.Committed)
    assert answer.refused == ()


def test_use_of_a_lease_for_another_stage_dismisses_the_worker() -> None:
    driver, grant = granted_driver()
    commit = m.Commit(
        request=9,
        stage="reward",
        slots=grant.slots,
        leases=(grant.lease,),
        parts=(),
        inline=(Values("reward", (1.0,)),),
        spans=(),
    )
    reason, _ = driver.dismissed("rollout0", commit)
    assert f"uses lease {grant.lease} for stage 'reward', which is on stage 'rollout'" in reason


def test_a_pull_with_a_foreign_lease_dismisses_the_worker_and_changes_nothing() -> None:
    driver, grant = granted_driver()
    pull = m.Pull(request=9, stage="evaluate", slots=1, tokens=0, step=-1, done=(grant.lease,))
    driver.assert_illegal("evaluate0", pull)
    reason, _ = driver.dismissed("evaluate0", pull)
    assert "which is of rollout0" in reason


# ---- numbers


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf"), 1e308])
def test_a_reward_that_is_not_finite_or_too_large_dismisses_the_worker(reward: float) -> None:
    driver, generated = granted_driver()
    driver.send("rollout0", driver.generated(generated))
    grant = driver.pull("reward0", "reward")
    assert grant is not None
    commit = m.Commit(
        request=3,
        stage="reward",
        slots=grant.slots,
        leases=(grant.lease,),
        parts=(),
        inline=(Values("reward", (reward,)),),
        spans=(),
    )
    reason, _ = driver.dismissed("reward0", commit)
    assert f"by reward0: column 'reward' has {reward} at row 0; a number must be finite and at most 3e38" in reason
    driver.event(WorkerConnected(WorkerId("reward1"), "reward", "host"))
    assert driver.pull("reward1", "reward") is not None


def test_a_version_span_with_negative_tokens_dismisses_the_worker() -> None:
    driver, grant = granted_driver()
    reason, _ = driver.dismissed("rollout0", changed(driver.generated(grant), spans=((0, -3),)))
    assert "pairs of a published version" in reason


@given(st.integers(0, 2**32))
@settings(max_examples=examples(150), deadline=None)
def test_an_illegal_message_has_the_same_effect_as_a_crash_of_its_sender(seed: int) -> None:
    fuzzer, driver = MessageFuzzer(seed), CoreDriver(members=2, groups_per_step=2)
    driver.offer()
    for _ in range(12):
        sender, message = fuzzer.random.choice(NAMES[:6]), fuzzer.message()
        if isinstance(message, m.Offer) or sender not in driver.core.state.membership:
            continue
        try:
            copy.deepcopy(driver.core, dict(SHARED)).transition(MessageReceived(WorkerId(sender), message), driver.now)
        except RemoteProtocolError:
            driver.dismissed(sender, message)
        else:
            driver.send(sender, message)
        if driver.core.ended is not None:
            return
