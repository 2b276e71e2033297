"""The status for observers: bounded in size, with alarms first, and the workers that an observer follows."""

import json
from typing import Any

import pytest

from flowrt.controller.diagnostics.status import MAX_BRIEF_BYTES, brief_text, followed, status
from flowrt.controller.diagnostics.wait_graph import MAX_WAITS, MAX_WORKERS
from flowrt.controller.events import WorkerConnected
from flowrt.ids import OBSERVER, WorkerId
from flowrt.protocol import messages as m
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import offer_one

WORKERS = 1000


def crowded_run(name: str = "more") -> CoreDriver:
    """A run with a thousand additional workers that wait."""
    driver = CoreDriver()
    driver.offer()
    for number in range(WORKERS):
        worker = f"{name}-{number}"
        driver.event(WorkerConnected(WorkerId(worker), "reward", "host"))
        driver.now += 0.001
        driver.send(worker, m.Pull(request=1, stage="reward", slots=1, tokens=0, step=-1))
    return driver


def brief(driver: CoreDriver, **cut_off: float) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        brief_text(status(driver.core, driver.now, 600.0, {}, {}, cut_off, brief=True))
    )
    return content


@pytest.mark.slow
def test_many_workers_are_counted_and_disconnected_ones_are_listed() -> None:
    driver = crowded_run()
    disconnected = f"more-{WORKERS - 1}"
    shown = brief(driver, **{disconnected: 9.5})
    assert len(json.dumps(shown)) <= MAX_BRIEF_BYTES
    assert len(shown["workers"]) <= MAX_WORKERS
    assert next(iter(shown["workers"])) == disconnected
    whole = status(driver.core, driver.now, 600.0, {}, {}, {})
    assert len(shown["workers"]) + shown["others"] == len(whole["workers"])
    assert shown["counts"]["states"]["reward"]["waiting"] == WORKERS
    assert sum(sum(of.values()) for of in shown["counts"]["states"].values()) == len(whole["workers"])
    assert len(shown["waits"]) <= MAX_WAITS
    assert shown["graph"]["more"] >= WORKERS - MAX_WAITS


@pytest.mark.slow
def test_long_worker_names_shorten_the_list() -> None:
    driver = crowded_run("é" * 150)
    shown = brief(driver)
    assert len(json.dumps(shown)) <= MAX_BRIEF_BYTES
    assert 0 < len(shown["workers"]) < MAX_WORKERS
    assert len(shown["workers"]) + shown["others"] == len(driver.core.state.membership.members())


def test_reasons_and_metric_names_of_workers_do_not_exceed_the_size_limit() -> None:
    driver = CoreDriver()
    for at in range(300):
        driver.core.state.dropped.count(f"{at} {'x' * 500}")
    numbers = {f"{at} {'y' * 490}": 1.0 for at in range(256)}
    text = brief_text(status(driver.core, driver.now, 600.0, {}, numbers, {}, brief=True))
    assert len(text) <= MAX_BRIEF_BYTES


def test_followed_workers_are_reported_as_present_and_drained() -> None:
    driver = crowded_run()
    names = [f"more-{WORKERS - 2}", "absent", "rollout0"]
    assert followed(driver.core, names) == {"present": [names[0], "rollout0"], "with_results": [], "drained": []}
    driver.event(WorkerConnected(WorkerId("watcher"), OBSERVER, "host"))
    driver.send("watcher", m.Drain(1, "rollout0"))
    assert followed(driver.core, names)["drained"] == ["rollout0"]


def test_the_oldest_waits_come_first_and_offers_count_as_waits() -> None:
    driver = CoreDriver()
    for number in range(3 * MAX_WAITS):
        driver.now = float(number)
        driver.send("reward0", m.Pull(request=100 + number, stage="reward", slots=1, tokens=0, step=-1))
        driver.send("source0", offer_one(request=500 + number, prompt=number, members=1))
    ages = [age_s for _, _, age_s in brief(driver)["waits"]]
    assert ages == sorted(ages, reverse=True)
    assert ages[0] == driver.now
