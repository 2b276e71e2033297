"""The live page of a run: served from the start, across a controller restart; its end does not end the run."""

import argparse
import json
import os
import re
import shlex
import signal
import socket
import urllib.request
from collections.abc import Callable, Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest

from flowrt.cli import COMMANDS
from tests.integration.conftest import wait_until
from tests.integration.helpers.forked import run_flowrt
from tests.integration.helpers.forked_flowrt import ForkedFlowrt
from tests.run_page import unpacked

pytestmark = pytest.mark.slow
STEPS = 40
LIMIT_S = 120.0


class Browser:
    """A client that has opened the address that ``flowrt watch`` printed."""

    def __init__(self, address: str) -> None:
        self._base = address.partition("/?")[0]
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        assert b"<title>" in self._opener.open(address, timeout=LIMIT_S).read()

    def get(self, path: str, below: str = "") -> Any:
        """The answer of the API; ``below``: of a run of a folder."""
        with self._opener.open(f"{self._base}/{below}api/{path}", timeout=LIMIT_S) as answer:
            return json.load(answer)

    def events(self, below: str = "") -> Iterator[tuple[str, Any]]:
        with self._opener.open(f"{self._base}/{below}api/stream", timeout=LIMIT_S) as stream:
            kind = ""
            for line in stream:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    yield kind, json.loads(value)


def page_address(text: str) -> str:
    match = re.search(r"http://127\.0\.0\.1:\d+/\?token=[\w-]+", text)
    return match[0] if match else ""


def flags(model: Path, steps: int = STEPS) -> list[str]:
    small = ["--prompts-per-step", "2", "--group-size", "2", "--rollout.max-new-tokens", "8", "--rollout.workers", "1"]
    return ["--model", str(model), "--steps", str(steps), "--algorithm.kl.coef", "0", *small]


def test_a_page_follows_a_run_whose_controller_is_killed(launch: Callable[..., Any], untrained_model: Path) -> None:
    steps = 2 * STEPS  # the run must continue after the restart
    evaluations = ("--eval.at-start", "False", "--eval.at-end", "False")
    run = launch(*flags(untrained_model, steps), *evaluations, "--watch", "0")
    run.wait_for(lambda: page_address(run.output), "address of the page")
    browser = Browser(page_address(run.output))
    assert browser.get("run")["steps"] == steps
    events = browser.events()
    next(data for kind, data in events if kind == "step" and data["step"] >= 2)
    assert next(data for kind, data in events if kind == "status" and data)["steps"] == steps
    assert browser.get("run")["state"] == "live"
    with Watch(run.run_dir.parent) as folder:
        assert_listed(folder, run.run_dir.name, "running", "live")
    [controller] = run.find("flowrt.launcher.controller_main")
    run.signal(signal.SIGKILL, controller)
    restarted = next(data for kind, data in events if kind == "event" and data["kind"] == "controller_restarted")
    assert restarted["text"]
    last = next(data for kind, data in events if kind == "step")["step"]
    assert next(data for kind, data in events if kind == "status" and data and data["step"] > last)["ended"] is None
    series = browser.get("series?from=0")
    assert series["steps"] == list(range(len(series["steps"])))
    assert run.wait(LIMIT_S) == 0, run.output
    assert f"page {run.run_dir / 'run.html'}" in run.words
    run.assert_gone(10.0)
    embedded = unpacked((run.run_dir / "run.html").read_text())
    assert embedded["api/run"]["state"] == "finished"
    assert embedded["api/series?from=0"]["steps"] == list(range(steps))
    used = [line["resources"]["roles"] for line in embedded["api/attribution?from=0"]["lines"] if "resources" in line]
    assert any("tokens_per_s" in roles.get("rollout", {}) for roles in used)
    token = page_address(run.output).rpartition("=")[2]
    assert token not in json.dumps(embedded)
    with Watch(run.run_dir.parent) as folder:
        line = assert_listed(folder, run.run_dir.name, "complete", "finished")
        assert (line["done"], line["steps"]) == (steps, steps)
        assert line["samples_per_s"] > 0


def assert_listed(address: str, name: str, state: str, state_of_page: str) -> dict[str, Any]:
    """A folder's page lists its only run in this state and opens the page of the run; returns the line of the run."""
    browser = Browser(address)
    line: dict[str, Any]
    [line] = browser.get("runs")["runs"]
    assert (line["name"], line["state"]) == (name, state)
    assert browser.get("run", below=f"run/{name}/")["state"] == state_of_page
    events = browser.events(f"run/{name}/")
    assert next(kind for kind, _ in events) == "status"
    return line


