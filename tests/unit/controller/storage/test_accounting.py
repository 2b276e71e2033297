"""The accounting process: the figures of `TimeFiles`, and a run that does not depend on it."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrt.controller.attribution.causes import Cause, WaitInterval
from flowrt.controller.storage.accounting import Accounting
from flowrt.controller.storage.time_files import TimeFiles, TimeFilesStart
from flowrt.controller.storage.timeline_file import read_timeline
from flowrt.ids import WorkerId
from flowrt.protocol.spans import SPANS_IN_RECORD, count_spans, pack_spans, unpack_spans
from flowrt.runtime.parent_death import is_alive
from flowrt.runtime.timeline import Span

WORKERS = ("rollout-0", "rollout-1", "trainer")
STEPS = 4
DEADLINE_S = 60.0


def until(is_done: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not is_done():
        assert time.monotonic() < end_s, what
        os.sched_yield()


def spans_of(worker: str, step: int) -> list[Span]:
    start_s = float(step)
    if worker == "trainer":
        return [Span("train", start_s + 0.5, start_s + 0.9)]
    return [Span("generate", start_s, start_s + 0.75, 0.5, 3.0), Span("fetch", start_s + 0.75, start_s + 0.8, root="x")]


def waits_of(step: int) -> list[WaitInterval]:
    return [WaitInterval(WorkerId(worker), Cause.GATE, "trainer", step + 0.5, step + 1.0) for worker in WORKERS[:2]]


def attribution(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "attribution.jsonl").read_text().splitlines()]


def start(run_dir: Path, max_pending_bytes: int = 1 << 20) -> Accounting:
    times = Accounting(TimeFilesStart(str(run_dir), 0.0, 0.0, 0, 1.0), max_pending_bytes=max_pending_bytes)
    for worker in WORKERS:
        times.joined(worker, worker.partition("-")[0], 0.0)
    times.training_started(0.0)
    times.tick(0.0, [], [])
    until(lambda: times.pid is not None, "the process is not started")
    return times


def run_step(times: Accounting, step: int) -> None:
    for worker in WORKERS:
        times.add_spans(worker, pack_spans(spans_of(worker, step)))
        times.note_report(worker, step + 1.0)
    times.close_step(step, step + 1.0)
    times.tick(step + 1.0, waits_of(step), [])


@pytest.fixture
def times(tmp_path: Path) -> Iterator[Accounting]:
    accounting = start(tmp_path)
    yield accounting
    if accounting.pid is not None and is_alive(accounting.pid):
        os.kill(accounting.pid, signal.SIGKILL)


def test_the_process_writes_the_figures_of_time_files_in_this_process(tmp_path: Path, times: Accounting) -> None:
    (tmp_path / "here").mkdir()
    here = TimeFiles(TimeFilesStart(str(tmp_path / "here"), 0.0, 0.0, 0, 1.0))
    for worker in WORKERS:
        here.account.joined(worker, worker.partition("-")[0], 0.0)
    here.account.training_started(0.0)
    for step in range(STEPS):
        run_step(times, step)
        for worker in WORKERS:
            here.add_spans(worker, spans_of(worker, step))
            here.account.note_report(worker, step + 1.0)
        here.account.close_step(step, step + 1.0)
        here.add_waits(waits_of(step))
        here.write(step + 1.0, ())
    open_wait = WaitInterval(WorkerId("rollout-0"), Cause.WEIGHTS, "trainer", STEPS, STEPS + 0.5)
    times.close(STEPS + 0.5, [], [open_wait])
    here.close(STEPS + 0.5, [open_wait])
    assert attribution(tmp_path) == attribution(tmp_path / "here")
    assert len(attribution(tmp_path)) == STEPS + 1
    assert list(read_timeline(tmp_path)) == list(read_timeline(tmp_path / "here"))
    assert times.latest == here.latest
    assert times.shares() == here.shares() != {}
    assert times.busy() == here.busy()
    assert (times.notice(), times.dropped) == ("", 0)
    files = [tmp_path / "attribution.jsonl", *(tmp_path / "timeline").iterdir()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_no_process_is_started_without_a_worker(tmp_path: Path) -> None:
    times = Accounting(TimeFilesStart(str(tmp_path), 0.0, 0.0, 0, 1.0))
    times.tick(1.0, [], [])
    times.close(2.0, [], [])
    assert times.pid is None


def test_a_process_that_cannot_be_started_costs_the_attribution_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", refuse)
    times = Accounting(TimeFilesStart(str(tmp_path), 0.0, 0.0, 0, 1.0))
    times.joined("trainer", "trainer", 0.0)
    until(lambda: "Too many open files" in times.notice(), "the failure is not told")
    run_step(times, 0)
    times.close(1.0, [], [])
    assert times.dropped


def test_a_killed_process_costs_the_attribution_only(times: Accounting, caplog: pytest.LogCaptureFixture) -> None:
    assert times.pid is not None
    os.kill(times.pid, signal.SIGKILL)
    for step in range(100_000):
        run_step(times, step)
        if times.notice():
            break
    else:
        pytest.fail("the death of the process is not noticed")
    assert times.notice() == "", "once"
    before = times.dropped
    run_step(times, 1000)
    expected = sum(len(spans_of(worker, 0)) for worker in WORKERS) + len(waits_of(0))
    assert times.dropped == before + expected
    times.close(1001.0, [], [])
    assert f"{times.dropped} spans and waits are left out" in caplog.text


def test_what_a_slow_process_cannot_take_is_counted_and_the_rest_is_right(tmp_path: Path) -> None:
    times = start(tmp_path, max_pending_bytes=2000)
    try:
        assert times.pid is not None
        run_step(times, 0)
        until(lambda: times.latest is not None, "the first step is not answered")
        os.kill(times.pid, signal.SIGSTOP)
        step = 1
        while not times.dropped:
            run_step(times, step)
            step += 1
        in_step = sum(len(spans_of(worker, 0)) for worker in WORKERS) + len(waits_of(0))
        assert times.dropped == in_step
        assert times.notice().startswith("some spans and waits are left out")
        os.kill(times.pid, signal.SIGCONT)
        times.close(float(step), [], [])
        lines = attribution(tmp_path)
        assert [line["step"] for line in lines] == list(range(step + 1)), "steps are never dropped"
        assert lines[-3]["roles"]["trainer"]["busy"] == pytest.approx(0.4)
        assert lines[-2]["roles"]["trainer"]["busy"] == 0.0
        assert lines[-2]["roles"]["trainer"]["other"] == pytest.approx(1.0)
    finally:
        if times.pid is not None and is_alive(times.pid):
            os.kill(times.pid, signal.SIGKILL)


def test_a_process_that_never_answers_is_given_up(times: Accounting) -> None:
    assert times.pid is not None
    os.kill(times.pid, signal.SIGSTOP)
    for step in range(100_000):
        run_step(times, step)
        if times.notice().startswith("where the time goes is not recorded any more"):
            break
    else:
        pytest.fail("its queue has no bound")
    times.close(1.0, [], [])


def test_the_controller_never_looks_into_spans(times: Accounting, caplog: pytest.LogCaptureFixture) -> None:
    times.add_spans("rollout-0", (b"no spans",))
    times.add_spans("rollout-0", pack_spans(spans_of("rollout-0", 0)))
    times.tick(1.0, [], [])
    times.close(2.0, [], [])
    assert "1 spans and waits are left out" in caplog.text
    assert times.shares() == {}


def test_signals_that_end_a_run_do_not_end_the_process(tmp_path: Path, times: Accounting) -> None:
    run_step(times, 0)
    until(lambda: times.latest is not None, "the first step is not answered")
    assert times.pid is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(times.pid, number)
    run_step(times, 1)
    times.close(2.0, [], [])
    assert [line["step"] for line in attribution(tmp_path)] == [0, 1, 2]


SCRIPT = """
import os, sys
from flowrt.controller.storage.accounting import Accounting
from flowrt.controller.storage.time_files import TimeFilesStart
times = Accounting(TimeFilesStart(sys.argv[1], 0.0, 0.0, 0, 1.0))
times.joined("trainer", "trainer", 0.0)
times.close_step(0, 1.0)
times.note_report("trainer", 1.0)
times.tick(2.0, [], [])
while times.latest is None:
    os.sched_yield()
