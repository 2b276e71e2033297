"""Reading the ledger: during the run, after it, and when the file is not a ledger."""

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrt.cli import main
from flowrt.controller.events import AppendLedger
from flowrt.controller.storage.ledger import Ledger
from flowrt.controller.storage.reader import LedgerReader
from flowrt.errors import ConfigError


def write_ledger(path: Path) -> Ledger:
    """The open ledger of a run that was resumed once."""
    ledger = Ledger(path)
    ledger.resume(0, 10.0)
    for at_s, state in ((11.0, "in_flight"), (12.0, "ready"), (12.5, "leased"), (13.0, "trained")):
        ledger.add(AppendLedger(17, 0, state, 2), at_s)
    ledger.add(AppendLedger(prompt=18, epoch=0, state="dropped", step=0, reason="its source left"), 13.0)
    ledger.resume(1, 100.0)
    ledger.add(AppendLedger(17, 0, "in_flight", 1), 101.5)
    ledger.add(AppendLedger(17, 1, "in_flight", 1), 102.0)
    ledger.commit()
    return ledger


def read_output(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_counts_and_histories_are_readable_during_the_run_and_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = write_ledger(tmp_path / "ledger.sqlite")
    for in_progress in (True, False):
        before = sorted(path.name for path in tmp_path.iterdir())
        assert main(["ledger", str(tmp_path)]) == 0
        output = read_output(capsys)
        assert "in_flight 2 " in output
        assert "dropped 1 " in output
        assert "1 dropped: its source left" in output
        assert "all 3 " in output
        assert main(["ledger", str(tmp_path), "--prompt", "17", "--epoch", "0"]) == 0
        output = read_output(capsys)
        assert "prompt 17: in_flight in epoch 0" in output
        assert "0 1 3.000 2 trained" in output
        assert "unread rolled back: trained in step 2" in output
        assert "0 2 1.500 1 in_flight" in output
        assert main(["ledger", str(tmp_path), "--prompt=17"]) == 0
        assert "in_flight in epoch 0, in_flight in epoch 1" in read_output(capsys)
        # Reading creates no files.
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        if in_progress:
            ledger.close()


def test_prompts_of_a_count_are_listed_newest_first(tmp_path: Path) -> None:
    ledger = write_ledger(tmp_path / "ledger.sqlite")
    for prompt in range(100, 105):
        reason = "reward <b>timeout" if prompt % 2 else "its source left"
        ledger.add(AppendLedger(prompt, 0, "dropped", 1, reason), 200.0 + prompt)
    ledger.commit()
    with LedgerReader(tmp_path / "ledger.sqlite") as reader:
        found, total = reader.prompts("dropped", "", 3)
        assert ([one.prompt for one in found], total) == ([104, 103, 102], 6)
        found, total = reader.prompts("dropped", "", 3, 3)
        assert ([one.prompt for one in found], total) == ([101, 100, 18], 6)
        found, total = reader.prompts("dropped", "reward <b>timeout", 9)
        assert ([(one.prompt, one.reason) for one in found], total) == (
            [(103, "reward <b>timeout"), (101, "reward <b>timeout")],
            2,
        )
        assert [reader.reasons()[reason] for reason in ("reward <b>timeout", "its source left")] == [2, 4]
        assert reader.prompts("dropped' OR 1", "", 9) == ([], 0)
        assert len(reader.prompts("in_flight", "", 9)[0]) == reader.states()["in_flight"]
    ledger.close()


def test_committed_records_of_a_killed_controller_are_read(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "copy").mkdir()
    ledger = write_ledger(tmp_path / "run" / "ledger.sqlite")
    for path in (tmp_path / "run").iterdir():
        shutil.copy(path, tmp_path / "copy" / path.name)  # as after a kill: not closed
    ledger.close()
    with LedgerReader(tmp_path / "copy" / "ledger.sqlite") as reader:
        assert reader.states() == {"in_flight": 2, "dropped": 1}


def test_a_prompt_that_was_never_offered_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_ledger(tmp_path / "ledger.sqlite").close()
    assert main(["ledger", str(tmp_path), "--prompt", "99"]) == 2
    assert "prompt 99 has not been offered: it is unread" in capsys.readouterr().err
    assert main(["ledger", str(tmp_path), "--prompt", "17", "--epoch", "5"]) == 2
    assert "prompt 17 has not been offered in epoch 5" in capsys.readouterr().err
    assert main(["ledger", str(tmp_path), "--epoch", "5"]) == 2


def no_database(path: Path) -> None:
    path.write_text("something else, long enough to be looked at " * 100)


def foreign(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE prompts (name TEXT)")
    database.commit()
    database.close()


def truncated(path: Path) -> None:
    write_ledger(path).close()
    path.write_bytes(path.read_bytes()[:6000])


def empty(path: Path) -> None:
    path.touch()


@pytest.mark.parametrize("damage", [no_database, foreign, truncated, empty])
def test_a_file_that_is_not_a_ledger_is_an_error(
    damage: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(tmp_path / "ledger.sqlite")
    assert main(["ledger", str(tmp_path)]) == 2
    output = capsys.readouterr().err
    assert "ledger.sqlite is not a ledger of a flowrt run, or is damaged" in output
    assert len(output.splitlines()) == 1


def test_a_missing_file_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there"):
        LedgerReader(tmp_path / "ledger.sqlite")
    assert not list(tmp_path.iterdir())
