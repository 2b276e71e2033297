"""Known deadlocks of asynchronous RL systems, each tested against the core of the controller."""

from flowrt.controller.events import EndRun, Tick, WorkerDisconnected
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import MODEL, leases_of, offer_one, whole


def after_stall(driver: CoreDriver, no_progress_timeout_s: float = 10.0) -> EndRun:
    """The end of a run in which nothing more happens."""
    driver.configure(no_progress_timeout_s=no_progress_timeout_s)
    driver.now += no_progress_timeout_s + 1.0
    [end] = [command for command in driver.event(Tick()) if isinstance(command, EndRun)]
    return end


def test_a_skipped_version_blocks_no_worker() -> None:
    """A request for version 2 is satisfied by version 3: requests demand at least a version, never exactly one."""
    driver = CoreDriver(bound=0, steps=5)
    driver.offer(at_least=2)
    driver.send("rollout0", m.Pull(request=7, stage="rollout", slots=1, tokens=0, step=-1))
    driver.send("trainer0", m.Publish((whole(3),), ()))  # 1 and 2 never existed
    driver.send("rollout0", m.WeightsStaged(MODEL, 3))
    granted = driver.sent(driver.send("rollout0", m.WeightsActivated(MODEL, 3)), m.Grant)
    assert [worker for worker, _ in granted] == ["rollout0"]


def test_an_evaluation_of_a_version_never_published_names_the_trainer() -> None:
    """At the last step the evaluation waits for weights that are never published: the reason names the trainer."""
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


def test_a_source_that_waits_for_capacity_blocks_no_worker() -> None:
    """A waiting source holds no lock: samples are pulled, scored and trained meanwhile."""
    driver = CoreDriver(bound=0)
    driver.offer(prompt=0)
    driver.offer(prompt=1)
    assert [edge.who for edge in driver.core.wait_graph(driver.now).waits] == ["source0"]
    grant = driver.pull("rollout0", "rollout")
    assert grant is not None
    driver.send("rollout0", driver.generated(grant))
    driver.score()
    assert driver.pull("trainer0", "train", step=0) is not None
    # The end of the step frees capacity and opens the next prompt at once.
    opened = driver.sent(driver.send("trainer0", m.StepCompleted(0, ())), m.OfferAccepted)
    assert [answer.request for _, answer in opened] == [1]


def test_a_slow_sample_does_not_prevent_new_samples_from_starting() -> None:
    """A sample that never ends is no barrier: a worker that has finished another one gets a new one."""
    driver = CoreDriver(bound=1, members=2)
    driver.send(
        "source0",
        offer_one(request=0, members=2),
    )
    tail = driver.pull("rollout0", "rollout")
    fast = driver.pull("rollout1", "rollout")
    assert tail is not None
    assert fast is not None
    driver.send("rollout1", driver.generated(fast))
    driver.send(
        "source0",
        offer_one(request=1, prompt=1, members=2),
    )
    assert driver.sent(driver.send("rollout1", m.Pull(request=8, stage="rollout", slots=1, tokens=0, step=-1)), m.Grant)


def test_a_cancelled_pull_blocks_no_worker() -> None:
    """A cancelled request is withdrawn, and a grant that crosses the cancellation is released."""
    driver = CoreDriver()
    driver.send("rollout0", m.Pull(request=5, stage="rollout", slots=1, tokens=0, step=-1))
    [(_, refusal)] = driver.sent(driver.send("rollout0", m.CancelRequest(5)), m.Rejected)
    assert "slots ready for rollout" in refusal.reason
    driver.offer()
    grant = driver.pull("rollout1", "rollout")
    assert grant is not None
    # A released grant is served to the worker that waits.
    driver.send("rollout0", m.Pull(request=6, stage="rollout", slots=1, tokens=0, step=-1))
    again = driver.sent(
        driver.send(
            "rollout1",
            m.ReleaseLease(stage="rollout", slots=grant.slots, leases=leases_of(grant), lost=False, reason=""),
        ),
        m.Grant,
    )
    assert [worker for worker, _ in again] == ["rollout0"]


def test_a_trainer_finishes_after_all_other_workers_have_left() -> None:
    """The source finishes and the others leave early: the end of a run needs no handshake with them."""
    driver = CoreDriver(steps=1)
    driver.ready_to_train()
    assert driver.pull("trainer0", "train", step=0) is not None
    driver.send("source0", m.RoleCompleted())
    for worker in ("rollout0", "rollout1", "reward0", "evaluate0"):
        driver.event(WorkerDisconnected(WorkerId(worker), ""))
    driver.send("trainer0", m.StepCompleted(0, ()))
    driver.send("trainer0", m.Publish((whole(1),), ()))
    [end] = [command for command in driver.send("trainer0", m.RoleCompleted()) if isinstance(command, EndRun)]
    assert (end.reason, end.code) == ("the run is complete", 0)


def test_a_trainer_that_waits_on_an_empty_buffer_ends_the_run() -> None:
    """No worker can fill the buffer: the run ends, and the reason states it."""
    driver = CoreDriver()
    assert driver.pull("trainer0", "train", step=0) is None
    end = after_stall(driver)
    assert end.code == 3
    assert "trainer0 waits 11.0 s for a full micro-batch of step 0: 0 of 1 groups complete" in end.reason
    assert "no worker can satisfy this" in end.reason


def test_repeated_failed_transfers_are_no_progress() -> None:
    """A worker that takes work and always returns it does not keep a stalled run alive."""
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


def test_a_failed_weight_sync_leaves_the_worker_on_the_old_version() -> None:
    """A failed transfer of weights pauses no worker: the old version stays in use, and the fetch is repeated."""
    driver = CoreDriver(bound=1, steps=5)
    driver.offer()
    fetches = driver.sent(driver.send("trainer0", m.Publish((whole(1),), ())), m.ReceiveWeights)
    fetch = dict(fetches)["rollout0"]
    again = driver.sent(
        driver.send("rollout0", m.FetchFailed(fetch.turn, fetch.weights, "the lane broke")), m.ReceiveWeights
    )
    assert [worker for worker, _ in again] == ["rollout0"]
    assert driver.pull("rollout0", "rollout") is not None
