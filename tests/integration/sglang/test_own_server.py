"""A server that is started by the engine: it exits, hangs, cannot start, or its worker dies."""

import os
import signal
import stat
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrt.engines.sglang.server_process import KeyFile
from flowrt.errors import EngineError
from tests.integration.conftest import wait_until

from .playing import (
    DEADLINE_S,
    STANDIN,
    TOKENS,
    drain,
    fake_python,
    is_complete,
    make_engine,
    prompts,
    snapshot,
    start_standin,
    wait_until_ended,
)

__all__ = ["fake_python", "make_engine", "start_standin"]  # fixtures


@pytest.mark.parametrize("crash_route", ["/generate", "/update_weights_from_disk"])
def test_own_server_that_exits_is_restarted_up_to_the_limit(
    crash_route: str,
    make_engine: Callable[..., Any],
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    fake_python: Any,
) -> None:
    """It exits at each such request; the error names the limit of restarts."""
    python = fake_python(f'exec {sys.executable} {STANDIN} "$@"')
    monkeypatch.setenv("STANDIN", f"0.5.21,{crash_route}")
    engine = make_engine(python=str(python))
    first = engine.server_pid
    if crash_route == "/generate":
        engine.add(prompts(2))
        with pytest.raises(EngineError, match=r"restarts \(1\)"):
            drain(engine)
    else:
        with pytest.raises(EngineError, match=r"restarts \(1\)"):
            engine.swap(snapshot(checkpoint, 1))
    assert engine.server_pid != first


def test_own_server_that_hangs_is_replaced_without_loss(
    make_engine: Callable[..., Any], checkpoint: Path, monkeypatch: pytest.MonkeyPatch, fake_python: Callable[..., Path]
) -> None:
    monkeypatch.setenv("STANDIN", "0.5.21,")
    engine = make_engine(python=str(fake_python(f'exec {sys.executable} {STANDIN} "$@"')), request_s=2.0)
    engine.swap(snapshot(checkpoint, 1))
    engine.add(prompts(4))
    first = engine.server_pid
    os.kill(first, signal.SIGSTOP)
    done = drain(engine)
    assert engine.server_pid != first
    assert len(done) == 4
    assert all(is_complete(response) and response.spans == (1, TOKENS) for response in done.values())


def test_waiting_call_returns_when_the_engine_is_closed(make_engine: Callable[..., Any], fake_python: Any) -> None:
    """A worker may be stopped while its server starts; a thread that kept waiting would keep the process alive."""
    engine = make_engine(start=False, python=str(fake_python("exec sleep 600")))
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


def test_own_server_dies_with_its_worker(tmp_path: Path, fake_python: Callable[[str], Path]) -> None:
    """The worker is killed by SIGKILL and cannot clean up; the server is starting, and has started another process."""
    others = tmp_path / "others"
    python = fake_python(f"set -m\nsleep 600 &\necho $! > {others}.new\nmv {others}.new {others}\nexec sleep 600")
    code = (
        "import sys, time; from pathlib import Path\n"
        "from flowrt.engines.options import SglangOptions\n"
        "from flowrt.engines.sglang.dialect import sglang_server\n"
        f"options, model, log = SglangOptions(python={str(python)!r}), Path('.'), Path({str(tmp_path / 'log')!r})\n"
        "server = sglang_server(options, model, rows=1, threads=1, log=log)\n"
        "server.start(); print(server.pid, flush=True); time.sleep(600)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    server = int(worker.stdout.readline())
    wait_until(others.exists, DEADLINE_S, lambda: "the server has started no other process")
    worker.kill()
    worker.wait(DEADLINE_S)
    worker.stdout.close()
    wait_until_ended([server, int(others.read_text())])


def test_server_environment_has_no_rank_variables_or_keys(
    make_engine: Callable[..., Any], fake_python: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would join the ranks of its worker's torchrun, see keys of the worker, or return other numbers."""
    private = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"]
    private += ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "PYTHONPATH"]
    private += ["FLOWRT_RANKS_STORE", "FLOWRT_KEYS", "SGLANG_API_KEY", "WANDB_API_KEY"]
    private += ["SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_MAX_NEW_TOKENS_LIMIT"]
    for name in [*private, "CUDA_VISIBLE_DEVICES"]:
        monkeypatch.setenv(name, "0")
    with pytest.raises(EngineError, match="ended before it was ready"):
        make_engine(python=str(fake_python(f"env > {tmp_path / 'seen'}")))
    seen = {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines()}
    assert not seen & set(private)
    assert {"CUDA_VISIBLE_DEVICES", "PATH", "HF_HUB_OFFLINE"} <= seen


def test_own_server_refuses_other_clients(
    make_engine: Callable[..., Any], fake_python: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The key is neither in its list of arguments nor in a file, also not in its log, where servers print it."""
    monkeypatch.setenv("STANDIN", "0.5.21,")
    engine = make_engine(python=str(fake_python(f'exec {sys.executable} {STANDIN} "$@"')))
    engine.add(prompts(1))
    assert len(drain(engine)) == 1
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer 0"}):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(urllib.request.Request(f"{engine.url}/server_info", headers=headers), timeout=9.0)
    command_line = Path(f"/proc/{engine.server_pid}/cmdline").read_text().split("\0")
    assert Path(command_line[command_line.index("--config") + 1]) == tmp_path / "server.yaml"
    assert not list(tmp_path.glob("*.yaml"))
    log, key = tmp_path / "server.log", engine.server_key
    engine.close()
    assert "'api_key': 'REDACTED'" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert len(key) == 64
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]


def test_key_of_an_external_server_comes_from_the_environment(
    make_engine: Callable[..., Any], start_standin: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_KEY", "theirs")
    url = f"http://127.0.0.1:{start_standin('0.5.21').port}"
    with pytest.raises(EngineError, match="HTTP 401"):
        make_engine(url=url)
    monkeypatch.setenv("SGLANG_API_KEY", "theirs")
    engine = make_engine(url=url)
    engine.add(prompts(1))
    assert len(drain(engine)) == 1


def test_the_key_is_passed_in_private_memory_and_in_no_file(tmp_path: Path) -> None:
    key_file = KeyFile(tmp_path / "server.log")
    key, [_, path] = key_file.arguments(["--tp", "2"])
    assert Path(path).read_text() == f"api-key: '{key}'\n"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert "memfd:" in os.readlink(os.readlink(path))
    assert key_file.arguments([])[0] != key  # each server has a new key
    for named in (["--config=mine.yaml"], ["--tokenizer-worker-num", "4"]):
        assert key_file.arguments(named) == ("", [])
    key_file.remove()
    assert not os.path.lexists(path)


def test_key_that_cannot_be_written_raises_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"key of an SGLang server cannot be passed: .*No such file"):
        KeyFile(tmp_path / "gone" / "server.log").arguments([])


def test_server_that_cannot_start_is_reported_with_the_end_of_its_log(
    make_engine: Callable[..., Any], fake_python: Any
) -> None:
    python = fake_python("echo no such model >&2\nexit 7")
    with pytest.raises(EngineError, match=r"ended before it was ready.*exit code 7.*no such model"):
        make_engine(python=str(python))
