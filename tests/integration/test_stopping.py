"""Interrupted, killed and failed runs: every process ends in time, with the right exit code and a reason."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flowrt.runtime.addresses import is_loopback
from tests.integration.conftest import Launch

Start = Callable[..., Launch]
WITHIN_S = 10.0
ENDLESS = [
    *("--steps", "100000", "--data.eval-prompts", "8", "--prompts-per-step", "4", "--group-size", "4"),
    *(
        "--rollout.workers",
        "1",
        "--algorithm.kl.coef",
        "0",
        "--supervisor.max-worker-restarts",
        "0",
        "--max-run-restarts",
        "0",
    ),
]
"""The fewest processes that a run can have, since each takes seconds to start. None is restarted."""


@pytest.fixture
def training(launch: Start, untrained_model: Path) -> Launch:
    """A run that has trained at least one step and would continue for hours."""
    run = launch("--model", str(untrained_model), *ENDLESS)
    run.wait_for_training()
    return run


def role(run: Launch, name: str) -> psutil.Process:
    """The one process of a role."""
    [process] = run.find(f"flowrt.{name}")
    return process


def assert_interrupted(run: Launch) -> None:
    assert run.wait(WITHIN_S) == 130, run.output
    run.assert_gone(WITHIN_S)
    assert "interrupted" in run.output
    assert "Traceback" not in run.output


def assert_failed(run: Launch, *reasons: str) -> None:
    assert run.wait(WITHIN_S) == 1, run.output
    run.assert_gone(WITHIN_S)
    for reason in reasons:
        assert reason in run.words
    assert "Traceback" not in run.output


# ---- interrupted


@pytest.mark.slow
def test_interrupt_during_sft_ends_the_run(launch: Start) -> None:
    run = launch(*ENDLESS, "--sft.steps", "100000", "--sft.stop-reward", "2")
    # Only the process that builds the model loads torch: it is at work by then.
    run.wait_for(lambda: [p for p in run.find("flowrt.launcher.build_model") if has_torch(p)], "preparation")
    run.signal(signal.SIGINT)
    assert_interrupted(run)


def has_torch(process: psutil.Process) -> bool:
    try:
        return "libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return False


@pytest.mark.slow
def test_no_process_is_started_after_an_interrupt(launch: Start) -> None:
    run = launch(*ENDLESS, "--sft.steps", "0", "--sft.answer-only-steps", "0")
    run.wait_for(lambda: run.find("flowrt.launcher.build_model"), "preparation")
    run.signal(signal.SIGINT)
    assert_interrupted(run)
    assert not (run.run_dir / "logs" / "controller.log").exists()


@pytest.mark.slow
@pytest.mark.parametrize("module", ["launcher.controller_main", "roles.source"])
def test_interrupt_during_startup_ends_the_run(launch: Start, untrained_model: Path, module: str) -> None:
    run = launch("--model", str(untrained_model), *ENDLESS)
    run.wait_for(lambda: run.find(f"flowrt.{module}"), module)
    run.signal(signal.SIGINT)
    assert_interrupted(run)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_interrupt_during_training_ends_the_run(training: Launch, number: signal.Signals) -> None:
    training.signal(number)
    assert_interrupted(training)
    # The run is closed in order: it has its summary, and no prompt is lost.
    assert "prompts lost, trained twice │ 0, 0" in training.words
    assert (training.run_dir / "summary.json").is_file()


# ---- killed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param("roles.rollout", "rollout-0", marks=pytest.mark.long),
        ("roles.trainer", "trainer"),
        pytest.param("roles.source", "source", marks=pytest.mark.long),
    ],
)
def test_killed_worker_ends_the_run_and_is_named(training: Launch, module: str, name: str) -> None:
    training.signal(signal.SIGKILL, role(training, module))
    assert_failed(training, f"{name} was killed by SIGKILL", f"{name}.log")


@pytest.mark.slow
def test_killed_controller_ends_the_run(training: Launch) -> None:
    training.signal(signal.SIGKILL, role(training, "launcher.controller_main"))
    assert_failed(training, "controller was killed by SIGKILL", "controller.log")


@pytest.mark.slow
def test_killed_launcher_ends_every_process_of_the_run(training: Launch) -> None:
    training.signal(signal.SIGKILL)
    assert training.wait(WITHIN_S) == -signal.SIGKILL
    training.assert_gone(WITHIN_S)


# ---- several trainer ranks: torchrun starts each in its own process session


@pytest.fixture
def training_on_two_ranks(launch: Start, untrained_model: Path) -> Launch:
    run = launch("--model", str(untrained_model), *ENDLESS, "--trainer.ranks", "2", "--controller.lanes", "gloo")
    run.wait_for_training()
    return run


def externally_reachable(process: psutil.Process) -> list[str]:
    """The addresses at which a process listens and other hosts may reach it."""
    listening = [
        connection.laddr.ip for connection in process.net_connections("tcp") if connection.status == psutil.CONN_LISTEN
    ]
    return [address for address in listening if not is_loopback(address)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)], ids=["SIGINT", "SIGKILL"]
)
def test_trainer_ranks_end_with_the_launcher(training_on_two_ranks: Launch, number: signal.Signals) -> None:
    run = training_on_two_ranks
    assert len(run.find("flowrt.ranks.torchrun")) == 1
    assert [address for process in run.processes() for address in externally_reachable(process)] == []
    run.signal(number)
    assert run.wait(WITHIN_S) == (130 if number == signal.SIGINT else -number)
    run.assert_gone(WITHIN_S)


@pytest.mark.long
@pytest.mark.slow
def test_starting_trainer_ranks_end_with_a_killed_launcher(launch: Start, untrained_model: Path) -> None:
    run = launch("--model", str(untrained_model), *ENDLESS, "--trainer.ranks", "2")
    run.wait_for(lambda: len(run.find("flowrt.roles.trainer")) == 2, "two ranks")
    run.signal(signal.SIGKILL)
    assert run.wait(WITHIN_S) == -signal.SIGKILL
    run.assert_gone(WITHIN_S)


# ---- failed


@pytest.fixture
def own_model(untrained_model: Path, tmp_path: Path) -> Path:
    """A copy that a test may modify."""
    return Path(shutil.copytree(untrained_model, tmp_path / "model"))


def assert_refused(run: Launch, *reasons: str) -> None:
    assert run.wait(60.0) == 2, run.output
    run.assert_gone(WITHIN_S)
    for reason in reasons:
        assert reason in run.words
    assert "Traceback" not in run.output


@pytest.mark.slow
def test_tokenizer_without_an_end_token_is_refused(launch: Start, own_model: Path) -> None:
    path = own_model / "tokenizer_config.json"
    text = path.read_text()
    assert '"eos_token"' in text
    path.write_text(text.replace('"eos_token"', '"no_token"'))
    run = launch("--model", str(own_model), *ENDLESS)
    assert_refused(run, "has no end-of-sequence token", "set eos_token")


@pytest.mark.slow
def test_truncated_weights_are_refused(launch: Start, own_model: Path) -> None:
    path = own_model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    run = launch("--model", str(own_model), *ENDLESS)
    assert_refused(run, "model.safetensors of 1,000 bytes are incomplete or damaged")
