"""guards.command: it gets the event, one at a time, and its failure is a sentence."""

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


async def told(command: GuardCommand, *events: dict[str, object]) -> None:
    for event in events:
        command.send(event)
    task = command._task
    if task is not None:
        await task


async def test_it_gets_each_event_as_json(tmp_path: Path) -> None:
    failures: list[str] = []
    command = GuardCommand(f"{script(tmp_path, 'cat >> got.jsonl')} with arguments", tmp_path, failures.append)
    await told(command, {"kind": "guard", "step": 3}, {"kind": "guard", "step": 4})
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
async def test_a_failure_is_a_sentence(tmp_path: Path, text: str, problem: str) -> None:
    failures: list[str] = []
    program = script(tmp_path, text)
    command = GuardCommand(program, tmp_path, failures.append)
    await told(command, {"step": 1})
    assert failures == [f"guards.command {program} {problem}"]


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    failures: list[str] = []
    program = str(tmp_path / "nothing")
    command = GuardCommand(program, tmp_path, failures.append)
    await told(command, {"step": 1})
    assert failures == [f"guards.command {program} cannot be started: No such file or directory"]


@pytest.mark.slow
async def test_one_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    failures: list[str] = []
    program = script(tmp_path, "sleep 600 & echo $! > child; wait")
    command = GuardCommand(program, tmp_path, failures.append, timeout_s=0.5)
    await told(command, {"step": 1})
    assert failures == [f"guards.command {program} did not end within 0 s and was killed"]
    child = psutil.Process(_pid(tmp_path)) if psutil.pid_exists(_pid(tmp_path)) else None
    assert child is None or child.wait(5.0) is None


def _pid(tmp_path: Path) -> int:
    return int((tmp_path / "child").read_text())


async def test_only_a_few_events_wait(tmp_path: Path) -> None:
    failures: list[str] = []
    program = script(tmp_path, "cat > /dev/null")
    command = GuardCommand(program, tmp_path, failures.append)
    events: list[dict[str, object]] = [{"step": step} for step in range(MAX_WAITING + 2)]
    await told(command, *events)
    assert failures == [f"guards.command was not run: {MAX_WAITING} events wait for it already"] * 2


async def test_without_a_command_nothing_is_run(tmp_path: Path) -> None:
    command = GuardCommand("", tmp_path, pytest.fail)
    await told(command, {"step": 1})
    await command.finish()
