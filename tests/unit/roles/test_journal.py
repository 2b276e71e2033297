"""The journal of a rollout worker: what it writes is read again; what is not needed any more leaves the disk."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch

from flowrt.algorithms.support import Support
from flowrt.engines.base import Prefix
from flowrt.protocol.journals import SampleKey, journal_of
from flowrt.roles import journal as journal_module
from flowrt.roles.journal import Journal, KeptJournals, KeptTokens, NewPart, prompt_checksum

PROMPT = torch.tensor([5, 6, 7], dtype=torch.int32)
CHECKSUM = prompt_checksum(PROMPT)


def key(prompt: int, member: int = 0) -> SampleKey:
    return SampleKey(0, prompt, member, 0)


def tokens(count: int, first: int = 0, *, complete: bool = False, support: bool = False) -> KeptTokens:
    ids = torch.arange(first, first + count, dtype=torch.int32)
    counts = torch.arange(count, dtype=torch.int32) % 3 + 1
    of_positions = Support(torch.arange(int(counts.sum()), dtype=torch.int32), counts) if support else None
    prefix = Prefix(ids, -ids.float(), (3, count), of_positions)
    return KeptTokens(prefix, is_complete=complete, truncated=complete)


def part(slot: int, sample: SampleKey, start: int, kept: KeptTokens) -> list[NewPart]:
    return [NewPart(slot, sample, PROMPT, kept.prefix.after(start), kept.is_complete, kept.truncated)]


def written(tmp_path: Path, work: Callable[[Journal], object], checkpoint: Callable[[], int] = lambda: 0) -> Path:
    """The directory of a journal after this work."""

    async def run() -> None:
        journal = Journal(tmp_path / "w", checkpoint)
        work(journal)
        await journal.close()

    asyncio.run(run())
    return tmp_path / "w"


def read(tmp_path: Path, prompt: int, journal: str = "w") -> KeptTokens | None:
    return KeptJournals(tmp_path).read(journal, key(prompt), CHECKSUM)


def assert_same(actual: KeptTokens | None, expected: KeptTokens) -> None:
    assert actual is not None
    assert torch.equal(actual.prefix.tokens, expected.prefix.tokens)
    assert torch.equal(actual.prefix.logprobs, expected.prefix.logprobs)
    assert (actual.prefix.spans, actual.is_complete) == (expected.prefix.spans, expected.is_complete)
    assert (actual.prefix.support is None) == (expected.prefix.support is None)
    if actual.prefix.support is not None and expected.prefix.support is not None:
        assert torch.equal(actual.prefix.support.tokens_E, expected.prefix.support.tokens_E)
        assert torch.equal(actual.prefix.support.counts_T, expected.prefix.support.counts_T)


@pytest.mark.parametrize("support", [False, True])
def test_a_sample_that_is_written_in_parts_is_read_as_a_whole(tmp_path: Path, support: bool) -> None:
    def work(journal: Journal) -> None:
        for start, end, complete in ((0, 4, False), (4, 5, False), (5, 9, True)):
            assert journal.add(part(1, key(7), start, tokens(end, complete=complete, support=support)))
        assert journal.add(part(2, key(8), 0, tokens(3, support=support)))

    written(tmp_path, work)
    assert_same(read(tmp_path, 7), tokens(9, complete=True, support=support))
    assert_same(read(tmp_path, 8), tokens(3, support=support))
    assert_same(read(tmp_path, 8, "w/0.journal"), tokens(3, support=support))
    assert read(tmp_path, 9) is None
    assert KeptJournals(tmp_path).read("w", key(7), CHECKSUM + 1) is None
    assert KeptJournals(tmp_path).read("w", SampleKey(0, 7, 0, 1), CHECKSUM) is None
    assert KeptJournals(tmp_path).read("no journal", key(7), CHECKSUM) is None


def test_a_sample_that_began_anew_and_a_later_process_come_before(tmp_path: Path) -> None:
    def first(journal: Journal) -> None:
        journal.add(part(1, key(7), 0, tokens(9)))
        journal.add(part(1, key(7), 0, tokens(2, 50)))
        journal.add(part(2, key(8), 0, tokens(4)))

    written(tmp_path, first)
    assert_same(read(tmp_path, 7), tokens(2, 50))
    written(tmp_path, lambda journal: journal.add(part(2, key(8), 0, tokens(4, 20))))
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["0.journal", "1.journal"]
    assert_same(read(tmp_path, 8), tokens(4, 20))


def test_a_damaged_part_costs_the_tokens_from_it_on(tmp_path: Path) -> None:
    def work(journal: Journal) -> None:
        for start, end, complete in ((0, 300, False), (300, 600, False), (600, 900, True)):
            journal.add(part(1, key(7), start, tokens(end, complete=complete)))

    [path] = written(tmp_path, work).iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert_same(read(tmp_path, 7), tokens(300))


def test_what_is_not_needed_leaves_the_disk_but_for_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SLACK_BYTES", 0)
    checkpoint = 0

    def first(journal: Journal) -> None:
        for prompt in range(40):
            journal.add(part(prompt, key(prompt), 0, tokens(500, complete=True)))

    def work(journal: Journal) -> None:
        nonlocal checkpoint
        first(journal)
        journal.release(tuple(range(10)))  # their version, 3, is newer than the checkpoint
        journal._thread.submit(set_checkpoint, 5)
        journal.release(tuple(range(10, 39)))
        journal.add(part(99, key(99), 0, tokens(10)))

    def set_checkpoint(step: int) -> None:
        nonlocal checkpoint
        checkpoint = step

    [path] = written(tmp_path, work, lambda: checkpoint).iterdir()
    size = path.stat().st_size
    assert all(read(tmp_path, prompt) is not None for prompt in (*range(10, 40), 99))

    def more(journal: Journal) -> None:
        work(journal)
        journal._thread.submit(set_checkpoint, 6)
        journal.release((99,))

    checkpoint = 0
    later = max(written(tmp_path, more, lambda: checkpoint).iterdir())
    assert later.stat().st_size * 5 < size
    assert KeptJournals(tmp_path).read(f"w/{later.name}", key(39), CHECKSUM) is not None
    assert KeptJournals(tmp_path).read(f"w/{later.name}", key(20), CHECKSUM) is None


def test_a_disk_that_fails_ends_the_journal_and_not_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "w").write_text("a file in place of the directory")

    def work(journal: Journal) -> None:
        journal.add(part(1, key(7), 0, tokens(4)))
        journal.release((1,))

    written(tmp_path, work)
    assert caplog.text.count("cannot be written") == 1


def test_a_disk_that_lags_behind_bounds_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_PENDING_BYTES", 1000)
    accepted: list[int] = []

    def work(journal: Journal) -> None:
        accepted.extend(journal.add(part(slot, key(slot), 0, tokens(50))) for slot in range(5))

    written(tmp_path, work)
    assert accepted == [1, 1, 0, 0, 0]


def test_supports_count_towards_the_memory_of_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_PENDING_BYTES", 2500)
    accepted: list[int] = []

    def work(journal: Journal) -> None:
        parts = [record for slot in range(5) for record in part(slot, key(slot), 0, tokens(50, support=True))]
        assert parts[0].size == 50 * (4 + 4 + 4) + 4 * 99
        accepted.append(journal.add(parts))
        accepted.append(journal.add(parts[2:]))
        accepted.append(journal.add(parts[3:], is_last=True))

    written(tmp_path, work)
    assert accepted == [2, 0, 2]
    assert [read(tmp_path, prompt) is not None for prompt in range(5)] == [True, True, False, True, True]


def test_a_part_holds_only_its_own_tokens_in_memory() -> None:
    [new] = part(1, key(7), 9000, tokens(9010, support=True))
    assert {name: len(values) for name, values in new.columns.items()} == {
        "response": 10,
        "logprobs": 10,
        "support_counts": 10,
        "support": sum(at % 3 + 1 for at in range(9000, 9010)),
    }
    assert all(values.untyped_storage().nbytes() == values.nbytes for values in new.columns.values())


def test_a_part_of_any_size_is_written_while_no_other_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_PENDING_BYTES", 100)
    written(tmp_path, lambda journal: journal.add(part(1, key(7), 0, tokens(50))))
    assert_same(read(tmp_path, 7), tokens(50))


def test_what_is_left_of_a_killed_process_that_rewrote_its_journal_is_deleted(tmp_path: Path) -> None:
    written(tmp_path, lambda journal: journal.add(part(1, key(7), 0, tokens(4))))
    (tmp_path / "w" / ".0.journal.part").write_bytes(b"half of it")
    written(tmp_path, lambda journal: journal.add(part(1, key(8), 0, tokens(4))))
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["0.journal", "1.journal"]


def test_a_file_that_cannot_be_read_does_not_hide_the_others_of_its_worker(tmp_path: Path) -> None:
    written(tmp_path, lambda journal: journal.add(part(1, key(7), 0, tokens(4))))
    (tmp_path / "w" / "1.journal").mkdir()
    os.mkfifo(tmp_path / "w" / "2.journal")
    assert_same(read(tmp_path, 7), tokens(4))


def test_after_a_file_is_rewritten_the_last_of_a_sample_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot was freed, and the sample made again by the same worker."""
    monkeypatch.setattr(journal_module, "SLACK_BYTES", 0)

    def work(journal: Journal) -> None:
        journal.add(part(9, key(9), 0, tokens(2000, complete=True)))
        journal.add(part(1, key(7), 0, tokens(4)))
        journal.release((1,))
        journal.add(part(1, key(7), 0, tokens(4, 50)))
        journal._thread.submit(steps.append, 2)
        journal.release((9,))  # is newer than this checkpoint, so that the file is rewritten
        journal.add(part(1, key(7), 4, tokens(6, 50)))

    steps = [3]
    written(tmp_path, work, lambda: steps[-1])
    assert_same(read(tmp_path, 7), tokens(6, 50))