def test_a_killed_page_server_is_reported_and_the_run_continues(
    launch: Callable[..., Any], untrained_model: Path
) -> None:
    run = launch(*flags(untrained_model), "--watch", "0")
    run.wait_for(lambda: page_address(run.output), "address of the page")
    run.wait_for_training()
    [watch] = run.find("flowrt.cli", "watch")
    run.signal(signal.SIGKILL, watch)
    run.wait_for(lambda: "flowrt watch has ended with exit code -9; the run goes on" in run.words, "report")
    assert run.wait(LIMIT_S) == 0, run.output


def test_the_page_server_ends_with_a_killed_run_and_can_be_restarted(
    launch: Callable[..., Any], untrained_model: Path
) -> None:
    run = launch(*flags(untrained_model), "--watch", "0")
    run.wait_for_training()
    os.kill(run.pid, signal.SIGKILL)
    wait_until(lambda: not run.find("flowrt.cli", "watch"), 20.0, lambda: "the page is still served")
    run.kill_all()
    with Watch(run.run_dir) as address:
        browser = Browser(address)
        assert browser.get("run")["state"] == "killed"
        assert browser.get("series?from=0")["steps"]
    with Watch(run.run_dir) as again:  # the same token: an open page stays signed in
        assert again.partition("token=")[2] == address.partition("token=")[2]


class Watch:
    """Context manager that runs ``flowrt watch RUN`` and returns its address."""

    def __init__(self, run_dir: Path, *arguments: str) -> None:
        read_fd, write_fd = os.pipe()
        self._output = os.fdopen(read_fd)
        words = ["watch", str(run_dir), "--port", "0", *arguments]
        self._process = ForkedFlowrt(words, run_dir, os.environ, write_fd)
        os.close(write_fd)

    def __enter__(self) -> str:
        return page_address(self._output.readline())

    def __exit__(self, *_: object) -> None:
        os.kill(self._process.pid, signal.SIGTERM)
        assert self._process.wait(20.0) == 0
        self._output.close()


def test_a_port_in_use_is_refused_before_any_file_is_written(tmp_path: Path, untrained_model: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        completed = run_flowrt(["run", *flags(untrained_model), "--run-dir", str(tmp_path / "run"), "--watch", port])
    assert completed.returncode == 2
    assert f"cannot have port {port}: Address already in use by " in completed.stderr
    assert not (tmp_path / "run").exists()


def test_comparing_with_a_directory_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    for name in ("run", "none"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    for command in (["watch"], ["export", "--html", str(tmp_path / "run.html")]):
        completed = run_flowrt([*command, str(tmp_path / "run"), "--compare", str(tmp_path / "none")])
        assert (completed.returncode, len(completed.stderr.splitlines())) == (2, 1)
        assert f"{tmp_path / 'none'} is not a run directory" in completed.stderr
    assert not (tmp_path / "run.html").exists()
    assert not (tmp_path / "run" / ".watch_token").exists()


def test_a_folder_without_runs_is_refused_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "metrics.jsonl").touch()
    for words, expected in (
        ([str(tmp_path)], "is not a run directory, and none of its directories is one"),
        ([str(tmp_path / "none")], "is not there"),
        ([str(tmp_path / "runs"), "--compare", str(tmp_path)], "--compare goes with the directory of one run"),
    ):
        completed = run_flowrt(["watch", *words])
        assert (completed.returncode, len(completed.stderr.splitlines())) == (2, 1)
        assert expected in completed.stderr
    assert not any(tmp_path.rglob(".watch_token"))


def test_the_documented_ways_to_watch_are_accepted() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "seeing.md").read_text()
    commands = [shlex.split(line, comments=True) for line in re.findall(r"^flowrt watch .*$", guide, re.MULTILINE)]
    assert len(commands) >= 4
    for _, *words in commands:
        parser = argparse.ArgumentParser()
        add_arguments = COMMANDS["watch"].add_arguments
        assert add_arguments is not None
        add_arguments(parser)
        assert parser.parse_args(words[1:]).run_dir


@pytest.mark.parametrize(("options", "expected"), [(["--port", "70000"], "no port"), (["--port", "x"], "whole number")])
def test_a_malformed_port_is_refused_with_one_sentence(tmp_path: Path, options: list[str], expected: str) -> None:
    completed = run_flowrt(["watch", str(tmp_path), *options])
    assert (completed.returncode, len(completed.stderr.splitlines())) == (2, 1)
    assert expected in completed.stderr
