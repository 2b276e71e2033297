"""The wait-for graph of the controller: the workers that block each wait, and deadlocks."""

import json
from collections.abc import Mapping
from io import StringIO

import pytest
from rich.console import Console

from flowrt.controller.diagnostics.status import status
from flowrt.controller.diagnostics.wait_graph import MAX_WAITS, Edge, WaitGraph, find_deadlocks
from flowrt.controller.events import EndRun, Tick, WorkerDisconnected
from flowrt.ids import WorkerId
from flowrt.launcher.views.status import draw
from flowrt.protocol import messages as m
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import MODEL, offer_one, whole

NONE_CUT_OFF: Mapping[str, float] = {}


def graph(driver: CoreDriver) -> WaitGraph:
    return driver.core.wait_graph(driver.now, request_timeout_s=600.0)


def wait_of(driver: CoreDriver, worker: str) -> Edge:
    [edge] = [edge for edge in graph(driver).waits if edge.who == worker]
    return edge


def test_a_reward_worker_is_blocked_on_the_generating_worker() -> None:
    driver = CoreDriver()
    driver.offer()
    assert driver.pull("rollout0", "rollout") is not None
    assert driver.pull("reward0", "reward") is None
    driver.now = 7.0
    edge = wait_of(driver, "reward0")
    assert (edge.what, edge.blocked_on, edge.age_s, edge.limit_s) == (
        "slots ready for reward",
        ("rollout0",),
        7.0,
        600.0,
    )
    states = {worker.worker: (worker.state, worker.holds) for worker in graph(driver).workers}
    assert states["rollout0"] == ("at work", "1 slots of rollout (a lease ends in 93 s)")
    assert states["reward0"][0] == "waiting"
    assert states["trainer0"][0] == "idle"


def test_a_trainer_is_blocked_on_the_worker_of_the_missing_stage() -> None:
    driver = CoreDriver()
    driver.offer()
    grant = driver.pull("rollout0", "rollout")
    assert grant is not None
    assert driver.pull("trainer0", "train", step=0) is None
    assert wait_of(driver, "trainer0").blocked_on == ("rollout0",)
    driver.send("rollout0", driver.generated(grant))
    # It is ready for reward, but no worker has pulled that stage.
    edge = wait_of(driver, "trainer0")
    assert edge.blocked_on == ()
    assert "no worker can satisfy this" in str(edge)
    assert "and no worker pulls what is ready for reward" in str(edge)
    assert driver.pull("reward0", "reward") is not None
    assert wait_of(driver, "trainer0").blocked_on == ("reward0",)


def test_an_offer_is_blocked_on_the_trainer_and_a_pull_on_the_source() -> None:
    driver = CoreDriver(bound=0)
    assert driver.pull("trainer0", "train", step=0) is None
    driver.offer(prompt=0)
    assert driver.pull("rollout0", "rollout") is not None
    driver.offer(prompt=1)
    assert driver.pull("rollout1", "rollout") is None
    assert wait_of(driver, "source0").blocked_on == ("trainer0",)
    assert wait_of(driver, "rollout1").blocked_on == ("source0",)
    # Every wait is blocked in the end on rollout0, which is at work.
    assert graph(driver).deadlocks == ()


def waiting_for_publication() -> CoreDriver:
    """Step 0 is trained, and its weights were never published: no worker may generate for step 1."""
    driver = CoreDriver(bound=0, steps=3)
    driver.ready_to_train()
    grant = driver.pull("trainer0", "train", step=0)
    assert grant is not None
    driver.send("trainer0", m.StepCompleted(0, ()))
    driver.offer(prompt=1)
    driver.send("rollout0", m.Pull(request=5, stage="rollout", slots=1, tokens=0, step=-1))
    return driver


def test_a_rollout_worker_that_may_not_start_waits_for_newer_weights() -> None:
    driver = waiting_for_publication()
    edge = wait_of(driver, "rollout0")
    assert edge.what.startswith("newer weights: 1 slots ready for rollout, but version 0")
    assert edge.blocked_on == ("trainer0",)
    # After the publication the worker waits for the transfer, then for its own activation.
    driver.send("trainer0", m.Publish((whole(1),), ()))
    driver.now = 3.0
    [fetch] = [edge for edge in graph(driver).waits if edge.what == f"version 1 of {MODEL}" and edge.who == "rollout0"]
    assert (fetch.blocked_on, fetch.age_s) == (("trainer0",), 3.0)
    driver.send("rollout0", m.WeightsStaged(MODEL, 1))
    assert wait_of(driver, "rollout0").blocked_on == ("rollout0",)


def test_a_cycle_of_trainer_and_rollout_worker_is_a_deadlock() -> None:
    """The trainer waits for samples, the rollout worker for weights; the status reports the deadlock."""
    driver = waiting_for_publication()
    assert graph(driver).deadlocks == ()  # the trainer may be about to publish
    driver.send("trainer0", m.Pull(request=6, stage="train", slots=1, tokens=0, step=1))
    assert graph(driver).deadlocks == (("rollout0", "trainer0"),)
    assert "deadlock: rollout0, trainer0" in graph(driver).sentences(10)
    assert "deadlock: rollout0, trainer0" in printed(driver)
    driver.send("trainer0", m.Publish((whole(1),), ()))
    assert graph(driver).deadlocks == ()
    assert "deadlock" not in printed(driver)


