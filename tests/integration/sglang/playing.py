"""The stand-in in a process of its own, and engines that speak with it."""

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrt.engines.base import Prompt, Response
from flowrt.engines.hf import load_model, named_parameters
from flowrt.engines.options import SglangOptions
from flowrt.engines.sglang.engine import SglangRollout
from flowrt.engines.sglang.server_process import free_port
from flowrt.engines.stopping import StopConditions
from flowrt.transport.weights.snapshot import Snapshot
from tests.integration.conftest import wait_until

STANDIN = Path(__file__).with_name("standin.py")
TOKENS = 40
DEADLINE_S = 60.0  # engines and stand-ins import torch, which takes long on a busy machine


class Play:
    """One stand-in on its own, and engines that are given its address."""

    def __init__(self, release: str, device: str, about: dict[str, int]) -> None:
        self.port = free_port()
        words = [str(self.port), release, device, json.dumps(about)]
        self.process = subprocess.Popen([sys.executable, str(STANDIN), *words])
        wait_until(self._answers, DEADLINE_S, lambda: f"the stand-in at {self.port} does not answer")

    def _answers(self) -> bool:
        try:
            return bool(self.ask("/health"))
        except OSError:
            return False

    def ask(self, route: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{route}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return json.loads(answer.read())


@pytest.fixture
def play() -> Iterator[Callable[..., Play]]:
    plays: list[Play] = []

    def start(release: str, device: str = "none", **about: int) -> Play:
        plays.append(Play(release, device, about))
        return plays[-1]

    yield start
    for one in plays:
        one.process.kill()
        one.process.wait(DEADLINE_S)


@pytest.fixture
def engine_of(checkpoint: Path, tmp_path: Path) -> Iterator[Callable[..., SglangRollout]]:
    engines: list[SglangRollout] = []

    def make(*, begin: bool = True, **options: Any) -> SglangRollout:
        engine = SglangRollout(
            SglangOptions(**{"start_s": DEADLINE_S, "update_s": DEADLINE_S, "max_server_restarts": 1, **options}),
            checkpoint,
            stop=StopConditions((9_999,)),  # the tokens of a stand-in are its versions
            rows=4,
            max_new_tokens=TOKENS,
            temperature=1.0,
            threads=1,
            log_path=tmp_path / "server.log",
        )
        engines.append(engine)
        if begin:
            engine.start()
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def in_place(tmp_path: Path) -> Callable[[str], Path]:
    """A command that is started in place of SGLang's Python."""

    def write(command: str) -> Path:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{command}\n")
        python.chmod(0o755)
        return python

    return write


def prompts(count: int) -> list[Prompt]:
    return [Prompt(key, torch.tensor([3, 4], dtype=torch.int32), key) for key in range(count)]


def drain(engine: SglangRollout) -> dict[int, Response]:
    done: dict[int, Response] = {}
    while engine.running:
        done |= {one.key: one for one in engine.run(threading.Event())}
    return done


def snapshot(model: Path, version: int) -> Snapshot:
    return Snapshot.take(version, named_parameters(load_model(model)))


def is_whole(response: Response) -> bool:
    """The stand-in's tokens are the versions that made them: spans and tokens must tell the same story."""
    told = [version for version, count in _pairs(response.spans) for _ in range(count)]
    return told == response.tokens.tolist() and len(told) == len(response.logprobs) == TOKENS


def _pairs(spans: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(spans[::2], spans[1::2], strict=True))


def until_some_are_generated(one: Play) -> None:
    wait_until(lambda: one.ask("/asked").count("/generate") >= 4, DEADLINE_S, lambda: "no sequence was begun")
