"""Reading stored samples: orders, filters, copies of an open file, and damaged files."""

import contextlib
import itertools
import shutil
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from flowrt.cli import main
from flowrt.controller.storage.integrity import connect_read_only
from flowrt.controller.storage.sample_store import SAMPLES, GroupEnd, SampleWriter
from flowrt.errors import ConfigError
from flowrt.launcher.terminal import PlainConsole
from flowrt.launcher.views.samples import SampleOptions, show
from flowrt.observability import stored_samples as module
from flowrt.observability.completions_table import write_jsonl, write_parquet
from flowrt.observability.stored_samples import Order, SampleFilter, SampleReader
from flowrt.protocol.sample_records import ScoredSample, TrainedSample, encode_record, pack_text

STEPS, MEMBERS = 10, 4


def fill(path: Path, *, is_open: bool = False) -> SampleWriter:
    """Ten steps of one group; every sample has a different reward."""
    writer = SampleWriter(path / SAMPLES, per_step=32, max_bytes=1 << 30, run_attempt=1, step=0)
    for step in range(STEPS):
        records = []
        for member in range(MEMBERS):
            number = step * MEMBERS + member
            scored = ScoredSample(
                flow="train",
                eval_name="",
                epoch=step // 5,
                prompt=step,
                member=member,
                attempt=0,
                reward=number * 7 % (STEPS * MEMBERS) / 10,
                parts=(("exact", 1.0), *((("short", 0.5),) if member else ())),
                finish="stop",
                reason="error: no" if number == 13 else "",
                is_single=False,
                spans=(max(step - 1, 0), 1, step, 2),
                reward_s=0.0,
                data=(pack_text(f"prompt {step}"), pack_text(f"answer {number} " * 80), struct.pack("<3i", 1, 2, 3)),
            )
            logprobs = struct.pack("<3e", -1, -2, -3)
            trained = TrainedSample(step, step // 5, step, member, 0, 0.5, (logprobs, logprobs))
            records += [(encode_record(sample) or b"", step) for sample in (scored, trained)]
        assert not writer.write(records, [GroupEnd(step // 5, step, step)])
    if not is_open:
        writer.close()
    return writer


def test_queries_are_ordered_and_paged(tmp_path: Path) -> None:
    fill(tmp_path)
    reader = SampleReader(tmp_path)
    assert reader.count == STEPS * MEMBERS
    rewards = [row.reward or 0.0 for row in reader.query(order="worst", limit=100).samples]
    assert rewards == sorted(rewards)
    assert [row.reward for row in reader.query(order="best", limit=100).samples] == rewards[::-1]
    assert [row.step for row in reader.query(limit=5).samples] == [9, 9, 9, 9, 8]
    orders: tuple[Order, ...] = ("newest", "oldest", "worst", "best", "random")
    for order in orders:
        pages = [reader.query(order=order, limit=7, offset=first).samples for first in range(0, 42, 7)]
        ids = [row.id for page in pages for row in page]
        assert sorted(ids) == list(range(1, 41))
        assert [row.id for row in reader.each(SampleFilter(), order)] == ids
        assert [row.id for row in reader.each(SampleFilter(), order, 3)] == ids[:3]
    some = [row.id for row in reader.query(order="random", limit=7, seed=1).samples]
    assert some != [row.id for row in reader.query(order="random", limit=7, seed=2).samples]


def test_filters_select_samples(tmp_path: Path) -> None:
    fill(tmp_path)
    reader = SampleReader(tmp_path)
    assert reader.query(SampleFilter(first_step=2, last_step=4)).total == 3 * MEMBERS
    assert reader.query(SampleFilter(prompt=3, epoch=0)).total == MEMBERS
    assert reader.query(SampleFilter(prompt=3, epoch=1)).total == 0
    assert [row.member for row in reader.query(SampleFilter(reason="error")).samples] == [1]
    assert reader.query(SampleFilter(reason="err")).total == 0
    assert reader.query(SampleFilter(grep=r"answer 3\d ")).total == 10
    assert reader.query(SampleFilter(grep="prompt 3$")).total == MEMBERS
    assert reader.query(SampleFilter(first_step=2**70)).total == 0
    lengths = sorted(row.tokens for row in reader.query(limit=100).samples)
    for least, most in ((lengths[0], lengths[-1]), (lengths[0] + 1, None), (None, lengths[-1] - 1), (0, 0)):
        inside = [length for length in lengths if length >= (least or 0) and (most is None or length <= most)]
        assert reader.query(SampleFilter(min_tokens=least, max_tokens=most)).total == len(inside)
    assert reader.reward_names() == ("exact", "short")
    [first, *_] = reader.query(SampleFilter(prompt=3), limit=1).samples
    assert reader.query(SampleFilter(group_of=first.id)).total == MEMBERS
    sample = reader.get(first.id)
    assert sample is not None
    assert sample.versions() == (2, 3, 3)
    assert reader.get(10**9) is None


def test_the_command_filters_by_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path)
    [row] = SampleReader(tmp_path).query(limit=1).samples
    assert main(["samples", str(tmp_path), "--length", f"{row.tokens}:{row.tokens}"]) == 0
    assert f"of {STEPS * MEMBERS} samples" in capsys.readouterr().out
    assert main(["samples", str(tmp_path), "--length", "7:3"]) == 2
    assert "'7:3' is not A:B, two whole numbers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("conditions", "sentence"),
    [
        ("--length 900:999", "no stored sample has 900 to 999 response tokens"),
        ("--grep nowhere", "no stored prompt or completion contains 'nowhere'"),
        ("--step 99", "no sample of step 99 is stored"),
        ("--reason memory", "no stored sample has the reason 'memory'"),
        ("--prompt 4711", "no sample of prompt 4711 is stored; flowrt ledger shows"),
        ("--step 0 --prompt 1", "no stored sample meets all of these conditions together"),
    ],
)
@pytest.mark.parametrize("output", [(), ("--jsonl", "samples.jsonl")], ids=["terminal", "file"])
def test_conditions_that_no_sample_meets_are_bad_input(
    conditions: str,
    sentence: str,
    output: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main(["samples", str(tmp_path), *conditions.split(), *output]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert sorted(tmp_path.iterdir()) == before


def test_exported_tables_have_the_columns_of_trl(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    fill(tmp_path)
    reader = SampleReader(tmp_path)
    out = tmp_path / "out.parquet"
    assert write_parquet(reader.each(SampleFilter()), reader.reward_names(), out) == STEPS * MEMBERS
    table = parquet.read_table(out)
    assert table.column_names == ["step", "prompt", "completion", "exact", "short", "advantage"]
    assert table.column("short").to_pylist()[:2] == [None, 0.5]
    assert table.column("step").to_pylist() == [step for step in range(STEPS) for _ in range(MEMBERS)]
    assert write_jsonl(reader.each(SampleFilter()), (), tmp_path / "out.jsonl") == STEPS * MEMBERS
    assert not list(tmp_path.glob(".*.part"))


class Refusing(sqlite3.Connection):
    """Fails at the first access."""

    def execute(self, *_: object) -> sqlite3.Cursor:
        raise sqlite3.OperationalError("unable to open database file")


def test_a_copy_of_an_open_store_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    run.mkdir()
    copy.mkdir()
    writer = fill(run, is_open=True)
    assert SampleReader(run).count == STEPS * MEMBERS
    for name in (SAMPLES, f"{SAMPLES}-wal"):  # without the index of the log
        shutil.copy(run / name, copy)
    writer.close()

    def refuse(path: Path, *, private_index: bool | None = None) -> sqlite3.Connection:
        if path.parent == copy and not private_index:  # as in a read-only directory
            return sqlite3.connect(":memory:", factory=Refusing)
        return connect_read_only(path, private_index=private_index)

    with monkeypatch.context() as patched:
        patched.setattr(module, "connect_read_only", refuse)
        assert SampleReader(copy).count == STEPS * MEMBERS
    assert sorted(path.name for path in copy.iterdir()) == [SAMPLES, f"{SAMPLES}-wal"]
    before = sorted(path.name for path in copy.iterdir())
    assert SampleReader(copy / SAMPLES).count == STEPS * MEMBERS
    assert {SAMPLES, f"{SAMPLES}-wal"} <= {*before}
    shutil.copy(run / SAMPLES, tmp_path)
    assert SampleReader(tmp_path).count == STEPS * MEMBERS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "run", SAMPLES]


@pytest.mark.slow
def test_a_damaged_file_is_read_in_part_or_refused_in_a_sentence(tmp_path: Path) -> None:
    fill(tmp_path)
    whole = (tmp_path / SAMPLES).read_bytes()
    refused = 0
    for seed in range(60):
        random, data = Random(seed), bytearray(whole)
        if seed % 3 == 0:
            data = data[: random.randrange(len(data))]
        for _ in range(random.choice((0, 1, 20, 400)) if data else 0):
            data[random.randrange(len(data))] = random.randrange(256)
        (tmp_path / SAMPLES).write_bytes(data)
        console = PlainConsole(file=(tmp_path / "out").open("w"), width=100)
        for options in (SampleOptions(limit=100, tokens=True), SampleOptions(grep="a.*r"), SampleOptions(prompt="3")):
            try:
                show(tmp_path, options, console)
            except ConfigError as error:
                refused += 1
                text = str(error)
                assert text.isprintable()
                assert any(part in text for part in (SAMPLES, "prompt 3", "no stored prompt or completion contains"))
        console.file.close()
    assert refused > 20


def test_a_missing_or_invalid_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there: the run has not begun"):
        SampleReader(tmp_path)
    (tmp_path / SAMPLES).touch()
    with pytest.raises(ConfigError, match=r"samples\.sqlite cannot be read: its schema has version 0"):
        SampleReader(tmp_path)
    (tmp_path / SAMPLES).write_bytes(b"no database at all " * 1000)
    with pytest.raises(ConfigError, match="file is not a database; nothing was changed"):
        SampleReader(tmp_path)


WRITER = """
import sys, itertools
from pathlib import Path
from tests.unit.observability.test_stored_samples import fill_forever
fill_forever(Path(sys.argv[1]))
"""


def fill_forever(path: Path) -> None:
    """Write until this process is killed; report on stdout once samples are stored."""
    writer = SampleWriter(path / SAMPLES, per_step=32, max_bytes=200_000, run_attempt=1, step=0)
    for step in itertools.count():
        record = ScoredSample(
            flow="train",
            eval_name="",
            epoch=0,
            prompt=step,
            member=0,
            attempt=0,
            reward=0.0,
            parts=(),
            finish="stop",
            reason="",
            is_single=False,
            spans=(step, 1),
            reward_s=0.0,
            data=(pack_text("p"), pack_text(f"{step} " * 300), b""),
        )
        writer.write([(encode_record(record) or b"", step)])
        if step == 20:
            sys.stdout.write("written\n")
            sys.stdout.flush()


@pytest.mark.slow
def test_a_killed_writer_leaves_a_readable_store(tmp_path: Path) -> None:
    """At any moment, also during a deletion; the next writer continues with the same file."""
    newest = -1
    for seed in range(6):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"written\n"
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(Random(seed).random() / 2)
            process.kill()
        reader = SampleReader(tmp_path)
        rows = reader.query(limit=10_000).samples
        assert len(rows) == reader.count > 20
        assert all(row.completion.startswith(f"{row.step} ") for row in rows)
        newest = max(newest, rows[0].step)
    assert newest > 20
