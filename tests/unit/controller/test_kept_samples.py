"""Grants name the journals that may have tokens of their slots: after a resume, and after the loss of a worker."""

import msgspec
import pytest

from flowrt.controller.events import WorkerConnected, WorkerDisconnected
from flowrt.controller.settings import OnLostSample
from flowrt.controller.state.kept_samples import TOO_OLD, KeptSample
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import Position
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import MODEL, leases_of, offer_one, whole

OLD = "journals/1/rollout7/0.journal"


def kept(oldest: int, prompt: int = 0) -> KeptSample:
    return KeptSample(epoch=0, prompt=prompt, member=0, oldest=oldest, journal=OLD)


def resumed(step: int, *samples: KeptSample, bound: int = 1) -> CoreDriver:
    """A run that is resumed at this step, whose rollout workers generate with its version."""
    driver = CoreDriver(position=Position(step), kept=samples, bound=bound, steps=9, journals="journals/2")
    driver.send("trainer0", m.Publish((whole(step),), ()))
    for worker in ("rollout0", "rollout1"):
        driver.send(worker, m.WeightsStaged(MODEL, step))
        driver.send(worker, m.WeightsActivated(MODEL, step))
    return driver


def granted(driver: CoreDriver, worker: str) -> m.Grant:
    grant = driver.pull(worker, "rollout")
    assert grant is not None
    return grant


def lose(driver: CoreDriver, worker: str) -> None:
    driver.event(WorkerDisconnected(WorkerId(worker), "killed"))


def test_a_resumed_run_grants_what_journals_have_once() -> None:
    driver = resumed(3, kept(2))
    driver.offer(prompt=0)
    driver.offer(prompt=1)
    assert granted(driver, "rollout0").kept == (OLD,)
    assert granted(driver, "rollout1").kept == ()


def test_the_oldest_kept_version_counts_for_the_age_of_a_group() -> None:
    driver = resumed(3, kept(2))
    driver.offer(prompt=0)
    [group] = driver.core.state.table.groups.values()
    assert group.oldest_version() == 2
    assert driver.core.state.window.oldest_versions == {group.id: 2}
    grant = granted(driver, "rollout0")
    state = driver.core.state
    state.window.note_versions(state.table.aged())  # as at the pull of a trainer
    assert state.window.oldest_versions == {group.id: 2}
    driver.send("rollout0", msgspec.structs.replace(driver.generated(grant), spans=((3, 3),)))
    assert group.oldest_version() == 3  # its journal was damaged, and it was generated anew
    state.window.note_versions(state.table.aged())
    assert state.window.oldest_versions == {group.id: 3}


def test_a_prompt_that_is_offered_again_after_the_loss_of_its_source_keeps_its_samples() -> None:
    driver = resumed(3, kept(2), kept(3, prompt=1))
    driver.offer(prompt=0)
    driver.offer(prompt=1)
    lost = granted(driver, "rollout0")
    driver.send(
        "rollout0", m.ReleaseLease(stage="rollout", slots=lost.slots, leases=leases_of(lost), lost=True, reason="no")
    )
    lose(driver, "source0")
    assert not driver.core.state.table.groups
    driver.event(WorkerConnected(WorkerId("source1"), "source", "host"))
    for prompt in (0, 1):
        driver.send("source1", offer_one(request=7 + prompt, members=1, prompt=prompt))
    assert granted(driver, "rollout0").kept == ()  # the next attempt at a sample that was lost had begun
    assert granted(driver, "rollout1").kept == (OLD,)


def test_what_is_too_old_for_its_step_is_discarded_and_counted() -> None:
    driver = resumed(3, kept(2), kept(2, prompt=1), bound=1)
    driver.offer(prompt=0)
    driver.offer(prompt=1)  # is expected in step 4
    assert granted(driver, "rollout0").kept == (OLD,)
    assert granted(driver, "rollout1").kept == ()
    assert driver.core.state.kept.discarded == {TOO_OLD: 1}


