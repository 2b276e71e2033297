"""The engine against a process that keeps to SGLang's protocol: releases, failures, recovery; no SGLang is needed."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrt.engines.checkpoint import load_model, named_parameters
from flowrt.engines.options import SglangOptions
from flowrt.engines.protocols import Prompt, Response
from flowrt.engines.sglang import SglangRollout
from flowrt.engines.sglang_server import _free_port
from flowrt.errors import EngineError, TransferError
from flowrt.transport.weights import Snapshot
from tests.integration.conftest import wait_until

STANDIN = Path(__file__).with_name("standin.py")
TOKENS = 40
DEADLINE_S = 20.0


class Play:
    """One stand-in on its own, and engines that are given its address."""

    def __init__(self, release: str) -> None:
        self.port = _free_port()
        self.process = subprocess.Popen([sys.executable, str(STANDIN), str(self.port), release])
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
def play() -> Iterator[Callable[[str], Play]]:
    plays: list[Play] = []

    def start(release: str) -> Play:
        plays.append(Play(release))
        return plays[-1]

    yield start
    for one in plays:
        one.process.kill()
        one.process.wait(DEADLINE_S)


@pytest.fixture
def engine_of(untrained_model: Path, tmp_path: Path) -> Iterator[Callable[..., SglangRollout]]:
    engines: list[SglangRollout] = []

    def make(*, begin: bool = True, **options: Any) -> SglangRollout:
        engine = SglangRollout(
            SglangOptions(**{"start_s": DEADLINE_S, "update_s": DEADLINE_S, "restarts": 1, **options}),
            untrained_model,
            eos_id=1,
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


def until_some_are_made(one: Play) -> None:
    wait_until(lambda: one.ask("/asked").count("/generate") >= 4, DEADLINE_S, lambda: "no sequence was begun")


@pytest.mark.parametrize(
    ("release", "weights"),
    [
        *[(release, "disk") for release in ("0.5.12.post1", "0.5.18", "0.5.19", "0.5.23")],
        *[(release, "tensor") for release in ("0.5.20", "0.5.21")],
    ],
)
def test_weights_change_under_running_sequences(
    release: str, weights: str, play: Callable[..., Any], engine_of: Callable[..., Any], untrained_model: Path
) -> None:
    """Every token's version is right; where the server cannot tell, what runs is cut and sent on."""
    one = play(release)
    engine = engine_of(url=f"http://127.0.0.1:{one.port}", weights=weights)
    assert engine.room == 4
    engine.add(prompts(4))
    until_some_are_made(one)
    engine.swap(snapshot(untrained_model, 1))
    done = drain(engine)
    assert sorted(done) == [0, 1, 2, 3]
    assert all(is_whole(response) and response.spans[-2] == 1 for response in done.values())
    assert any(response.spans[0] == 0 for response in done.values())
    asked = one.ask("/asked")
    cut = release in ("0.5.12.post1", "0.5.18")
    assert (asked.count("/generate") > 4) == cut
    change = asked[asked.index("/generate") :]
    update = f"/update_weights_from_{weights}"
    assert change.index("/pause_generation") < change.index(update) < change.index("/continue_generation")


