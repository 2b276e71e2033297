"""Shapes in which asynchronous RL systems are known to hang, each against the core of the controller."""

from flowrt.controller.events import EndRun, Tick, WorkerDisconnected
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import MODEL, leases_of, offer_one, whole


def after_stall(driver: CoreDriver, no_progress_timeout_s: float = 10.0) -> EndRun:
    """How the run ends when nothing more happens."""
    driver.configure(no_progress_timeout_s=no_progress_timeout_s)
    driver.now += no_progress_timeout_s + 1.0
    [end] = [one for one in driver.event(Tick()) if isinstance(one, EndRun)]
    return end


def test_a_version_that_is_skipped_strands_nobody() -> None:
    """One side waits for version n, the other has gone on to n + 1: "at least" is asked for, never "exactly"."""
    driver = CoreDriver(bound=0, steps=5)
    driver.offer(at_least=2)
    driver.send("rollout0", m.Pull(request=7, stage="rollout", slots=1, tokens=0, step=-1))
    driver.send("trainer0", m.Publish((whole(3),), ()))  # 1 and 2 never existed
    driver.send("rollout0", m.WeightsStaged(MODEL, 3))
    granted = driver.sent(driver.send("rollout0", m.WeightsActivated(MODEL, 3)), m.Grant)
    assert [who for who, _ in granted] == ["rollout0"]


def test_an_evaluation_by_a_version_that_never_comes_names_the_trainer() -> None:
    """At the last step the evaluation waits for weights that nobody will publish: the run says whose they are."""
    driver = CoreDriver(steps=1)
    driver.ready_to_train()
    assert driver.pull("trainer0", "train", step=0) is not None
    driver.send("trainer0", m.StepCompleted(0, ()))
    driver.send("trainer0", m.RoleCompleted())  # and never publishes version 1
    driver.offer("eval", at_least=-1, prompt=9)
    assert driver.pull("rollout0", "rollout") is None
    end = after_stall(driver)
    assert end.code == 3
    assert (
        "rollout0 waits 11.0 s for newer weights: 1 slots ready for rollout, but version 0 would be too old"
        in end.reason
    )
    assert "blocked on trainer0" in end.reason


def test_waiting_for_capacity_keeps_nobody_from_anything() -> None:
    """A source that waits for room holds no lock: samples are pulled, scored and trained meanwhile."""
    driver = CoreDriver(bound=0)
    driver.offer(prompt=0)
    driver.offer(prompt=1)
    assert [edge.who for edge in driver.core.wait_graph(driver.now).waits] == ["source0"]
    grant = driver.pull("rollout0", "rollout")
    assert grant is not None
    driver.send("rollout0", driver.generated(grant))
    driver.score()
    assert driver.pull("trainer0", "train", step=0) is not None
    # And what makes room opens the next prompt at once.
    opened = driver.sent(driver.send("trainer0", m.StepCompleted(0, ())), m.OfferAccepted)
    assert [answer.request for _, answer in opened] == [1]


def test_a_long_tail_does_not_keep_new_samples_from_starting() -> None:
    """One sample that takes for ever is no barrier: whoever has finished others gets new ones."""
    driver = CoreDriver(bound=1, members=2)
    driver.send(
        "source0",
        offer_one(request=0, members=2),
    )
    tail = driver.pull("rollout0", "rollout")
    quick = driver.pull("rollout1", "rollout")
    assert tail is not None
    assert quick is not None
    driver.send("rollout1", driver.generated(quick))
    driver.send(
        "source0",
        offer_one(request=1, prompt=1, members=2),
    )
    assert driver.sent(driver.send("rollout1", m.Pull(request=8, stage="rollout", slots=1, tokens=0, step=-1)), m.Grant)


def test_a_pull_that_is_given_up_takes_nobody_along() -> None:
    """A cancelled request is withdrawn: neither it nor what it was granted on its way stays behind."""
    driver = CoreDriver()
    driver.send("rollout0", m.Pull(request=5, stage="rollout", slots=1, tokens=0, step=-1))
    [(_, refusal)] = driver.sent(driver.send("rollout0", m.CancelRequest(5)), m.Rejected)
    assert "slots ready for rollout" in refusal.reason
    driver.offer()
    grant = driver.pull("rollout1", "rollout")
    assert grant is not None
    # Its grant crossed the withdrawal of the other: given back, it is served to whoever waits.
    driver.send("rollout0", m.Pull(request=6, stage="rollout", slots=1, tokens=0, step=-1))
    again = driver.sent(
        driver.send(
            "rollout1",
            m.ReleaseLease(stage="rollout", slots=grant.slots, leases=leases_of(grant), lost=False, reason=""),
        ),
        m.Grant,
    )
    assert [who for who, _ in again] == ["rollout0"]


def test_a_trainer_whose_partners_are_gone_publishes_and_finishes() -> None:
    """Whoever orchestrates leaves early: there is no handshake in which the trainer could be stranded."""
    driver = CoreDriver(steps=1)
    driver.ready_to_train()
    assert driver.pull("trainer0", "train", step=0) is not None
    driver.send("source0", m.RoleCompleted())
    for worker in ("rollout0", "rollout1", "reward0", "evaluate0"):
        driver.event(WorkerDisconnected(WorkerId(worker), ""))
    driver.send("trainer0", m.StepCompleted(0, ()))
    driver.send("trainer0", m.Publish((whole(1),), ()))
    [end] = [one for one in driver.send("trainer0", m.RoleCompleted()) if isinstance(one, EndRun)]
    assert (end.reason, end.code) == ("the run is complete", 0)


def test_a_trainer_does_not_wait_on_an_empty_buffer_for_ever() -> None:
    """Whole days of devices that wait for a buffer which nobody fills: the run ends, and says that nobody does."""
    driver = CoreDriver()
    assert driver.pull("trainer0", "train", step=0) is None
    end = after_stall(driver)
    assert end.code == 3
    assert "trainer0 waits 11.0 s for a full micro-batch of step 0: 0 of 1 groups complete" in end.reason
    assert "no worker can satisfy this" in end.reason


def test_samples_that_fail_to_arrive_again_and_again_are_no_progress() -> None:
    """An engine that takes work and always gives it back keeps nothing alive in which nothing else happens."""
    driver = CoreDriver()
    driver.configure(no_progress_timeout_s=10.0)
    driver.offer()
    while driver.core.ended is None:
        grant = driver.pull("rollout0", "rollout")
        assert grant is not None
        driver.undelivered("rollout0", "rollout", grant)
        driver.now += 1.0
        driver.event(Tick())
        assert driver.now < 20.0
    assert driver.core.ended.code == 3


def test_a_sync_that_failed_leaves_the_engine_at_work_on_the_old_version() -> None:
    """A failed transfer of weights pauses nobody: the old version stays in use, and it is tried again."""
    driver = CoreDriver(bound=1, steps=5)
    driver.offer()
    fetches = driver.sent(driver.send("trainer0", m.Publish((whole(1),), ())), m.ReceiveWeights)
    order = dict(fetches)["rollout0"]
    again = driver.sent(
        driver.send("rollout0", m.FetchFailed(order.turn, order.weights, "the lane broke")), m.ReceiveWeights
    )
    assert [who for who, _ in again] == ["rollout0"]
    assert driver.pull("rollout0", "rollout") is not None
