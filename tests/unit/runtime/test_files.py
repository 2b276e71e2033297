"""Files on disk: what stands in the way of writing one, in a sentence."""

import os
from pathlib import Path

import pytest

from flowrt.cli import main
from flowrt.controller.storage.integrity import open_read_only
from flowrt.controller.storage.ledger import Ledger
from flowrt.errors import ConfigError
from flowrt.runtime.files import RunLock, check_target, os_error_text


def test_a_writable_target_is_accepted_and_nothing_is_left(tmp_path: Path) -> None:
    check_target(tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_an_os_error_names_its_file_without_a_number() -> None:
    with pytest.raises(OSError) as error:
        Path("/proc/self/new").write_text("")
    assert os_error_text(error.value) == "/proc/self/new: No such file or directory"


def test_a_directory_that_takes_no_lock_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run directory .*/none cannot be locked: .*/none/\.lock: No such file"):
        RunLock(tmp_path / "none")


@pytest.mark.parametrize("words", [["run"], ["doctor"]])
def test_a_deleted_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert main(words) in (1, 2)
    assert capsys.readouterr().err.strip() == "flowrt: the working directory has been deleted; change to another"


def test_a_ledger_in_a_directory_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/x\xff"))
    folder.mkdir()
    Ledger(folder / "ledger.sqlite").close()
    open_read_only(folder / "ledger.sqlite").close()
