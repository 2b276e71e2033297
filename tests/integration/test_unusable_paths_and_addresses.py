"""Files, run directories and addresses that cannot be used: exit code 2, one sentence, nothing written."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.helpers.forked_flowrt import run_module

# ---- TOML


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("group_sise = 4", ["'group_sise'", "did you mean 'group_size'?"]),
        ("[trainer]\nlearning_rte = 1.0", ["'trainer.learning_rte'"]),
        ("[rollout]\nworker = 1", ["'rollout.worker'", "did you mean 'workers'?"]),
        ('steps = "many"', ["'steps'", "takes int", "str 'many'"]),
        ("steps = true", ["'steps'", "takes int", "bool"]),
        ("[trainer]\nlr = [1.0]", ["'trainer.lr'", "takes float", "list"]),
        ("trainer = 1", ["'trainer'", "table"]),
        ('recipe = "gsm9k"', ["'gsm9k'", "did you mean 'gsm8k'?"]),
        ("steps == 4", ["is not TOML", "line 1"]),
    ],
)
def test_mistakes_in_toml_are_refused(
    refused: Callable[..., Any], tmp_path: Path, text: str, expected: list[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    message = refused("--config", str(path)).sentence()
    for part in expected:
        assert part in message
    assert str(path) in message or "recipe" in text


def test_missing_config_file_is_refused(refused: Callable[..., Any], tmp_path: Path) -> None:
    message = refused("--config", "nowhere.toml").sentence()
    assert "nowhere.toml" in message
    assert "No such file" in message


def test_conflicting_recipes_of_config_file_and_command_line_are_refused(
    refused: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text('recipe = "gsm8k"')
    message = refused("arithmetic", "--config", "run.toml").sentence()
    assert "'gsm8k'" in message
    assert "'arithmetic'" in message


# ---- run directory


def test_run_directory_with_too_long_a_name_is_refused(refused: Callable[..., Any], tmp_path: Path) -> None:
    assert "cannot be used: File name too long" in refused(run_dir=tmp_path / ("x" * 300)).sentence()


def test_final_model_directory_containing_the_run_directory_is_refused(
    refused: Callable[..., Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "runs" / "one"
    for final in (run_dir, run_dir.parent):
        message = refused("--trainer.final-dir", str(final), run_dir=run_dir).sentence()
        assert f"trainer.final_dir {final} contains the run directory {run_dir}" in message


def test_nonempty_run_directory_is_refused(refused: Callable[..., Any], tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    message = refused(run_dir=used).sentence()
    assert str(used) in message
    assert "is not empty" in message
    assert "--run-dir" in message
    assert (used / "notes.txt").read_text() == "mine"


def test_run_directory_that_is_a_file_is_refused(refused: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    message = refused(run_dir=path).sentence()
    assert str(path) in message
    assert "--run-dir" in message
    assert path.read_text() == "mine"


def test_run_directory_below_a_file_is_refused(refused: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    message = refused(run_dir=path / "run").sentence()
    assert str(path / "run") in message
    assert "--run-dir" in message


# ---- addresses


def test_controller_port_in_use_is_refused(refused: Callable[..., Any], model_shell: str, held_port: int) -> None:
    address = f"tcp://127.0.0.1:{held_port}"
    message = refused("--model", model_shell, "--controller.bind", address).sentence()
    assert f"{address} is in use" in message
    assert "another port" in message


def test_controller_port_in_use_is_detected_before_the_model_is_built(
    refused: Callable[..., Any], held_port: int, tmp_path: Path
) -> None:
    address = f"tcp://127.0.0.1:{held_port}"
    refusal = refused("--controller.bind", address, "--sft.steps", "0", run_dir=tmp_path / "runs" / "first")
    assert "is in use" in refusal.sentence()
    assert "building the model" not in refusal.stdout


@pytest.mark.parametrize("address", ["somewhere", "tcp://127.0.0.1", "tcp://127.0.0.1:70000", "tcp://127.0.0.1:http"])
def test_malformed_bind_address_is_refused(refused: Callable[..., Any], model_shell: str, address: str) -> None:
    message = refused("--model", model_shell, "--controller.bind", address).sentence()
    assert address in message
    assert "tcp://HOST:PORT" in message


def run_worker(address: str) -> tuple[int, str]:
    """Run a reward worker that waits 1 s for its controller; return its exit code and output."""
    ended = run_module("flowrt.roles.reward", "--controller", address, "--connect-timeout-s", "1", timeout_s=600.0)
    assert "Traceback" not in ended.stdout, ended.stdout
    return ended.returncode, ended.stdout


@pytest.mark.parametrize("listening", [False, True], ids=["no listener", "silent listener"])
def test_worker_without_a_controller_answer_exits_with_code_1(listening: bool, held_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free_port = closed.getsockname()[1]
    address = f"tcp://127.0.0.1:{held_port if listening else free_port}"
    code, output = run_worker(address)
    lines = output.splitlines()
    assert len(lines) == 2, output
    assert f"reward-0 is looking for the controller at {address} (timeout 1 s)" in lines[0]
    assert "waited 1 s" in lines[1]
    assert f"controller at {address}" in lines[1]
    assert code == 1


def test_worker_with_a_malformed_controller_address_exits_with_code_2() -> None:
    code, output = run_worker("somewhere:http")
    lines = output.splitlines()
    assert len(lines) == 2, output
    assert "'somewhere:http'" in lines[1]
    assert "tcp://HOST:PORT" in lines[1]
    assert code == 2
