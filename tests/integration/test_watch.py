"""The page of a real run: it is there from the start, follows a restarted controller, and its death ends nothing."""

import json
import os
import re
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import FLOWRT, wait_until
from tests.run_page import unpacked

pytestmark = [pytest.mark.slow, pytest.mark.parallel]
STEPS = 60
LIMIT_S = 120.0


class Browser:
    """One that has opened the address that ``flowrt watch`` printed."""

    def __init__(self, address: str) -> None:
        self._base = address.partition("/?")[0]
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        assert b"<title>" in self._opener.open(address, timeout=LIMIT_S).read()

    def get(self, path: str) -> Any:
        with self._opener.open(f"{self._base}/api/{path}", timeout=LIMIT_S) as answer:
            return json.load(answer)

    def events(self) -> Iterator[tuple[str, Any]]:
        with self._opener.open(f"{self._base}/api/stream", timeout=LIMIT_S) as stream:
            kind = ""
            for line in stream:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    yield kind, json.loads(value)


def address_in(text: str) -> str:
    found = re.search(r"http://127\.0\.0\.1:\d+/\?token=[\w-]+", text)
    return found[0] if found else ""


def flags(model: Path, steps: int = STEPS) -> list[str]:
    small = ["--prompts-per-step", "2", "--group-size", "2", "--rollout.max-new-tokens", "8", "--rollout.workers", "1"]
    return ["--model", str(model), "--steps", str(steps), "--algorithm.kl.coef", "0", *small]


def test_a_page_follows_a_run_whose_controller_is_killed(launch: Callable[..., Any], untrained_model: Path) -> None:
    steps = 3 * STEPS  # the run has to go on after the restart
    evaluations = ("--eval.at-start", "False", "--eval.at-end", "False")
    run = launch(*flags(untrained_model, steps), *evaluations, "--watch", "0")
    run.wait_for(lambda: address_in(run.output), "address of the page")
    browser = Browser(address_in(run.output))
    assert browser.get("run")["steps"] == steps
    events = browser.events()
    next(data for kind, data in events if kind == "step" and data["step"] >= 2)
    assert next(data for kind, data in events if kind == "status" and data)["steps"] == steps
    assert browser.get("run")["state"] == "live"
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
    carried = unpacked((run.run_dir / "run.html").read_text())
    assert carried["api/run"]["state"] == "finished"
    assert carried["api/series?from=0"]["steps"] == list(range(steps))
    token = address_in(run.output).rpartition("=")[2]
    assert token not in json.dumps(carried)


def test_its_death_is_a_line_and_the_run_goes_on(launch: Callable[..., Any], untrained_model: Path) -> None:
    run = launch(*flags(untrained_model), "--watch", "0")
    run.wait_for(lambda: address_in(run.output), "address of the page")
    run.wait_for_training()
    [watch] = run.find("flowrt.cli", "watch")
    run.signal(signal.SIGKILL, watch)
    run.wait_for(lambda: "flowrt watch has ended with exit code -9; the run goes on" in run.words, "line")
    assert run.wait(LIMIT_S) == 0, run.output


def test_a_killed_run_takes_its_page_with_it_and_can_be_watched(
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
    """``flowrt watch RUN`` during a block, which gets its address."""

    def __init__(self, run_dir: Path, *arguments: str) -> None:
        command = [str(FLOWRT), "watch", str(run_dir), "--port", "0", *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> str:
        assert self._process.stdout is not None
        return address_in(self._process.stdout.readline())

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        assert self._process.stdout is not None
        self._process.stdout.close()
        assert self._process.wait(20.0) == 0


def test_a_port_that_is_taken_is_refused_before_anything_is_written(tmp_path: Path, untrained_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [str(FLOWRT), "run", *flags(untrained_model), "--run-dir", str(tmp_path / "run"), "--watch", port]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 2
    assert f"cannot have port {port}: Address already in use by " in ended.stderr
    assert not (tmp_path / "run").exists()


def test_a_directory_that_is_no_run_cannot_be_compared_with(tmp_path: Path) -> None:
    for name in ("run", "none"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    for command in (["watch"], ["export", "--html", str(tmp_path / "run.html")]):
        words = [str(FLOWRT), *command, str(tmp_path / "run"), "--compare", str(tmp_path / "none")]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
        assert f"{tmp_path / 'none'} is not a run directory" in ended.stderr
    assert not (tmp_path / "run.html").exists()
    assert not (tmp_path / "run" / ".watch_token").exists()


@pytest.mark.parametrize(("arguments", "said"), [(["--port", "70000"], "no port"), (["--port", "x"], "whole number")])
def test_bad_input_is_one_sentence(tmp_path: Path, arguments: list[str], said: str) -> None:
    ended = subprocess.run(
        [str(FLOWRT), "watch", str(tmp_path), *arguments], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    assert said in ended.stderr