def printed(driver: CoreDriver, cut_off: Mapping[str, float] = NONE_CUT_OFF) -> str:
    """Output of ``flowrt status`` without colours, each run of white space reduced to one space."""
    console = Console(width=200, file=StringIO(), color_system=None)
    console.print(draw(json.loads(json.dumps(status(driver.core, driver.now, 600.0, {}, {}, cut_off)))))
    assert isinstance(console.file, StringIO)
    return " ".join(console.file.getvalue().replace("│", " ").split())


def test_a_wait_reported_by_a_worker_is_listed_with_its_deadline() -> None:
    driver = CoreDriver()
    driver.send("trainer0", m.Report((), (), (("a piece over lane rollout0>trainer0", "rollout0", 9.0, 10.0),)))
    assert not wait_of(driver, "trainer0").overdue
    assert "over its" not in printed(driver)
    driver.now = 2.0
    edge = wait_of(driver, "trainer0")
    assert (edge.blocked_on, edge.age_s, edge.overdue) == (("rollout0",), 11.0, True)
    overdue = "trainer0 waits 11 s for a piece over lane rollout0>trainer0, over its 10 s: blocked on rollout0"
    assert printed(driver).startswith(overdue)
    assert "trainer0 a piece over lane rollout0>trainer0 11.0 s 10 s rollout0" in printed(driver)
    driver.send("trainer0", m.Report((), (), ()))
    assert not [edge for edge in graph(driver).waits if edge.who == "trainer0"]
    driver.send("trainer0", m.Report((), (), (("x" * 9999, "y", float("nan"), 1.0), ("x" * 9999, "y", 1.0, 1.0)) * 99))
    assert len(str(graph(driver).as_json())) < 10_000


def test_a_worker_without_network_traffic_is_named_first() -> None:
    driver = CoreDriver()
    assert "nothing has come" not in printed(driver)
    output = printed(driver, {"rollout0": 6.4})
    assert output.startswith("no network traffic from rollout0 for 6 s: its link or its machine is down")


def test_no_wait_is_blocked_on_a_disconnected_source() -> None:
    driver = CoreDriver()
    assert driver.pull("rollout0", "rollout") is None
    driver.offer()
    assert driver.pull("rollout1", "rollout") is None
    assert wait_of(driver, "rollout1").blocked_on == ("source0",)
    driver.event(WorkerDisconnected(WorkerId("source0"), ""))
    assert wait_of(driver, "rollout1").blocked_on == ()


def test_the_reason_of_a_stall_lists_waits_and_leases() -> None:
    driver = CoreDriver()
    driver.configure(no_progress_timeout_s=10.0)
    driver.offer()
    assert driver.pull("rollout0", "rollout") is not None
    assert driver.pull("reward0", "reward") is None
    driver.now = 11.0
    [end] = driver.event(Tick())
    assert isinstance(end, EndRun)
    assert end.code == 3
    assert "no progress for 11 s" in end.reason
    assert "reward0 waits 11.0 s for slots ready for reward (blocked on rollout0)" in end.reason
    assert "rollout0 holds 1 slots of rollout" in end.reason


def test_the_status_is_bounded_and_lists_the_oldest_waits_first() -> None:
    driver = CoreDriver()
    for number in range(3 * MAX_WAITS):
        driver.now = float(number)
        driver.send("reward0", m.Pull(request=100 + number, stage="reward", slots=1, tokens=0, step=-1))
        driver.send(
            "source0",
            offer_one(request=500 + number, prompt=number, members=1),
        )
    reported = status(driver.core, driver.now, 600.0, {}, {}, {})
    assert len(reported["waits"]) == MAX_WAITS
    waits = reported["graph"]["waits"]
    assert len(waits) == MAX_WAITS
    ages = [wait["age_s"] for wait in waits]
    assert ages == sorted(ages, reverse=True)
    assert ages[0] == driver.now
    assert reported["graph"]["more"] > 3 * MAX_WAITS
    assert len(json.dumps(reported)) < 40_000


@pytest.mark.parametrize(
    ("blocked_on", "at_work", "deadlocks"),
    [
        ({"a": ["b"], "b": ["a"]}, [], (("a", "b"),)),
        ({"a": ["b"], "b": ["a"]}, ["b"], ()),
        ({"a": ["b", "c"], "b": ["a"]}, [], ()),  # c may act
        ({"a": ["b"], "b": ["c"], "c": ["b"], "d": ["e"], "e": ["d"]}, [], (("a", "b", "c"), ("d", "e"))),
        ({"a": ["a"]}, [], (("a",),)),
        ({"a": []}, [], ()),  # no worker can act: reported with the wait, not as a deadlock
    ],
)
def test_deadlocks_are_cycles_without_a_worker_that_can_act(
    blocked_on: dict[str, list[str]], at_work: list[str], deadlocks: tuple[tuple[str, ...], ...]
) -> None:
    edges = [
        Edge(who=who, what="it", blocked_on=tuple(blockers), age_s=0.0, limit_s=1.0, blocks=True)
        for who, blockers in blocked_on.items()
    ]
    assert find_deadlocks(edges, at_work) == deadlocks
