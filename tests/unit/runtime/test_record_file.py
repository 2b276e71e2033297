"""Files of records: what was written before a kill or a damage is read, and nothing else."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from flowrt.runtime import record_file
from flowrt.runtime.record_file import RecordPlace, RecordWriter, read_body, read_headers

KIND = b"kind of test 1\n"


def write(path: Path, count: int) -> list[tuple[bytes, bytes]]:
    records = [(f"header {number}".encode(), bytes([number]) * (number * 7)) for number in range(count)]
    writer = RecordWriter(path, KIND)
    for header, body in records:
        writer.append(header, [body[:3], body[3:]])
    writer.flush(sync=True)
    writer.close()
    return records


def read(path: Path) -> list[tuple[bytes, bytes]]:
    records = []
    with path.open("rb") as file:
        for header, place in read_headers(path, KIND).records:
            if (body := read_body(file, place)) is not None:
                records.append((header, body))
    return records


def test_records_are_read_in_order_with_their_bodies(tmp_path: Path) -> None:
    records = write(tmp_path / "file", 5)
    assert read(tmp_path / "file") == records
    assert read_headers(tmp_path / "file", KIND).damaged == 0
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_cut_anywhere_has_its_first_records_and_counts_as_not_damaged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    records = write(path, 4)
    data = path.read_bytes()
    ends = [place.end for _, place in read_headers(path, KIND).records]
    for size in range(len(KIND), len(data)):
        path.write_bytes(data[:size])
        assert read(path) == records[: sum(end <= size for end in ends)]
        assert read_headers(path, KIND).damaged == 0


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("search_bytes", [1 << 20, 8])
def test_a_damaged_byte_costs_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search_bytes: int, seed: int
) -> None:
    monkeypatch.setattr(record_file, "SEARCH_BYTES", search_bytes)
    path, rng = tmp_path / "file", random.Random(seed)
    records = write(path, 6)
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(KIND), len(data))
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    recovered = read(path)
    assert [record for record in records if record in recovered] == recovered
    assert len(recovered) == len(records) - 1


def test_a_file_of_another_kind_has_no_records(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"something else that is longer")
    assert (read(path), read_headers(path, KIND).damaged) == ([], 1)
    path.write_bytes(b"")
    assert read(path) == []


def test_a_rewritten_file_has_the_given_records_and_takes_more(tmp_path: Path) -> None:
    path = tmp_path / "file"
    writer = RecordWriter(path, KIND)
    places = [writer.append(b"%d" % number, [b"x" * number]) for number in range(10)]
    before = writer.size
    moved = writer.rewrite(places[::3])
    assert writer.size < before
    last = writer.append(b"last", [b"y"])
    writer.close()
    assert [header for header, _ in read(path)] == [b"0", b"3", b"6", b"9", b"last"]
    assert [place for _, place in read_headers(path, KIND).records] == [*moved, last]
    assert all(isinstance(place, RecordPlace) for place in moved)


CUT_WHILE_READ = """
import os, sys, zlib
from pathlib import Path
from flowrt.runtime import record_file

path, crc32 = Path(sys.argv[1]), zlib.crc32

def crc32_of_a_file_that_is_cut(*values):
    os.truncate(path, 100)
    return crc32(*values)

record_file.zlib.crc32 = crc32_of_a_file_that_is_cut
print(len(record_file.read_headers(path, sys.argv[2].encode()).records))
"""


def test_a_file_that_is_cut_while_it_is_read_does_not_kill_the_process(tmp_path: Path) -> None:
    path = tmp_path / "file"
    writer = RecordWriter(path, KIND)
    for number in range(50):
        writer.append(b"header %d" % number, [bytes(100_000)])
    writer.close()
    words = [sys.executable, "-c", CUT_WHILE_READ, str(path), KIND.decode()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60.0)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(OSError):
            read_headers(tmp_path / name, KIND)


def test_a_header_of_an_impossible_length_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "MAX_HEADER_BYTES", 5)
    write(tmp_path / "file", 3)
    assert read(tmp_path / "file") == []


def test_a_rewrite_that_fails_leaves_the_file_as_it_is_and_no_other(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "file", KIND)
    place = writer.append(b"header", [b"body"])
    beyond = RecordPlace(start=place.end, body=place.end, end=place.end + 10, body_crc=0)
    with pytest.raises(OSError, match="shorter"):
        writer.rewrite([place, beyond])
    writer.append(b"more", [b""])
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert [header for header, _ in read(tmp_path / "file")] == [b"header", b"more"]
