"""Guards in the controller: what is logged and recorded, when a run is held, and how it is stopped."""

import msgspec
import pytest

from flowrt.controller.diagnostics.status import status
from flowrt.controller.events import AppendRestartLog, Command, EndRun, LogEvent, StepClosed, Tick
from flowrt.controller.policies.guards import GuardRule
from flowrt.controller.state.controller_restart import HELD_UNTIL, CounterSet
from flowrt.errors import EXIT_GUARD, ConfigError
from flowrt.protocol import messages as m
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import MODEL, whole


def guarded_driver(*rules: GuardRule, steps: int = 200, bound: int = 1) -> CoreDriver:
    return CoreDriver(guards=rules, steps=steps, bound=bound)


def train(driver: CoreDriver, step: int, **metrics: float) -> list[Command]:
    """One step of one group, with the newest weights and these metrics."""
    if step:
        driver.send("trainer0", m.Publish((whole(step),), ()))
        driver.send("rollout0", m.WeightsStaged(MODEL, step))
        driver.send("rollout0", m.WeightsActivated(MODEL, step))
    driver.offer(prompt=step)
    grant = driver.pull("rollout0", "rollout")
    assert grant is not None
    commit = msgspec.structs.replace(driver.generated(grant), spans=((step, 3),))
    driver.send("rollout0", commit)
    driver.score()
    assert driver.pull("trainer0", "train", step) is not None
    return driver.send("trainer0", m.StepCompleted(step, tuple(metrics.items())))


def closed(commands: list[Command]) -> StepClosed:
    return next(command for command in commands if isinstance(command, StepClosed))


def logged(commands: list[Command]) -> list[str]:
    return [command.text for command in commands if isinstance(command, LogEvent) and command.kind == "guard"]


def test_a_rule_warns_once_in_fifty_steps() -> None:
    driver = guarded_driver(GuardRule("loss", above=1.0, steps=2))
    by_step = [train(driver, step, loss=2.0) for step in range(104)]
    assert [step for step, commands in enumerate(by_step) if logged(commands)] == [1, 51, 101]
    assert logged(by_step[1]) == [
        "guard loss above 1 for 2 steps (warn): loss is 2, outside its limit for 2 consecutive steps"
    ]
    assert [closed(commands).fired for commands in by_step[:3]] == [(), (("loss", 2),), (("loss", 3),)]


def test_a_limit_is_relative_to_the_median_of_previous_steps() -> None:
    driver = guarded_driver(GuardRule("grad_norm", above=3.0, median_of=4))
    norms = [1.0, 100.0, 2.0, float("nan"), 2.0, 6.0, 6.1, 7.0]
    by_step = [train(driver, step, grad_norm=norm) for step, norm in enumerate(norms)]
    # The median of 1, 100, 2 and 2 is 2, so 6 is inside the limit; of 100, 2, 2 and 6 it is 4, and of 2, 2, 6, 6.1 too.
    assert [step for step, commands in enumerate(by_step) if closed(commands).fired] == [3]
    last = train(driver, len(norms), grad_norm=19.7)
    assert closed(last).fired == (("grad_norm", 1),)
    text = "guard grad_norm above 3 times the median of 4 steps for 1 step (warn): grad_norm is 19.7"
    assert driver.core.state.guards.firing == [f"{text}, outside its limit of 18.15 for 1 step"]
    assert train(driver, len(norms) + 1, grad_norm=1.0)
    assert driver.core.state.guards.firing == []


@pytest.mark.parametrize("norm", [0.0, -1.0])
def test_a_median_that_is_not_positive_sets_no_limit(norm: float) -> None:
    driver = guarded_driver(GuardRule("grad_norm", above=3.0, median_of=2))
    by_step = [train(driver, step, grad_norm=value) for step, value in enumerate([norm, norm, 5.0, 5.0, 5.0, 16.0])]
    assert [step for step, commands in enumerate(by_step) if closed(commands).fired] == [5]


