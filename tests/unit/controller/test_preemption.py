"""A run that is told to end: who is told what, after which step the trainers leave, and when it gives up."""

import pytest

from flowrt.controller.events import Command, EndRun, PreemptRun, Tick, WorkerConnected, WorkerDisconnected
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from tests.simulation.core_driver import CoreDriver

PATIENCE_S = 60.0
STEP = m.StepCompleted(0, ())


def suspend(driver: CoreDriver, kept: int = 0) -> list[Command]:
    return driver.event(PreemptRun("interrupted (SIGTERM)", 130, kept))


def ends(commands: list[Command]) -> list[EndRun]:
    return [command for command in commands if isinstance(command, EndRun)]


@pytest.fixture
def trained() -> CoreDriver:
    """One step is done, and the group of the next is ready."""
    driver = CoreDriver(bound=1)
    driver.ready_to_train()
    assert driver.pull("trainer0", "train", 0) is not None
    driver.send("trainer0", STEP)
    driver.offer(prompt=1)
    return driver


def heard(driver: CoreDriver, commands: list[Command]) -> list[type[m.Message]]:
    return [type(message) for _, message in driver.sent(commands, m.MESSAGES)]  # type: ignore[arg-type]


def test_it_gets_no_further_step_saves_and_then_the_run_ends(trained: CoreDriver) -> None:
    trained.send("trainer0", m.Pull(request=7, stage="train", slots=1, tokens=0, step=1))
    told = suspend(trained)
    # First that it is to leave, then that what it waits for does not come: else that would be an error.
    assert heard(trained, told) == [m.Drain, m.Rejected]
    assert ends(told) == []
    trained.send("trainer0", m.CheckpointWritten(8, 1))
    assert ends(trained.event(Tick())) == []
    assert ends(trained.send("trainer0", m.RoleCompleted())) == [
        EndRun("interrupted (SIGTERM); saved after 1 steps", 130)
    ]


def test_a_step_at_whose_end_the_ranks_meet_is_finished() -> None:
    driver = CoreDriver()
    driver.ready_to_train()
    assert driver.pull("trainer0", "train", 0) is not None
    assert heard(driver, suspend(driver)) == [m.Drain]
    # It is handed out: whoever works on it learns that nothing is left of it, as always.
    closed = driver.sent(driver.send("trainer0", m.Pull(request=3, stage="train", slots=1, tokens=0, step=0)), m.Grant)
    assert [grant.closed for _, grant in closed] == [True]
    driver.send("trainer0", STEP)
    assert heard(driver, driver.send("trainer0", m.Pull(request=4, stage="train", slots=1, tokens=0, step=1))) == [
        m.Rejected
    ]
    driver.send("trainer0", m.CheckpointWritten(5, 1))
    assert ends(driver.send("trainer0", m.RoleCompleted())) == [
        EndRun("interrupted (SIGTERM); saved after 1 steps", 130)
    ]


def test_ranks_leave_together(trained: CoreDriver) -> None:
    trained.event(WorkerConnected(WorkerId("trainer1"), "trainer", "host"))
    suspend(trained)
    assert ends(trained.send("trainer1", m.RoleCompleted())) == []
    assert len(ends(trained.send("trainer0", m.RoleCompleted()))) == 1


def test_others_go_on(trained: CoreDriver) -> None:
    suspend(trained)
    assert trained.pull("rollout1", "rollout") is not None


@pytest.mark.parametrize("kept", [1, 2])
def test_where_all_is_saved_it_ends_at_once(trained: CoreDriver, kept: int) -> None:
    assert ends(suspend(trained, kept)) == [EndRun("interrupted (SIGTERM)", 130)]


def test_before_the_first_step_it_ends_at_once() -> None:
    driver = CoreDriver()
    assert ends(suspend(driver)) == [EndRun("interrupted (SIGTERM)", 130)]


def test_without_a_trainer_it_ends_at_once(trained: CoreDriver) -> None:
    trained.event(WorkerDisconnected(WorkerId("trainer0"), ""))
    assert ends(suspend(trained)) == [EndRun("interrupted (SIGTERM)", 130)]


def test_its_patience_ends_with_the_name_of_who_has_not_saved(trained: CoreDriver) -> None:
    suspend(trained)
    trained.now += PATIENCE_S - 1
    suspend(trained)  # to be told again changes nothing: its time goes on from the first
    assert ends(trained.event(Tick())) == []
    trained.now += 1
    [end] = ends(trained.event(Tick()))
    assert end.code == 130
    assert end.reason == (
        "interrupted (SIGTERM), and what was trained since the last checkpoint is not saved: no end of it within 60 s "
        "(checkpoint.preemption_save_timeout_s): trainer0 has not saved"
    )


def test_what_ends_it_meanwhile_is_told_too(trained: CoreDriver) -> None:
    suspend(trained)
    trained.event(WorkerConnected(WorkerId("observer0"), "observer", "host"))
    [end] = ends(trained.send("observer0", m.Stop("trainer was killed by SIGKILL", 1)))
    assert end.code == 130
    assert end.reason.endswith("is not saved: trainer was killed by SIGKILL")


def test_a_trainer_that_has_to_go_takes_the_run_along_after_saving(trained: CoreDriver) -> None:
    assert heard(trained, trained.send("trainer0", m.Drain(0, "trainer0"))) == [m.Drain]
    assert ends(trained.send("trainer0", m.RoleCompleted())) == [
        EndRun("trainer0 was terminated (SIGTERM); saved after 1 steps", 1)
    ]


def test_a_run_that_has_to_go_with_its_trainer_says_that_it_was_told(trained: CoreDriver) -> None:
    trained.send("trainer0", m.Drain(0, "trainer0"))
    assert heard(trained, suspend(trained)) == []  # it knows
    trained.send("trainer0", m.Drain(0, "trainer0"))
    assert ends(trained.send("trainer0", m.RoleCompleted())) == [
        EndRun("interrupted (SIGTERM); saved after 1 steps", 130)
    ]
