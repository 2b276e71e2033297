"""Causes and roots of waits in simulated runs with one planted bottleneck."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from flowrt.controller.attribution.causes import KINDS, Cause
from flowrt.controller.attribution.wait_log import PASS_GAP_S, Classifier, WaitLog
from flowrt.controller.events import MessageReceived, Tick, WorkerConnected
from flowrt.controller.policies.weight_sync import DelayedUpdate
from flowrt.controller.state.parked_requests import ParkedRequests
from flowrt.engines.simulated.workload import GenerationCost, Lengths, LogNormal, TrainCost
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.simulation.cluster import ClusterPlan
from tests.simulation.attributed import AttributedRun, attribute
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import offer_one, whole


def run(
    *,
    train_s: float = 0.5,
    transfer_s: float = 0.1,
    tail: float = 0.01,
    bound: int = 1,
) -> AttributedRun:
    """Four rollout workers that generate a step in about 2 s."""
    lengths = Lengths(LogNormal(100, tail, 4000), correlation=0.0, seed=3)
    return attribute(
        ClusterPlan(
            workers=4,
            rows=8,
            groups_per_step=8,
            members=4,
            steps=8,
            lengths=lengths,
            decode=GenerationCost(base_s=0.01),
            train=TrainCost(token_s=1e-6, optimizer_s=train_s),
            bound=bound,
            transfer_s=transfer_s,
        )
    )


@pytest.mark.parametrize(
    "changes", [{}, {"train_s": 6.0}, {"transfer_s": 5.0}, {"tail": 1.5}], ids=["even", "train", "link", "tail"]
)
def test_the_seconds_of_all_workers_add_up(changes: dict[str, float]) -> None:
    result = run(**changes)  # type: ignore[arg-type]
    total = sum(counts.total() for step in result.steps for counts in step.seconds.values())
    assert total == pytest.approx(result.workers * result.wall_s, rel=1e-6)
    assert all(kind in KINDS for step in result.steps for counts in step.seconds.values() for kind in counts)


def test_with_a_slow_trainer_rollout_workers_wait_at_the_gate() -> None:
    result = run(train_s=6.0)
    shares = result.shares("rollout")
    assert shares["gate"] > 0.5, shares
    assert result.first_root("rollout", "gate") == "trainer"
    assert result.shares("trainer")["busy"] > 0.8


def test_with_a_slow_link_rollout_workers_wait_for_weights() -> None:
    result = run(transfer_s=5.0, bound=0)
    shares = result.shares("rollout")
    assert shares["weights"] > 0.5, shares
    assert result.first_root("rollout", "weights").startswith(("trainer", "rollout"))


def test_the_root_of_a_wait_for_weights_is_the_holder_not_a_waiting_relay() -> None:
    driver = CoreDriver(weight_sync=DelayedUpdate(), bound=0, steps=9)
    for worker in ("rollout0", "rollout1"):
        assert driver.pull(worker, "rollout") is None
    driver.offer(at_least=1)
    driver.now = 1.0
    sending = driver.sent(driver.send("trainer0", m.Publish((whole(1),), ())), m.SendWeights)
    assert [worker for worker, _ in sending] == ["trainer0", "rollout0"], "rollout1 receives them through rollout0"
    driver.now = 2.0
    driver.event(Tick())
    roots = {str(wait.worker): (wait.cause, wait.root) for wait in driver.core.waits.open_waits(2.0)}
    assert roots["rollout0"] == roots["rollout1"] == (Cause.WEIGHTS, "trainer0")


def test_with_a_straggler_the_root_of_waits_is_its_rollout_worker() -> None:
    result = run(tail=1.5, bound=0, train_s=0.05)
    shares = result.shares("rollout")
    assert shares["gate"] > 0.3, shares
    assert result.first_root("rollout", "gate").startswith("rollout")
    assert result.first_root("trainer", "samples").startswith("rollout")


def test_at_most_3_percent_of_the_time_has_no_cause() -> None:
    for result in (run(train_s=6.0), run(transfer_s=5.0, bound=0), run(tail=1.5)):
        for role in ("rollout", "trainer"):
            assert result.shares(role).get("other", 0.0) <= 0.03, result.shares(role)


@pytest.mark.parametrize("version", [1, -1], ids=["numbered", "of_the_last_step"])
def test_an_evaluation_of_an_unpublished_version_waits_for_weights(version: int) -> None:
    driver = CoreDriver(steps=5)
    driver.ready_to_train()
    assert driver.pull("trainer0", "train", step=0) is not None
    driver.send("trainer0", m.StepCompleted(0, ()))
    offer = offer_one(request=9, members=1, prompt=7, flow="eval")
    driver.now = 1.0
    assert not driver.send("source0", msgspec.structs.replace(offer, at_least=version, at_most=version))
    driver.now = 2.0
    driver.event(Tick())
    (wait,) = [wait for wait in driver.core.waits.open_waits(2.0) if wait.worker == "source0"]
    assert wait.cause is Cause.WEIGHTS
    (edge,) = [wait for wait in driver.core.wait_graph(2.0, 600.0).waits if wait.who == "source0"]
    assert edge.blocked_on == ("trainer0",)


def test_passes_over_all_waits_are_as_far_apart_as_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, seconds, event_s = 100, 2.0, 0.001
    driver = CoreDriver(steps=9)
    for number in range(workers):
        worker = WorkerId(f"more{number}")
        driver.core.handle(WorkerConnected(worker, "rollout", "host"), 0.0)
        pull = m.Pull(request=1, stage="rollout", slots=1, tokens=0, step=-1)
        driver.core.handle(MessageReceived(worker, pull), 0.0)
    passes = []
    whole_pass = WaitLog._changed

    def count(log: WaitLog, find: Classifier, requests: ParkedRequests) -> list[WorkerId]:
        passes.append(driver.now)
        return whole_pass(log, find, requests)

    monkeypatch.setattr(WaitLog, "_changed", count)
    while driver.now < seconds:
        driver.now += event_s
        driver.core.waits.note_all(driver.now)
        driver.core.handle(Tick(), driver.now)
    assert len(driver.core.waits.open_waits(driver.now)) == workers
    assert 0.8 * seconds / (PASS_GAP_S * workers) <= len(passes) <= seconds / (PASS_GAP_S * workers) + 1


class CountingDict(dict[WorkerId, SimpleNamespace]):
    """Counts its look-ups."""

    count = 0

    def get(self, *key: Any) -> Any:
        self.count += 1
        return super().get(*key)


def test_the_sender_of_a_chain_of_relays_is_searched_once_for_all_its_receivers() -> None:
    length = 1000
    fetching = CountingDict({WorkerId(f"{at}"): SimpleNamespace(holder=WorkerId(f"{at - 1}")) for at in range(length)})
    weights = SimpleNamespace(fetching=fetching, receivers={}, latest=1)
    state: Any = SimpleNamespace(models=SimpleNamespace(policy=weights))
    find = Classifier(state, state)
    reasons = {find.of_version(worker) for worker in reversed(list(fetching))}
    assert reasons == {(Cause.WEIGHTS, "-1")}
    assert fetching.count <= 4 * length
