"""Lines of a run: whole lines only, whatever a killed process or a full disk has left."""

import os
from pathlib import Path

import pytest

from flowrt.runtime.run_lines import LineWriter


@pytest.mark.parametrize("partial", [b"", b"{", b'{"text": "' + b"a" * 200_000])
def test_the_part_of_a_line_of_a_killed_process_is_removed(partial: bytes, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n' + partial)
    writer = LineWriter(path)
    assert writer.add({"b": 2}) == '{"b": 2}'
    assert writer.lines() == path.read_bytes().splitlines() == [b'{"a": 1}', b'{"b": 2}']
    writer.close()
    writer.add({"c": 3})
    assert len(path.read_bytes().splitlines()) == 2


def test_a_file_without_a_whole_line_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"x" * 70_000)
    writer = LineWriter(path)
    writer.add({"a": 1})
    assert path.read_bytes() == b'{"a": 1}\n'
    writer.close()


def test_nothing_is_written_after_a_failure(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "lines.jsonl")
    own, full = os.dup(writer._fd), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer._fd)
    writer.add({"a": 1})
    assert writer.error is not None
    os.dup2(own, writer._fd)
    writer.add({"b": 2})
    assert writer.lines() == []
    writer.close()
    os.close(own)
    os.close(full)


def test_lines_are_replaced_and_followed_by_others(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "lines.jsonl")
    for number in range(3):
        writer.add({"n": number})
    writer.replace(writer.lines()[1:])
    writer.add({"n": 3})
    assert writer.lines() == [b'{"n": 1}', b'{"n": 2}', b'{"n": 3}']
    assert os.stat(tmp_path / "lines.jsonl").st_mode & 0o777 == 0o600
    writer.close()