def test_any_failure_of_the_thread_ends_the_journal_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(journal: Journal) -> None:
        [new] = part(1, key(7), 0, tokens(4))
        wrong = replace(new.tokens, spans=cast(tuple[int, ...], (object(),)))
        journal.add([replace(new, tokens=wrong)])
        journal.add(part(2, key(8), 0, tokens(4)))

    written(tmp_path, work)
    assert caplog.text.count("cannot be written") == 1


def test_the_name_of_a_worker_stays_within_the_journals() -> None:
    assert journal_of("journals/1", "rollout-0") == "journals/1/rollout-0"
    assert journal_of("journals/1", "../../etc") == "journals/1/%2E.%2F..%2Fetc"
    assert journal_of("journals/1", "..") == "journals/1/%2E."


def test_the_places_of_a_limited_number_of_parts_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MAX_READ_PARTS", 5)

    def add_twice(prompt: int, journal: Journal) -> None:
        for _ in range(2):
            journal.add(part(prompt, key(prompt), 0, tokens(4)))

    for prompt in range(4):
        directory = tmp_path / str(prompt)
        directory.mkdir()
        written(directory, partial(add_twice, prompt))
    journals = KeptJournals(tmp_path)
    for prompt in (0, 1, 2, 3, 0):
        assert_same(journals.read(f"{prompt}/w", key(prompt), CHECKSUM), tokens(4))
        assert sum(file.parts for file in journals._files.values()) <= 5
    assert len(journals._files) == 2
    monkeypatch.setattr(journal_module, "MAX_READ_PARTS", 1)
    assert_same(journals.read("1/w", key(1), CHECKSUM), tokens(4))
    assert len(journals._files) == 1


def test_of_several_journals_the_most_of_a_sample_is_read(tmp_path: Path) -> None:
    for name, kept in (("a", tokens(4)), ("b", tokens(6)), ("c", tokens(6, 50)), ("d", tokens(2, complete=True))):
        (tmp_path / name).mkdir()
        written(tmp_path / name, partial(Journal.add, parts=part(1, key(7), 0, kept)))
    assert_same(read(tmp_path, 7, "nothing\na/w\nb/w\nc/w"), tokens(6))
    assert_same(read(tmp_path, 7, "c/w/0.journal\nb/w"), tokens(6, 50))
    assert_same(read(tmp_path, 7, "a/w\nb/w\nc/w\nd/w"), tokens(2, complete=True))
