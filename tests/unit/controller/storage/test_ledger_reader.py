"""Reading the ledger: during the run, after it, and when the file is not a ledger."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrt.cli import main
from flowrt.controller.events import AppendLedger
from flowrt.controller.storage import integrity, ledger_reader
from flowrt.controller.storage.integrity import wal_path
from flowrt.controller.storage.ledger import Ledger
from flowrt.controller.storage.ledger_reader import LedgerReader
from flowrt.errors import ConfigError
from flowrt.recipes.config_io import read, to_toml
from flowrt.runtime import host


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
        prompts, total = reader.prompts("dropped", "", 3)
        assert ([row.prompt for row in prompts], total) == ([104, 103, 102], 6)
        prompts, total = reader.prompts("dropped", "", 3, 3)
        assert ([row.prompt for row in prompts], total) == ([101, 100, 18], 6)
        prompts, total = reader.prompts("dropped", "reward <b>timeout", 9)
        assert ([(row.prompt, row.reason) for row in prompts], total) == (
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


@pytest.mark.parametrize(
    ("flags", "prompt", "sentence"),
    [
        ((), "99", "prompt 99 has not been offered: it is unread"),
        ((), "120", "prompt 120 does not exist: the data has 120 prompts to train on, numbered from 0"),
        ((), str(1 << 41), f"prompt {1 << 41} does not exist: the data has 120 prompts to train on"),
        (("more",), "more:99", "prompt more:99 has not been offered: it is unread"),
        (("more",), "more:121", "prompt more:121 does not exist: data set more has 120 prompts to train on"),
        ((), "17", ""),
    ],
)
def test_a_prompt_beyond_the_data_does_not_exist(
    tmp_path: Path, flags: tuple[str, ...], prompt: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("few", "more"):
        rows = (json.dumps({"prompt": f"{name} {row}", "answer": "1"}) for row in range(124))
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows))
    sets = [f"--data=few={tmp_path}/few.jsonl", f"--data=more={tmp_path}/more.jsonl"]
    words = ["custom", "--model", str(tmp_path), "--reward", "exact", "--data.eval-prompts", "8" if flags else "4"]
    config = read([*words, *(sets if flags else [f"--data={tmp_path}/few.jsonl"])], "flowrt run")
    (tmp_path / "config.toml").write_text(to_toml(config))
    write_ledger(tmp_path / "ledger.sqlite").close()
    assert main(["ledger", str(tmp_path), "--prompt", prompt]) == (2 if sentence else 0)
    assert sentence in capsys.readouterr().err


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


@pytest.fixture
def on_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (integrity, ledger_reader):
        monkeypatch.setattr(module, "is_on_network", lambda _: True)


@pytest.mark.usefixtures("on_network")
def test_a_reader_on_a_shared_file_system_uses_no_memory_of_the_writer(tmp_path: Path) -> None:
    """As another host sees a live run: the file and its log, and memory that is not shared."""
    path, elsewhere = tmp_path / "ledger.sqlite", tmp_path / "elsewhere"
    ledger = write_ledger(path)
    ledger.flush()
    memory = path.with_name("ledger.sqlite-shm")
    elsewhere.mkdir()
    for file in (path, wal_path(path)):
        shutil.copy(file, elsewhere)
    before = memory.read_bytes()
    for place in (path, elsewhere / path.name):
        with LedgerReader(place) as ledger_reader:
            assert ledger_reader.states() == {"in_flight": 2, "dropped": 1}
            if place == path:
                ledger.add(AppendLedger(18, 1, "in_flight", 1), 103.0)  # no lock of the reader is in its way
                ledger.flush()
                assert ledger_reader.states() == {"in_flight": 2, "dropped": 1}, "the state at the time of the opening"
                after = memory.read_bytes()
    assert sorted(entry.name for entry in elsewhere.iterdir()) == ["ledger.sqlite", "ledger.sqlite-wal"]
    assert before != after == memory.read_bytes(), "only the writer wrote to it"
    with LedgerReader(path) as ledger_reader:
        assert ledger_reader.states() == {"in_flight": 3, "dropped": 1}
    ledger.close()


@pytest.mark.usefixtures("on_network")
def test_a_reader_without_locks_notices_that_the_log_was_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = write_ledger(path)
    ledger.flush()
    with LedgerReader(path) as ledger_reader:
        ledger_reader.states()
        ledger._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with pytest.raises(ConfigError, match="has changed while it was read over a network file system"):
            ledger_reader.states()
    ledger.close()


@pytest.mark.parametrize(
    ("place", "expected"), [("/home/a/run", True), ("/home/a b/run", True), ("/home/local/run", False), ("/x", False)]
)
def test_file_systems_of_several_hosts_are_recognized(
    place: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n"
        "30 22 0:40 / /home rw shared:2 - nfs4 server:/home rw,vers=4.2\n"
        "31 30 8:2 / /home/local rw - xfs /dev/sdb rw\n"
        "32 30 0:41 / /home/a\\040b rw - fuse.sshfs host:/ rw\n"
    )
    monkeypatch.setattr(host, "_MOUNTS", mounts)
    assert host.is_on_network(Path(place)) is expected
    monkeypatch.setattr(host, "_MOUNTS", tmp_path / "missing")
    assert not host.is_on_network(Path(place))
