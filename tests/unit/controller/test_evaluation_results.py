"""Results of evaluations reach the trainers, whenever they join."""

from flowrt.controller.events import LogEvent, WorkerConnected
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from tests.simulation.core_driver import CoreDriver

OLD, NEW, OTHER = m.Evaluated("set", 0, ()), m.Evaluated("set", 1, ()), m.Evaluated("other", 0, ())
NO_MORE = m.Evaluated("", 0, ())


def test_a_trainer_that_joins_later_gets_the_results_that_were_reported() -> None:
    """Without the last one it would wait for ever: a source that resumes a complete run may be the first to join."""
    driver = CoreDriver()
    driver.configure(checkpointing_roles=("trainer", "second"))
    driver.send("source0", OTHER)
    for message in (OLD, NO_MORE):
        assert driver.sent(driver.send("source0", message), m.Evaluated) == [("trainer0", message)]
    joined = WorkerConnected(worker=WorkerId("late"), role="second", host="here", lanes=("gloo",), term=0)
    assert driver.sent(driver.event(joined), m.Evaluated) == [("late", OTHER), ("late", OLD), ("late", NO_MORE)]
    other = WorkerConnected(worker=WorkerId("rollout9"), role="rollout", host="here", lanes=("gloo",), term=0)
    assert driver.sent(driver.event(other), m.Evaluated) == []


def test_results_that_no_trainer_can_need_are_dropped() -> None:
    driver = CoreDriver()
    results = driver.core.state.results
    results.add(OLD, 0)
    results.add(NEW, 1)
    results.add(NO_MORE, 2)
    assert list(results) == [NO_MORE]


def test_an_evaluation_without_results_is_an_event() -> None:
    driver = CoreDriver()
    commands = driver.send("source0", OLD)
    assert [(event.kind, event.fields) for event in commands if isinstance(event, LogEvent)] == [
        ("evaluation_skipped", (("version", 0), ("name", "set")))
    ]
    results = driver.send("source0", m.Evaluated("set", 0, (("avg@1", 0.5),)))
    assert not [event for event in results if isinstance(event, LogEvent)]