print(times.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_the_process_dies_with_the_controller(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=DEADLINE_S
    )
    pid = int(run.stdout)
    until(lambda: not is_alive(pid), "the process outlives its controller")
    assert [line["step"] for line in attribution(tmp_path)] == [0]


@pytest.mark.parametrize("count", [0, 1, 15, 16, SPANS_IN_RECORD, SPANS_IN_RECORD + 1, 2 * SPANS_IN_RECORD])
def test_packed_spans_come_back_with_their_count(count: int) -> None:
    spans = [Span("k" * 101, number, number + 1.0, root="r" * 101) for number in range(count)]
    records = pack_spans(spans, offset_s=2.0)
    assert len(records) == -(-count // SPANS_IN_RECORD)
    unpacked = [span for record in records for span in unpack_spans(record)]
    assert unpacked == [Span("k" * 100, number + 2.0, number + 3.0, root="r" * 100) for number in range(count)]
    assert sum(map(count_spans, records)) == count


def test_bytes_that_are_no_spans_are_counted_as_none() -> None:
    assert [count_spans(data) for data in (b"", b"\xc0", b"\xdc")] == [0, 0, 0]
    for data in (b"", b"\xc0", b"\xdc", b"\x91\x91\xff", b"\x91\x96\xa1\xff"):
        with pytest.raises(ValueError, match=r"."):
            unpack_spans(data)
