"""A controller dies, and before it restarts another process listens at its address."""

import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowrt.recipes.run_dir import checkpoint_steps

pytestmark = pytest.mark.slow
STEPS, PROMPTS = 12, 4
SMALL = [
    *("--steps", str(STEPS), "--prompts-per-step", str(PROMPTS), "--group-size", "4", "--data.eval-prompts", "0"),
    *("--rollout.workers", "1", "--algorithm.kl.coef", "0", "--checkpoint.every", "1", "--supervisor.backoff-s", "0.1"),
]


@contextmanager
def foreign_listener(address: str) -> Iterator[None]:
    """A listener at the address of the controller that answers every connection with HTTP."""
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(60.0)


def run_with_killed_controller(launch: Callable[..., Any], model: Path, *flags: str) -> tuple[Any, str]:
    """A run with a checkpoint whose controller has just been killed, and the address of the controller."""
    run = launch("--model", str(model), *SMALL, *flags)
    run.wait_for(lambda: checkpoint_steps(run.run_dir), "a checkpoint", 90.0)
    address = (run.run_dir / "address").read_text().strip()
    [controller] = run.find("flowrt.launcher.controller_main")
    run.signal(signal.SIGKILL, controller)
    controller.wait(60.0)  # until then it holds its port
    return run, address


def assert_exact(run: Any) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (STEPS, 0, 0)
    assert "Traceback" not in run.output
    return summary


@pytest.mark.long
def test_run_continues_once_the_port_of_the_controller_is_free(
    launch: Callable[..., Any], untrained_model: Path
) -> None:
    run, address = run_with_killed_controller(launch, untrained_model)
    with foreign_listener(address):
        run.wait_for(lambda: f"{address} is in use" in run.log("controller"), "report of the port in use")
        run.wait_for(lambda: "the controller" in run.log("trainer"), "a trainer that reconnects")
    assert run.wait(90.0) == 0, run.output
    run.assert_gone(10.0)
    assert assert_exact(run)["resumed_from"] == 0, "the run was rolled back to a checkpoint"
    assert run.log("trainer").count(" has joined the run ") == 1


@pytest.mark.long
def test_run_ends_and_can_be_resumed_if_the_controller_port_stays_taken(
    launch: Callable[..., Any], untrained_model: Path
) -> None:
    run, address = run_with_killed_controller(launch, untrained_model, "--controller.reconnect-timeout-s", "3")
    with foreign_listener(address):
        assert run.wait(60.0) == 1, run.output
    run.assert_gone(10.0)
    assert f"{address} is in use" in run.words
    assert f"flowrt resume {run.run_dir}" in run.words
    assert "Traceback" not in run.output
    resumed = launch(resume=run.run_dir)
    assert resumed.wait(90.0) == 0, resumed.output
    assert assert_exact(resumed)["resumed_from"] > 0
    resumed.assert_gone(10.0)
