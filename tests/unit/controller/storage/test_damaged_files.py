"""Damaged files next to the ledger are rewritten from it or count as missing; no count is wrong."""

import gzip
import json
import math
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.controller.events import AppendLedger, StepClosed
from flowrt.controller.storage.ledger import Ledger
from flowrt.controller.storage.ledger_reader import LedgerReader
from flowrt.controller.storage.run_files import RunFiles
from flowrt.controller.storage.run_metrics import RunMetrics
from flowrt.controller.storage.time_files import TimeFiles, TimeFilesStart
from flowrt.errors import ConfigError, FlowError
from flowrt.launcher.observer import address_of
from flowrt.launcher.supervision import SUMMARY, read_summary
from flowrt.observability.page.single_file import write
from flowrt.protocol.messages import Position, Report
from flowrt.protocol.spans import pack_spans
from flowrt.runtime.run_lines import is_step, read_lines
from flowrt.runtime.timeline import Span

STEPS = 6
DAMAGE = {
    "half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "missing": None,
    "doubled": lambda data: data.split(b"\n")[0] + b"\n" + data,
    "noise": lambda data: bytes(range(128, 256)) + data[20:],
    "list": lambda data: b"[1, 2]\n" + data,
    "object": lambda data: b"{}\n" + data,
    "nan": lambda data: data.replace(b'"reward": ', b'"reward": NaN, "was": '),
}


def closed(step: int, reward: float = 0.5) -> StepClosed:
    return StepClosed(
        step=step,
        groups=2,
        samples=8,
        tokens=64,
        lags=(0, 1),
        inline_means=(("reward", reward + step),),
        metrics=(("grad_norm", 1.0),),
    )


def write_run(run_dir: Path) -> bytes:
    """Write a run with its ledger; returns the content of metrics.jsonl."""
    ledger, metrics = Ledger(run_dir / "ledger.sqlite"), RunMetrics(run_dir, 0.0)
    recorder = RunFiles(ledger, metrics)
    ledger.resume(0, 0.0)
    for step in range(STEPS):
        recorder.record(AppendLedger(step, 0, "trained", step), float(step))
        recorder.record(closed(step), float(step))
        assert recorder.write(float(step), 1.0)
    metrics.close()
    ledger.close()
    return (run_dir / "metrics.jsonl").read_bytes()


def resumed_metrics(run_dir: Path, step: int) -> RunMetrics:
    """The metrics of a controller that resumes after ``step`` steps."""
    ledger = Ledger(run_dir / "ledger.sqlite")
    ledger.resume(step, 0.0)
    lines = ledger.step_lines(step)
    ledger.close()
    metrics = RunMetrics(run_dir, 100.0, Position(step), lines=lines)
    metrics.close()
    return metrics


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("step", [0, 4, STEPS])
def test_damaged_metrics_are_rewritten_from_the_ledger(tmp_path: Path, damage: str, step: int) -> None:
    whole = write_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    change = DAMAGE[damage]
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(whole))
    metrics = resumed_metrics(tmp_path, step)
    contents = path.read_bytes() if path.exists() else b""
    assert contents == b"".join(whole.splitlines(keepends=True)[:step])
    assert metrics.latest.get("step", -1) == step - 1


