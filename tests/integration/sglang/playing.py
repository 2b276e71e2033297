"""Fixtures: the stand-in in its own process, and engines that use it."""

import contextlib
import json
import os
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from flowrt.engines.base import Prompt, Response
from flowrt.engines.hf import load_model, load_tokenizer, named_parameters
from flowrt.engines.options import SglangOptions
from flowrt.engines.server.engine import ServerRollout
from flowrt.engines.server.process import free_port
from flowrt.engines.sglang.dialect import sglang_rollout
from flowrt.engines.stopping import StopConditions
from flowrt.transport.weights.snapshot import Snapshot
from tests.integration.conftest import wait_until
from tests.integration.helpers.forked import CONTEXT
from tests.integration.sglang import standin

STANDIN = Path(__file__).with_name("standin.py")
TOKENS = 40
MANY_TOKENS = 400
"""Responses of this length are still generated when a new checkpoint is written, also on a loaded machine."""
DEADLINE_S = 60.0  # engines and stand-ins take long to import on a loaded machine


class StandinProcess:
    """A running stand-in process."""

    def __init__(self, release: str, device: str, info: dict[str, Any]) -> None:
        self.port = free_port()
        arguments = [str(self.port), release, device, json.dumps(info)]
        environment = dict(os.environ)
        self.process = CONTEXT.Process(target=standin.forked, args=(arguments, environment), daemon=True)
        self.process.start()
        wait_until(self._answers, DEADLINE_S, lambda: f"the stand-in at {self.port} does not answer")

    def _answers(self) -> bool:
        try:
            return bool(self.request("/health"))
        except OSError:
            return False

    def request(self, route: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        message = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{route}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(message, timeout=DEADLINE_S) as response:
            return json.loads(response.read())


@pytest.fixture
def start_standin() -> Iterator[Callable[..., StandinProcess]]:
    standins: list[StandinProcess] = []

    def start(release: str, device: str = "none", **info: Any) -> StandinProcess:
        standins.append(StandinProcess(release, device, info))
        return standins[-1]

    yield start
    for server in standins:
        server.process.kill()
        server.process.join(DEADLINE_S)
        server.process.close()


@pytest.fixture
def make_engine(checkpoint: Path, tmp_path: Path) -> Iterator[Callable[..., ServerRollout]]:
    engines: list[ServerRollout] = []

    def create(
        *, start: bool = True, url: str = "", stop: tuple[str, ...] = (), tokens: int = TOKENS, **options: Any
    ) -> ServerRollout:
        engine = sglang_rollout(
            SglangOptions(
                url=(url,) if url else (),
                **{"start_s": DEADLINE_S, "update_s": DEADLINE_S, "max_server_restarts": 1, **options},
            ),
            checkpoint,
            stop=StopConditions((9_999,), stop, load_tokenizer(checkpoint)),  # a stand-in's tokens are its versions
            rows=4,
            max_new_tokens=tokens,
            temperature=1.0,
            threads=1,
            log_path=tmp_path / "server.log",
        )
        engines.append(engine)
        if start:
            engine.start()
        return engine

    yield create
    for engine in engines:
        engine.close()


@pytest.fixture
def fake_python(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a script with this command that is started in place of SGLang's Python; it says that SGLang is there."""

    def write(command: str) -> Path:
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec echo True\n{command}\n')
        python.chmod(0o755)
        return python

    return write


def prompts(count: int) -> list[Prompt]:
    return [Prompt(key, torch.tensor([3, 4], dtype=torch.int32), key) for key in range(count)]


def drain(engine: ServerRollout) -> dict[int, Response]:
    done: dict[int, Response] = {}
    while engine.running:
        done |= {response.key: response for response in engine.run(threading.Event())}
    return done


def snapshot(model: Path, version: int) -> Snapshot:
    return Snapshot.take(version, named_parameters(load_model(model)))


def is_complete(response: Response, tokens: int = TOKENS) -> bool:
    """The stand-in's tokens are the versions that generated them: spans and tokens must agree."""
    versions = [version for version, count in _version_counts(response.spans) for _ in range(count)]
    return versions == response.tokens.tolist() and len(versions) == len(response.logprobs) == tokens


def _version_counts(spans: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(spans[::2], spans[1::2], strict=True))


def wait_for_generation(standin: StandinProcess, requests: int = 4) -> None:
    """Wait until the server has received this number of requests for sequences."""
    wait_until(
        lambda: standin.request("/routes").count("/generate") >= requests,
        DEADLINE_S,
        lambda: f"fewer than {requests} sequences were started",
    )


def wait_until_ended(processes: Iterable[int], deadline_s: float = DEADLINE_S) -> None:
    """Wait until these processes have ended; kills what has not."""
    running = []
    for pid in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            running.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(running, deadline_s)
    alive = [member for member in alive if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]
    for process in alive:
        process.kill()
    assert not alive, f"still running: {alive}"
