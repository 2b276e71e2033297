"""Checksums of checkpoints: a damaged file is reported, with the intact checkpoint before it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from flowrt.errors import ConfigError
from flowrt.recipes.checkpoint_checksums import NAME, check_newest, damage, write_checksums
from flowrt.recipes.run_dir import checkpoint_dir


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with checkpoints after 8 and 12 steps."""
    for step in (8, 12):
        directory = checkpoint_dir(tmp_path, step)
        (directory / "nested").mkdir(parents=True)
        (directory / "weights.safetensors").write_bytes(bytes(range(256)) * 64 * step)
        (directory / "nested" / "more.json").write_text("{}")
        write_checksums(directory)
    return tmp_path


def truncate(directory: Path) -> None:
    path = directory / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def flip_bit(directory: Path) -> None:
    path = directory / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


def remove_file(directory: Path) -> None:
    (directory / "nested" / "more.json").unlink()


def remove_checksums(directory: Path) -> None:
    (directory / NAME).unlink()


def truncate_all(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")


def replace_by_file(directory: Path) -> None:
    truncate_all(directory)
    (directory / "nested" / "more.json").unlink()
    (directory / "nested").rmdir()
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    directory.write_text("not a directory")


@pytest.mark.parametrize("content", ["", "[]", "{}", "{half", "[" * 100_000])
def test_damaged_checksum_files_are_reported(run_dir: Path, content: str) -> None:
    (checkpoint_dir(run_dir, 12) / NAME).write_text(content)
    assert NAME in damage(checkpoint_dir(run_dir, 12))


def test_an_intact_checkpoint_is_accepted(run_dir: Path) -> None:
    assert damage(checkpoint_dir(run_dir, 12)) == ""
    check_newest(run_dir)


def test_a_run_without_checkpoints_is_accepted(tmp_path: Path) -> None:
    check_newest(tmp_path)


@pytest.mark.parametrize("inject", [truncate, flip_bit, remove_file, remove_checksums, truncate_all, replace_by_file])
def test_a_damaged_checkpoint_is_reported_with_the_last_intact_one(
    run_dir: Path, inject: Callable[[Path], None]
) -> None:
    inject(checkpoint_dir(run_dir, 12))
    with pytest.raises(
        ConfigError, match=r"step-000012 is damaged: .*; step-000008 before it is intact: remove step-0"
    ):
        check_newest(run_dir)
    inject(checkpoint_dir(run_dir, 8))
    with pytest.raises(ConfigError, match="there is no intact one before it"):
        check_newest(run_dir)


def test_an_older_damaged_checkpoint_is_ignored(run_dir: Path) -> None:
    flip_bit(checkpoint_dir(run_dir, 8))
    check_newest(run_dir)
