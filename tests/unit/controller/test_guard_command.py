"""guards.command: it receives one event at a time, and each failure is reported in one sentence."""

import json
from pathlib import Path

import psutil
import pytest

from flowrt.controller.server.guard_command import MAX_WAITING, GuardCommand


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "notify.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


async def send_and_wait(command: GuardCommand, *events: dict[str, object]) -> None:
    for event in events:
        command.send(event)
    task = command._task
    if task is not None:
        await task


async def test_the_command_receives_each_event_as_json(tmp_path: Path) -> None:
    failures: list[str] = []
    command = GuardCommand(f"{script(tmp_path, 'cat >> got.jsonl')} with arguments", tmp_path, failures.append)
    await send_and_wait(command, {"kind": "guard", "step": 3}, {"kind": "guard", "step": 4})
    lines = [json.loads(line) for line in (tmp_path / "got.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 4]
    assert lines[0]["run_dir"] == str(tmp_path)
    assert failures == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo no such channel >&2; exit 3", "ended with exit code 3: no such channel"),
        ("exit 4", "ended with exit code 4"),
    ],
)
async def test_a_failure_is_reported_with_the_exit_code_and_stderr(tmp_path: Path, text: str, problem: str) -> None:
    failures: list[str] = []
    program = script(tmp_path, text)
    command = GuardCommand(program, tmp_path, failures.append)
    await send_and_wait(command, {"step": 1})
    assert failures == [f"guards.command {program} {problem}"]


async def test_a_missing_program_is_reported(tmp_path: Path) -> None:
    failures: list[str] = []
    program = str(tmp_path / "nothing")
    command = GuardCommand(program, tmp_path, failures.append)
    await send_and_wait(command, {"step": 1})
    assert failures == [f"guards.command {program} cannot be started: No such file or directory"]


@pytest.mark.slow
async def test_a_hanging_command_is_killed_with_its_child_processes(tmp_path: Path) -> None:
    failures: list[str] = []
    program = script(tmp_path, "sleep 600 & echo $! > child; wait")
    command = GuardCommand(program, tmp_path, failures.append, timeout_s=0.5)
    await send_and_wait(command, {"step": 1})
    assert failures == [f"guards.command {program} did not end within 0 s and was killed"]
    child = psutil.Process(_pid(tmp_path)) if psutil.pid_exists(_pid(tmp_path)) else None
    assert child is None or child.wait(60.0) is None


def _pid(tmp_path: Path) -> int:
    return int((tmp_path / "child").read_text())


async def test_events_beyond_the_queue_limit_are_reported_as_not_run(tmp_path: Path) -> None:
    failures: list[str] = []
    program = script(tmp_path, "cat > /dev/null")
    command = GuardCommand(program, tmp_path, failures.append)
    events: list[dict[str, object]] = [{"step": step} for step in range(MAX_WAITING + 2)]
    await send_and_wait(command, *events)
    assert failures == [f"guards.command was not run: {MAX_WAITING} events wait for it already"] * 2


async def test_an_empty_command_runs_nothing(tmp_path: Path) -> None:
    command = GuardCommand("", tmp_path, pytest.fail)
    await send_and_wait(command, {"step": 1})
    await command.finish()
