"""The journal of a rollout worker: what it writes is read again; what is not needed any more leaves the disk."""

import asyncio
from collections.abc import Callable
from pathlib import Path

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
    return [NewPart(slot, sample, PROMPT, start, kept)]


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


def assert_same(found: KeptTokens | None, expected: KeptTokens) -> None:
    assert found is not None
    assert torch.equal(found.prefix.tokens, expected.prefix.tokens)
    assert torch.equal(found.prefix.logprobs, expected.prefix.logprobs)
    assert (found.prefix.spans, found.is_complete) == (expected.prefix.spans, expected.is_complete)
    assert (found.prefix.support is None) == (expected.prefix.support is None)
    if found.prefix.support is not None and expected.prefix.support is not None:
        assert torch.equal(found.prefix.support.tokens_E, expected.prefix.support.tokens_E)
        assert torch.equal(found.prefix.support.counts_T, expected.prefix.support.counts_T)


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
    accepted: list[bool] = []

    def work(journal: Journal) -> None:
        accepted.extend(journal.add(part(slot, key(slot), 0, tokens(50))) for slot in range(5))

    written(tmp_path, work)
    assert accepted == [True, True, False, False, False]


def test_the_name_of_a_worker_stays_within_the_journals() -> None:
    assert journal_of("journals/1", "rollout-0") == "journals/1/rollout-0"
    assert journal_of("journals/1", "../../etc") == "journals/1/%2E.%2F..%2Fetc"
    assert journal_of("journals/1", "..") == "journals/1/%2E."
