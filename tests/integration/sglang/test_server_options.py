"""Real SGLang servers on a CPU with other options: tensor parallelism, bfloat16, deadlines, shared directories."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowrt.engines.hf import named_parameters
from flowrt.engines.server.engine import ServerRollout
from flowrt.engines.training.forward import score
from flowrt.errors import EngineError
from flowrt.transport.weights.snapshot import Snapshot
from tests.integration.conftest import wait_until

from .conftest import PYTHON, REAL_SERVER, SHORT, START_S, TEMPERATURE, build, drain, owner, prompts
from .playing import wait_until_ended

pytestmark = REAL_SERVER
CLOSE = 1e-4
CLOSE_IN_BFLOAT16 = 0.05
BY_VERSION = {version: build(version) for version in range(3)}


def snapshot(version: int) -> Snapshot:
    return Snapshot.take(version, named_parameters(BY_VERSION[version]))


def largest_distance(engine: ServerRollout, version: int) -> float:
    """The largest difference of log-probabilities of an engine from those of a version's model."""
    sent = prompts()
    engine.add(sent)
    responses = drain(engine)
    assert all(response.spans[::2] == (version,) for response in responses)
    return max(
        float(
            (
                score(BY_VERSION[version], [sent[response.key].tokens], [response.tokens], TEMPERATURE, 4096)[0]
                - response.logprobs
            )
            .abs()
            .max()
        )
        for response in responses
    )


# ---- one server with two tensor-parallel ranks


@pytest.fixture(scope="module")
def owned(checkpoint: Path) -> Iterator[ServerRollout]:
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # which tensor parallelism on a CPU needs
            engine = stack.enter_context(owner(checkpoint, arguments="--max-total-tokens 8192 --tp 2"))
        yield engine


def test_a_tensor_parallel_server_generates_as_transformers(owned: ServerRollout) -> None:
    assert largest_distance(owned, 0) < CLOSE


@pytest.mark.parametrize("weights", ["disk", "tensor", "broadcast"])
def test_a_tensor_parallel_server_is_updated_by_each_transfer(
    weights: str, make_sharing_engine: Callable[..., Any], tmp_path: Path
) -> None:
    """Each rank has its part of the new weights; files are in a shared directory, the address for ranks is given."""
    options = {"disk": {"stage": str(tmp_path)}, "tensor": {}, "broadcast": {"host": "127.0.0.1"}}[weights]
    engine = make_sharing_engine(SHORT, weights=weights, **options)
    engine.swap(snapshot(1))
    assert largest_distance(engine, 1) < CLOSE
    assert not list(tmp_path.iterdir())


def test_the_key_is_in_no_file_and_the_log_is_private(owned: ServerRollout, checkpoint: Path) -> None:
    """SGLang prints all of its arguments."""
    log, key = checkpoint.parent / "server.log", owned.server_key.encode()
    assert b"REDACTED" in log.read_bytes()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert len(key) == 64
    assert not [path for path in checkpoint.parent.rglob("*") if path.is_file() and key in path.read_bytes()]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            assert key not in (process / "cmdline").read_bytes(), process
        except (FileNotFoundError, ProcessLookupError):
            continue


def test_an_update_or_a_sequence_that_is_not_done_in_time_is_a_failure_of_the_server(
    owned: ServerRollout, make_sharing_engine: Callable[..., Any]
) -> None:
    engine = make_sharing_engine(SHORT, update_s=20.0, max_server_restarts=0)
    other = make_sharing_engine(SHORT, request_s=10.0, max_server_restarts=0)
    os.killpg(owned.server_pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineError, match=r"max_server_restarts \(0\) allows; last error: .*version 1"):
            engine.swap(snapshot(1))
        other.add(prompts(1))
        with pytest.raises(EngineError, match=r"max_server_restarts \(0\) allows; last error: .*sign of life"):
            drain(other)
    finally:
        os.killpg(owned.server_pid, signal.SIGCONT)


# ---- other servers


def test_a_server_in_bfloat16_generates_nearly_as_transformers(checkpoint: Path) -> None:
    """Its checksums are not compared; weights are sent in float32, and rounded by the server."""
    with owner(checkpoint, dtype="bfloat16") as engine:
        assert 0 < largest_distance(engine, 0) < CLOSE_IN_BFLOAT16
        engine.swap(snapshot(1))
        assert 0 < largest_distance(engine, 1) < CLOSE_IN_BFLOAT16


def test_a_server_that_is_not_ready_in_time_is_named_with_its_log(checkpoint: Path) -> None:
    with (
        pytest.raises(
            EngineError, match=r"waited 1 s for the SGLang server .* to be ready: .*it runs; its log .*server"
        ),
        owner(checkpoint, start_s=1.0),
    ):
        pass


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_a_server_dies_with_a_worker_that_is_killed_while_it_starts(
    processes: int, checkpoint: Path, tmp_path: Path
) -> None:
    """Killed as soon as the server has started this number of processes."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from flowrt.engines.options import SglangOptions\n"
        "from flowrt.engines.sglang.dialect import sglang_server\n"
        "python, model, log = sys.argv[1:]\n"
        "options = SglangOptions(python=python, device='cpu', dtype='float32', arguments='--max-total-tokens 8192')\n"
        "server = sglang_server(options, Path(model), rows=8, threads=1, log=Path(log))\n"
        "server.start(); print(server.pid, flush=True); time.sleep(3600)\n"
    )
    command = [sys.executable, "-c", code, str(PYTHON), str(checkpoint), str(tmp_path / "server.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            session = int(worker.stdout.readline())
            has_started = lambda: len(members(session)) >= processes  # noqa: E731
            wait_until(has_started, START_S, lambda: f"{members(session)}\n{(tmp_path / 'server.log').read_text()}")
            started = members(session)
        finally:
            worker.kill()
    wait_until_ended(started)
    assert not members(session)


def members(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    pids = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                pids.append(process.pid)
    return pids


def test_a_server_with_an_unknown_argument_is_named_with_its_message(checkpoint: Path) -> None:
    with (
        pytest.raises(EngineError, match=r"ended before it was ready; it ended with exit code 2; .*no-such-argument"),
        owner(checkpoint, arguments="--no-such-argument"),
    ):
        pass