def test_a_ledger_without_the_metrics_of_a_step_is_reported_as_damaged(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()  # applies the pending writes
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM steps WHERE step = 2")
    ledger = Ledger(path)
    assert len(ledger.step_lines(2)) == 2
    with pytest.raises(FlowError, match=r"has no metrics of step 2: it is damaged"):
        ledger.step_lines(STEPS)
    ledger.close()


@pytest.mark.parametrize("value", ["1" * 310, "-" + "9" * 400, "NaN", "1e999", '"x"', "null", "[]"])
def test_a_metrics_line_with_an_invalid_number_counts_as_damaged(value: str, tmp_path: Path) -> None:
    whole = write_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(whole.replace(b'"reward": ', b'"reward": ' + value.encode() + b', "was": ', 1))
    lines, damaged = read_lines(path, is_step)
    assert (len(lines), damaged) == (STEPS - 1, 1)


def test_a_line_whose_writer_was_killed_does_not_count_as_damaged(tmp_path: Path) -> None:
    whole = write_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(whole[:-20])
    lines, damaged = read_lines(path, is_step)
    assert (len(lines), damaged) == (STEPS - 1, 0)


# ---- numbers that are not finite

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(st.text(max_size=8), NUMBERS), max_size=5), st.lists(NUMBERS, max_size=5))
def test_the_ledger_reopens_after_reports_of_any_numbers(
    numbers: list[tuple[str, float]], metrics: list[float]
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name)
        path = run_dir / "ledger.sqlite"
        for _ in range(2):
            ledger, run_metrics = Ledger(path), RunMetrics(run_dir, 0.0)
            times = TimeFiles(TimeFilesStart(str(run_dir), 0.0, 0.0, 0, 1.0))
            times.account.joined("mine", "mine", 0.0)
            ledger.resume(0, 0.0)
            recorder = RunFiles(ledger, run_metrics)
            for record in pack_spans(Span("train", value, value) for value in metrics):
                times.add_record("mine", record)
            recorder.record_report("mine", Report((), tuple(numbers), ()), 0)
            named = tuple((f"metric{index}", value) for index, value in enumerate(metrics))
            recorder.record(
                StepClosed(
                    step=0,
                    groups=1,
                    samples=1,
                    tokens=1,
                    lags=(0,),
                    inline_means=(("reward", float("nan")),),
                    metrics=named,
                ),
                1.0,
            )
            assert recorder.write(0.0, 1.0)
            times.close(2.0, ())
            ledger.close()  # what was added is pending, as after a kill
            run_metrics.close()
        with LedgerReader(path) as reader:
            assert reader.states() == {}
        expected = {name: value for name, value in numbers if math.isfinite(value)}
        assert run_metrics.numbers == expected
        for text in (run_dir / "metrics.jsonl").read_text().splitlines():
            json.loads(text, parse_constant=lambda constant: pytest.fail(constant))


def test_a_ledger_that_was_given_a_nan_reopens(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add_summary_value("x", float("nan"), 3)
    ledger.add_summary_value("y", 1.0, 3)
    ledger.commit()
    ledger.close()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert ledger.position(4).numbers == (("y", 1.0),)
    ledger.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_removing_the_ledger_during_a_run_ends_the_run(tmp_path: Path, replaced: bool) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger, metrics = Ledger(path), RunMetrics(tmp_path, 0.0)
    recorder = RunFiles(ledger, metrics)
    recorder.compact()
    assert recorder.write(0.0, 1.0)
    path.unlink()
    if replaced:
        path.write_bytes(b"")
    recorder.compact()
    with pytest.raises(FlowError, match="was removed or replaced during the run"):
        recorder.write(0.0, 1.0)
    ledger.close()
    metrics.close()


# ---- summary, timeline

VALID_SUMMARY = {name: kind() if isinstance(kind, type) else None for name, kind in SUMMARY.items()}


@pytest.mark.parametrize("content", ["", "{half", "[]", "{}", "[" * 100_000, "\ud800", '{"exit_code": 0, "reason": 3}'])
def test_a_damaged_summary_counts_as_missing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(VALID_SUMMARY))
    assert read_summary(tmp_path) == VALID_SUMMARY
    path.write_text(content, errors="surrogatepass")
    assert read_summary(tmp_path) is None
    (tmp_path / "config.toml").touch()
    with pytest.raises(FlowError, match="was killed"):
        address_of(tmp_path)
    path.unlink()
    path.mkdir()
    assert read_summary(tmp_path) is None


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name != "missing"])
def test_the_page_is_written_despite_damaged_files(tmp_path: Path, damage: str) -> None:
    change = DAMAGE[damage]
    assert change is not None
    whole = write_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(change(whole))
    span = {"worker": "trainer", "role": "trainer", "kind": "train", "start_s": 0.0, "end_s": 1.0}
    (tmp_path / "timeline").mkdir()
    packed = gzip.compress(json.dumps(span).encode() + b"\n")
    (tmp_path / "timeline" / "0000.jsonl.gz").write_bytes(change(packed))
    assert write(tmp_path).stat().st_size > 10_000


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        address_of(tmp_path)


def test_metrics_do_not_overwrite_the_fields_of_their_line(tmp_path: Path) -> None:
    metrics = RunMetrics(tmp_path, 0.0)
    step = StepClosed(
        step=0,
        groups=2,
        samples=8,
        tokens=64,
        lags=(0, 1),
        inline_means=(("tokens", 3.0),),
        metrics=(("step", 7.0), ("samples", 1.0), ("loss", 0.5)),
    )
    line = json.loads(metrics.write_step(step, 1.0))
    metrics.close()
    assert (line["step"], line["samples"], line["tokens"], line["loss"]) == (0, 8, 64, 0.5)