def test_the_status_lists_firing_guards_and_the_log() -> None:
    driver = guarded_driver(GuardRule("loss", above=1.0))
    for step, loss in enumerate([0.0, 2.0, 2.0]):
        train(driver, step, loss=loss)
    guards_status = status(driver.core, 0.0, 60.0, {}, {}, {})["guards"]
    text = "guard loss above 1 for 1 step (warn): loss is 2, outside its limit for"
    assert guards_status == {"firing": [f"{text} 2 consecutive steps"], "log": [[1, f"{text} 1 step"]]}


def test_a_hold_is_recorded_and_ends_after_its_steps() -> None:
    driver = guarded_driver(GuardRule("loss", above=1.0, action="hold", hold_steps=2))
    assert driver.core.state.admission(driver.core.env).may_train(5, 4)
    commands = train(driver, 0, loss=2.0)
    assert AppendRestartLog(CounterSet(HELD_UNTIL, 3)) in commands
    assert "the staleness bound is 0 for 2 steps" in logged(commands)[0]
    held = driver.core.state.admission(driver.core.env)
    assert (held.may_train(1, 0), held.may_train(2, 1), held.may_train(3, 2)) == (False, False, True)
    assert (held.may_start(2, 1), held.may_start(3, 2), held.may_open(1, 1)) == (False, True, False)
    train(driver, 1, loss=0.0)
    train(driver, 2, loss=0.0)
    assert driver.core.state.admission(driver.core.env) is driver.core.env.policies.admission


def test_a_hold_drops_finished_samples_of_older_weights() -> None:
    driver = guarded_driver(GuardRule("loss", above=1.0, action="hold"))
    driver.ready_to_train()
    assert driver.pull("trainer0", "train", 0) is not None
    driver.offer(prompt=1)
    grant = driver.pull("rollout0", "rollout")
    assert grant is not None
    driver.send("rollout0", driver.generated(grant))
    driver.send("trainer0", m.StepCompleted(0, (("loss", 2.0),)))
    assert dict(driver.core.state.dropped) == {"over-age": 1}


@pytest.mark.parametrize("value", [2.0, float("nan"), float("inf")])
def test_a_stop_ends_the_run_after_a_checkpoint(value: float) -> None:
    driver = guarded_driver(GuardRule("loss", above=1.0, action="stop"))
    commands = train(driver, 0, loss=value)
    assert [command for command in commands if isinstance(command, EndRun)] == []
    assert driver.sent(commands, m.Drain) == [("trainer0", m.Drain(0, "trainer0"))]
    driver.send("trainer0", m.CheckpointWritten(9, 1))
    [end] = [command for command in driver.send("trainer0", m.RoleCompleted()) if isinstance(command, EndRun)]
    assert end == EndRun(
        f"guard loss above 1 for 1 step (stop): loss is {value:g}, outside its limit for 1 step; saved after 1 steps",
        EXIT_GUARD,
    )


def test_a_stop_without_a_checkpoint_ends_the_run_after_a_timeout() -> None:
    driver = guarded_driver(GuardRule("loss", above=1.0, action="stop"))
    train(driver, 0, loss=2.0)
    driver.now = 1000.0
    [end] = [command for command in driver.event(Tick()) if isinstance(command, EndRun)]
    assert end.code == EXIT_GUARD
    assert "trainer0 has not saved" in end.reason


def test_a_stop_in_the_last_step_lets_the_run_complete() -> None:
    driver = guarded_driver(GuardRule("loss", above=1.0, action="stop"), steps=1)
    commands = train(driver, 0, loss=2.0)
    assert logged(commands)
    assert driver.sent(commands, m.Drain) == []
    driver.send("trainer0", m.RoleCompleted())
    [end] = [command for command in driver.send("source0", m.RoleCompleted()) if isinstance(command, EndRun)]
    assert end.code == 0


@pytest.mark.parametrize(("above", "below"), [(None, None), (1.0, 0.0)])
def test_a_rule_without_exactly_one_limit_raises_a_config_error(above: float | None, below: float | None) -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        GuardRule("loss", above=above, below=below)