def test_a_lost_sample_is_started_over_without_its_journal() -> None:
    driver = resumed(3, kept(2))
    driver.offer(prompt=0)
    grant = granted(driver, "rollout0")
    lost = m.ReleaseLease(stage="rollout", slots=grant.slots, leases=leases_of(grant), lost=True, reason="no")
    driver.send("rollout0", lost)
    again = granted(driver, "rollout0")
    assert (again.attempts, again.kept) == ((1,), ())


def test_a_sample_that_is_given_back_keeps_its_journal() -> None:
    driver = resumed(3, kept(2))
    driver.offer(prompt=0)
    grant = granted(driver, "rollout0")
    back = m.ReleaseLease(stage="rollout", slots=grant.slots, leases=leases_of(grant), lost=False, reason="no")
    driver.send("rollout0", back)
    assert granted(driver, "rollout1").kept == (OLD,)


def test_the_sequences_of_a_lost_worker_go_on_from_its_journal() -> None:
    driver = resumed(3, kept(2))
    driver.offer(prompt=0)
    driver.offer(prompt=1)
    granted(driver, "rollout0")
    lose(driver, "rollout0")
    assert granted(driver, "rollout1").kept == (f"journals/2/rollout0\n{OLD}",)
    first = next(iter(driver.core.state.table.groups.values()))
    assert first.oldest_version() == 2  # the lost worker had continued older tokens


@pytest.mark.parametrize("in_order", [False, True])
def test_without_intervals_only_a_worker_that_leaves_in_order_has_its_sequences(in_order: bool) -> None:
    driver = resumed(3)
    driver.configure(journals_unfinished=False)  # as with rollout.journal_s 0
    driver.offer(prompt=0)
    granted(driver, "rollout0")
    if in_order:
        driver.send("rollout0", m.Drain(0, "rollout0"))
        driver.send("rollout0", m.Leave(""))
    else:
        lose(driver, "rollout0")
    [group] = driver.core.state.table.groups.values()
    assert group.oldest_version() == (3 if in_order else None)  # it need not be trained before others
    assert granted(driver, "rollout1").kept == (("journals/2/rollout0",) if in_order else ())


def test_a_prefix_that_a_killed_worker_was_to_continue_stays_in_its_journal() -> None:
    driver = resumed(3, kept(2))
    driver.configure(journals_unfinished=False)
    driver.offer(prompt=0)
    granted(driver, "rollout0")
    lose(driver, "rollout0")
    assert granted(driver, "rollout1").kept == (OLD,)


@pytest.mark.parametrize("policy", OnLostSample)
def test_a_complete_sample_that_is_lost_with_its_worker_is_granted_with_its_journal(policy: OnLostSample) -> None:
    driver = CoreDriver(bound=1, steps=9, journals="journals/1", on_lost_sample=policy)
    driver.offer(prompt=0)
    driver.send("rollout0", driver.generated(granted(driver, "rollout0")))
    lose(driver, "rollout0")
    if policy is OnLostSample.REGENERATE:
        assert granted(driver, "rollout1").kept == ("journals/1/rollout0",)
    else:
        assert all(not group.kept for group in driver.core.state.table.groups.values())


def test_a_worker_that_is_lost_before_it_goes_on_leaves_what_it_was_to_continue_in_the_journals_of_others() -> None:
    driver = resumed(3)
    driver.offer(prompt=0)
    for worker in ("rollout0", "rollout1", "rollout2", "rollout3", "rollout4"):
        if worker not in driver.core.state.membership:
            driver.event(WorkerConnected(WorkerId(worker), "rollout", "host"))
            driver.send(worker, m.WeightsActivated(MODEL, 0))
            driver.send(worker, m.WeightsStaged(MODEL, 3))
            driver.send(worker, m.WeightsActivated(MODEL, 3))
        granted(driver, worker)
        lose(driver, worker)
    [group] = driver.core.state.table.groups.values()
    assert group.kept[0].journals == tuple(f"journals/2/rollout{number}" for number in (4, 3, 2, 1))


def test_without_journals_a_lost_worker_leaves_nothing() -> None:
    driver = CoreDriver(bound=1, steps=9)
    driver.offer(prompt=0)
    granted(driver, "rollout0")
    lose(driver, "rollout0")
    assert granted(driver, "rollout1").kept == ()