@pytest.mark.parametrize("shared", [False, True])
def test_weights_by_disk_are_read_by_another_process_and_nothing_of_them_stays(
    shared: bool,
    play: Callable[..., Any],
    engine_of: Callable[..., Any],
    untrained_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """In memory of this process, or in a directory that both have."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one = play("0.5.21")
    engine = engine_of(url=f"http://127.0.0.1:{one.port}", stage=str(tmp_path) if shared else "")
    engine.swap(snapshot(untrained_model, 1))
    parameters = named_parameters(load_model(untrained_model))
    assert one.ask("/loaded") == {name: list(one.shape) for name, one in parameters.items()}
    assert not list(tmp_path.glob("flowrt-weights-*"))
    descriptors = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    assert not [path for path in descriptors if "flowrt-weights" in path]


def _is_open(descriptor: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{descriptor}")


def test_a_change_that_failed_is_made_whole_before_anything_goes_on(
    play: Callable[..., Any], engine_of: Callable[..., Any], untrained_model: Path
) -> None:
    one = play("0.5.21")
    engine = engine_of(url=f"http://127.0.0.1:{one.port}", weights="tensor")
    engine.add(prompts(4))
    until_some_are_made(one)
    one.ask("/fail_next", {"route": "/update_weights_from_tensor"})
    engine.swap(snapshot(untrained_model, 1))
    done = drain(engine)
    assert all(is_whole(response) for response in done.values())
    assert len(done) == 4
    asked = one.ask("/asked")
    failed = len(asked) - 1 - asked[::-1].index("/update_weights_from_tensor")
    # The session was ended, what ran was cut, and the weights came again, all of them, before it continued.
    again = asked[asked.index("/pause_generation", 4) :]
    assert again.count("/begin_weight_update") == again.count("/end_weight_update") == 2
    assert "/continue_generation" in asked[failed:]
    assert engine.room == 4


def test_what_fails_too_often_ends_the_engine_with_the_servers_words(
    play: Callable[..., Any], engine_of: Callable[..., Any], untrained_model: Path
) -> None:
    one = play("0.5.21")
    engine = engine_of(url=f"http://127.0.0.1:{one.port}", restarts=0)
    one.ask("/fail_next", {"route": "/update_weights_from_disk"})
    with pytest.raises(EngineError, match=r"restarts \(0\).*version 1 by disk.*was told to fail"):
        engine.swap(snapshot(untrained_model, 1))
    assert engine.room == 0


def test_weights_of_another_model_are_refused_before_the_server_hears_of_them(
    play: Callable[..., Any], engine_of: Callable[..., Any]
) -> None:
    one = play("0.5.21")
    engine = engine_of(url=f"http://127.0.0.1:{one.port}")
    before = one.ask("/asked").count("/update_weights_from_disk")
    with pytest.raises(TransferError, match="the same checkpoint"):
        engine.swap(Snapshot.take(1, {"weight": torch.zeros(5)}))
    assert one.ask("/asked").count("/update_weights_from_disk") == before


def test_a_server_that_does_not_answer_in_time_counts_as_gone(
    play: Callable[..., Any], engine_of: Callable[..., Any], untrained_model: Path
) -> None:
    one = play("0.5.21")
    engine = engine_of(url=f"http://127.0.0.1:{one.port}", restarts=0, update_s=1.0)
    os.kill(one.process.pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match=r"waited 1\.0 s for version 1"):
        engine.swap(snapshot(untrained_model, 1))


@pytest.mark.parametrize("wreck", ["/generate", "/update_weights_from_disk"])
def test_a_server_of_ours_that_dies_is_started_again(
    wreck: str, engine_of: Callable[..., Any], untrained_model: Path, monkeypatch: pytest.MonkeyPatch, in_place: Any
) -> None:
    """It dies at that request each time: once more than allowed is the end, and says so."""
    python = in_place(f'exec {sys.executable} {STANDIN} "$@"')
    monkeypatch.setenv("STANDIN", f"0.5.21,{wreck}")
    engine = engine_of(python=str(python))
    first = engine.server_pid
    if wreck == "/generate":
        engine.add(prompts(2))
        with pytest.raises(EngineError, match=r"restarts \(1\)"):
            drain(engine)
    else:
        with pytest.raises(EngineError, match=r"restarts \(1\)"):
            engine.swap(snapshot(untrained_model, 1))
    assert engine.server_pid != first


def test_a_server_of_ours_that_hangs_is_replaced_and_nothing_is_lost(
    engine_of: Callable[..., Any], untrained_model: Path, monkeypatch: pytest.MonkeyPatch, in_place: Callable[..., Path]
) -> None:
    monkeypatch.setenv("STANDIN", "0.5.21,")
    engine = engine_of(python=str(in_place(f'exec {sys.executable} {STANDIN} "$@"')), request_s=2.0)
    engine.swap(snapshot(untrained_model, 1))
    engine.add(prompts(4))
    first = engine.server_pid
    os.kill(first, signal.SIGSTOP)
    done = drain(engine)
    assert engine.server_pid != first
    assert len(done) == 4
    assert all(is_whole(response) and response.spans == (1, TOKENS) for response in done.values())


def test_who_waits_in_an_engine_that_is_closed_comes_back(engine_of: Callable[..., Any], in_place: Any) -> None:
    """A worker may be told to stop while its server starts; a thread that waited on would keep its process."""
    engine = engine_of(begin=False, python=str(in_place("exec sleep 600")))
    ended: list[str] = []

    def start() -> None:
        with pytest.raises(EngineError) as raised:
            engine.start()
        ended.append(str(raised.value))

    starting = threading.Thread(target=start)
    starting.start()
    wait_until(lambda: engine.server_pid, DEADLINE_S, lambda: "nothing was started")
    server = engine.server_pid
    engine.close()
    starting.join(DEADLINE_S)
    assert ended == ["the engine was closed"]
    assert not Path(f"/proc/{server}").exists()


def test_a_server_of_ours_dies_with_its_worker(tmp_path: Path, in_place: Callable[[str], Path]) -> None:
    """Whoever started it is killed, and cannot take anything along."""
    python = in_place("exec sleep 600")
    code = (
        "import sys, time; from pathlib import Path\n"
        "from flowrt.engines.options import SglangOptions\n"
        "from flowrt.engines.sglang_server import SglangServer\n"
        f"options, model, log = SglangOptions(python={str(python)!r}), Path('.'), Path({str(tmp_path / 'log')!r})\n"
        "server = SglangServer(options, model, rows=1, threads=1, log=log)\n"
        "server.start(); print(server.pid, flush=True); time.sleep(600)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    pid = int(worker.stdout.readline())
    worker.kill()
    worker.wait(DEADLINE_S)
    worker.stdout.close()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), DEADLINE_S, lambda: f"the server {pid} lives on")


def test_a_server_that_cannot_start_is_told_with_its_last_words(engine_of: Callable[..., Any], in_place: Any) -> None:
    python = in_place("echo no such model >&2\nexit 7")
    with pytest.raises(EngineError, match=r"ended before it was ready.*exit code 7.*no such model"):
        engine_of(python=str(python))
