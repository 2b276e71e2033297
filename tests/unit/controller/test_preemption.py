"""Preemption of a run: messages to the workers, the last step of the trainers, and the save timeout."""

import pytest

from flowrt.controller.events import Command, EndRun, PreemptRun, Tick, WorkerConnected, WorkerDisconnected
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from tests.simulation.core_driver import CoreDriver

SAVE_TIMEOUT_S = 60.0
STEP = m.StepCompleted(0, ())


def preempt(driver: CoreDriver, kept: int = 0) -> list[Command]:
    return driver.event(PreemptRun("interrupted (SIGTERM)", 130, kept))


def end_commands(commands: list[Command]) -> list[EndRun]:
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


def sent_types(driver: CoreDriver, commands: list[Command]) -> list[type[m.Message]]:
    return [type(message) for _, message in driver.sent(commands, m.MESSAGES)]  # type: ignore[arg-type]


def test_a_preempted_trainer_gets_no_step_and_the_run_ends_after_its_save(trained: CoreDriver) -> None:
    trained.send("trainer0", m.Pull(request=7, stage="train", slots=1, tokens=0, step=1))
    commands = preempt(trained)
    # Drain comes first: without it the rejected pull would be an error of the trainer.
    assert sent_types(trained, commands) == [m.Drain, m.Rejected]
    assert end_commands(commands) == []
    trained.send("trainer0", m.CheckpointWritten(8, 1))
    assert end_commands(trained.event(Tick())) == []
    assert end_commands(trained.send("trainer0", m.RoleCompleted())) == [
        EndRun("interrupted (SIGTERM); saved after 1 steps", 130)
    ]


def test_a_step_that_is_granted_already_is_finished_before_the_run_ends() -> None:
    driver = CoreDriver()
    driver.ready_to_train()
    assert driver.pull("trainer0", "train", 0) is not None
    assert sent_types(driver, preempt(driver)) == [m.Drain]
    # All groups of the step are granted: a pull of the same step returns closed, as without preemption.
    closed = driver.sent(driver.send("trainer0", m.Pull(request=3, stage="train", slots=1, tokens=0, step=0)), m.Grant)
    assert [grant.closed for _, grant in closed] == [True]
    driver.send("trainer0", STEP)
    assert sent_types(driver, driver.send("trainer0", m.Pull(request=4, stage="train", slots=1, tokens=0, step=1))) == [
        m.Rejected
    ]
    driver.send("trainer0", m.CheckpointWritten(5, 1))
    assert end_commands(driver.send("trainer0", m.RoleCompleted())) == [
        EndRun("interrupted (SIGTERM); saved after 1 steps", 130)
    ]


def test_the_run_ends_when_the_last_trainer_rank_has_completed(trained: CoreDriver) -> None:
    trained.event(WorkerConnected(WorkerId("trainer1"), "trainer", "host"))
    preempt(trained)
    assert end_commands(trained.send("trainer1", m.RoleCompleted())) == []
    assert len(end_commands(trained.send("trainer0", m.RoleCompleted()))) == 1


def test_preemption_does_not_stop_rollout_workers(trained: CoreDriver) -> None:
    preempt(trained)
    assert trained.pull("rollout1", "rollout") is not None


@pytest.mark.parametrize("kept", [1, 2])
def test_a_preempted_run_with_all_steps_saved_ends_at_once(trained: CoreDriver, kept: int) -> None:
    assert end_commands(preempt(trained, kept)) == [EndRun("interrupted (SIGTERM)", 130)]


def test_a_run_preempted_before_its_first_step_ends_at_once() -> None:
    driver = CoreDriver()
    assert end_commands(preempt(driver)) == [EndRun("interrupted (SIGTERM)", 130)]


def test_a_preempted_run_without_a_trainer_ends_at_once(trained: CoreDriver) -> None:
    trained.event(WorkerDisconnected(WorkerId("trainer0"), ""))
    assert end_commands(preempt(trained)) == [EndRun("interrupted (SIGTERM)", 130)]


def test_the_save_timeout_ends_the_run_and_names_the_trainer_without_a_save(trained: CoreDriver) -> None:
    preempt(trained)
    trained.now += SAVE_TIMEOUT_S - 1
    preempt(trained)  # a second preemption does not restart the timeout
    assert end_commands(trained.event(Tick())) == []
    trained.now += 1
    [end] = end_commands(trained.event(Tick()))
    assert end.code == 130
    assert end.reason == (
        "interrupted (SIGTERM), and what was trained since the last checkpoint is not saved: no progress of it for "
        "60 s (checkpoint.preemption_save_timeout_s): trainer0 has not saved"
    )


def test_a_checkpoint_that_takes_long_is_waited_for_while_it_makes_progress(trained: CoreDriver) -> None:
    """140 GB at 100 MB/s take 23 minutes."""
    preempt(trained)
    for _ in range(23):
        trained.now += SAVE_TIMEOUT_S - 1
        trained.send("trainer0", m.Heartbeat(advances=True))
        assert end_commands(trained.event(Tick())) == []
    trained.now += SAVE_TIMEOUT_S
    assert len(end_commands(trained.send("trainer0", m.Heartbeat()))) == 1, "the save hangs"


def test_a_stop_during_preemption_is_part_of_the_reason(trained: CoreDriver) -> None:
    preempt(trained)
    trained.event(WorkerConnected(WorkerId("observer0"), "observer", "host"))
    [end] = end_commands(trained.send("observer0", m.Stop("trainer was killed by SIGKILL", 1)))
    assert end.code == 130
    assert end.reason.endswith("is not saved: trainer was killed by SIGKILL")


def test_a_drained_trainer_saves_and_then_the_run_ends(trained: CoreDriver) -> None:
    assert sent_types(trained, trained.send("trainer0", m.Drain(0, "trainer0"))) == [m.Drain]
    assert end_commands(trained.send("trainer0", m.RoleCompleted())) == [
        EndRun("trainer0 was terminated (SIGTERM); saved after 1 steps", 1)
    ]


def test_preemption_after_a_drain_of_the_trainer_sets_the_exit_reason(trained: CoreDriver) -> None:
    trained.send("trainer0", m.Drain(0, "trainer0"))
    assert sent_types(trained, preempt(trained)) == []  # the trainer has its Drain already
    trained.send("trainer0", m.Drain(0, "trainer0"))
    assert end_commands(trained.send("trainer0", m.RoleCompleted())) == [
        EndRun("interrupted (SIGTERM); saved after 1 steps", 130)
    ]
