"""A server that the engine starts itself: it dies, it hangs, it cannot start, its worker dies."""

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

from .playing import DEADLINE_S, STANDIN, TOKENS, drain, engine_of, in_place, is_whole, play, prompts, snapshot

__all__ = ["engine_of", "in_place", "play"]  # fixtures


@pytest.mark.parametrize("wreck", ["/generate", "/update_weights_from_disk"])
def test_own_server_that_dies_is_restarted(
    wreck: str, engine_of: Callable[..., Any], checkpoint: Path, monkeypatch: pytest.MonkeyPatch, in_place: Any
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
            engine.swap(snapshot(checkpoint, 1))
    assert engine.server_pid != first


def test_own_server_that_hangs_is_replaced_without_loss(
    engine_of: Callable[..., Any], checkpoint: Path, monkeypatch: pytest.MonkeyPatch, in_place: Callable[..., Path]
) -> None:
    monkeypatch.setenv("STANDIN", "0.5.21,")
    engine = engine_of(python=str(in_place(f'exec {sys.executable} {STANDIN} "$@"')), request_s=2.0)
    engine.swap(snapshot(checkpoint, 1))
    engine.add(prompts(4))
    first = engine.server_pid
    os.kill(first, signal.SIGSTOP)
    done = drain(engine)
    assert engine.server_pid != first
    assert len(done) == 4
    assert all(is_whole(response) and response.spans == (1, TOKENS) for response in done.values())


def test_waiting_call_returns_when_the_engine_is_closed(engine_of: Callable[..., Any], in_place: Any) -> None:
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


def test_own_server_dies_with_its_worker(tmp_path: Path, in_place: Callable[[str], Path]) -> None:
    """Whoever started it is killed, and cannot take anything along."""
    python = in_place("exec sleep 600")
    code = (
        "import sys, time; from pathlib import Path\n"
        "from flowrt.engines.options import SglangOptions\n"
        "from flowrt.engines.sglang.server_process import SglangServer\n"
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


def test_server_environment_has_no_rank_variables_or_keys(
    engine_of: Callable[..., Any], in_place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take itself for a rank of its worker's torchrun; and keys are nobody else's."""
    ours = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"]
    ours += ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "PYTHONPATH"]
    ours += ["FLOWRT_RANKS_STORE", "FLOWRT_KEYS"]
    for name in [*ours, "CUDA_VISIBLE_DEVICES"]:
        monkeypatch.setenv(name, "0")
    with pytest.raises(EngineError, match="ended before it was ready"):
        engine_of(python=str(in_place(f"env > {tmp_path / 'seen'}")))
    seen = {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines()}
    assert not seen & set(ours)
    assert {"CUDA_VISIBLE_DEVICES", "PATH", "HF_HUB_OFFLINE"} <= seen


def test_own_server_refuses_other_clients(
    engine_of: Callable[..., Any], in_place: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The key is neither in its list of arguments nor, once it is up, in a file."""
    monkeypatch.setenv("STANDIN", "0.5.21,")
    engine = engine_of(python=str(in_place(f'exec {sys.executable} {STANDIN} "$@"')))
    engine.add(prompts(1))
    assert len(drain(engine)) == 1
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer 0"}):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(urllib.request.Request(f"{engine.url}/server_info", headers=headers), timeout=9.0)
    words = Path(f"/proc/{engine.server_pid}/cmdline").read_text().split("\0")
    assert Path(words[words.index("--config") + 1]) == tmp_path / "server.yaml"
    assert not list(tmp_path.glob("*.yaml"))


def test_key_of_an_external_server_comes_from_the_environment(
    engine_of: Callable[..., Any], play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_KEY", "theirs")
    url = f"http://127.0.0.1:{play('0.5.21').port}"
    with pytest.raises(EngineError, match="HTTP 401"):
        engine_of(url=url)
    monkeypatch.setenv("SGLANG_API_KEY", "theirs")
    engine = engine_of(url=url)
    engine.add(prompts(1))
    assert len(drain(engine)) == 1


def test_files_with_the_key_are_private(tmp_path: Path) -> None:
    told = KeyFile(tmp_path / "server.log")
    key, [_, path] = told.arguments(["--tp", "2"])
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert told.arguments([])[0] != key  # of the next server
    for named in (["--api-key", "mine"], ["--config=mine.yaml"], ["--tokenizer-worker-num", "4"]):
        assert told.arguments(named) == ("", [])


def test_key_that_cannot_be_written_is_an_error_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"key of an SGLang server cannot be written: .*No such file"):
        KeyFile(tmp_path / "gone" / "server.log").arguments([])


def test_server_that_cannot_start_is_reported_with_the_end_of_its_log(
    engine_of: Callable[..., Any], in_place: Any
) -> None:
    python = in_place("echo no such model >&2\nexit 7")
    with pytest.raises(EngineError, match=r"ended before it was ready.*exit code 7.*no such model"):
        engine_of(python=str(python))
