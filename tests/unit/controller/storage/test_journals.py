"""Which samples of the journals are kept when a run is resumed, and why the others are discarded."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from flowrt.controller.state.kept_samples import TOO_OLD, KeptSample
from flowrt.controller.storage.journals import (
    AFTER_CHECKPOINT,
    DAMAGED,
    OTHER_ATTEMPT,
    FoundSamples,
    delete_journals,
    delete_unknown,
    find_outdated,
    journal_bytes,
    kept_summary,
    read_journals,
)
from flowrt.protocol.codec import to_blob
from flowrt.protocol.journals import KIND, SamplePart
from flowrt.runtime.record_file import RecordWriter


def part(prompt: int, spans: tuple[int, ...], *, start: int = 0, complete: bool = True, attempt: int = 0) -> SamplePart:
    count = sum(spans[1::2]) - start
    return SamplePart(0, prompt, 0, attempt, 0, start, count, spans, complete, False, ())


def write(path: Path, parts: Sequence[SamplePart]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = RecordWriter(path, KIND)
    for record in parts:
        writer.append(to_blob(record), [])
    writer.close()


def read_kept(
    run_dir: Path, starts: Sequence[int], bound: int = 1, passed: frozenset[int] = frozenset()
) -> FoundSamples:
    return read_journals(run_dir, starts, {0: passed}, lambda oldest: starts[-1] - oldest <= bound)


def test_what_the_resumed_run_can_train_is_kept_and_the_rest_counted_by_reason(tmp_path: Path) -> None:
    write(
        tmp_path / "journals/1/rollout-0/0.journal",
        [
            part(0, (4, 5)),  # trained
            part(1, (4, 5)),
            part(2, (4, 5, 5, 2), complete=False),
            part(3, (4, 5, 6, 2)),  # version 6 was made after the checkpoint
            part(4, (3, 5)),  # too old for step 5
            part(5, (5, 5), attempt=1),
        ],
    )
    kept = read_kept(tmp_path, [0, 5], passed=frozenset({0}))
    name = "journals/1/rollout-0/0.journal"
    assert kept.kept == (KeptSample(0, 1, 0, 4, name), KeptSample(0, 2, 0, 4, name))
    assert (kept.complete, kept.prefixes, kept.tokens) == (1, 1, 12)
    assert kept.discarded == Counter({AFTER_CHECKPOINT: 1, TOO_OLD: 1, OTHER_ATTEMPT: 1})
    summary = kept_summary({**kept.numbers(), "eval_first": 1.0}, {TOO_OLD: 2})
    assert summary == {
        "complete": 1,
        "prefixes": 1,
        "tokens": 12,
        "discarded": {AFTER_CHECKPOINT: 1, OTHER_ATTEMPT: 1, TOO_OLD: 3},
    }


def test_versions_that_an_earlier_resume_went_back_behind_are_never_kept(tmp_path: Path) -> None:
    """Versions 5 and 6 of the first start are others than those that were made after its checkpoint 4."""
    write(tmp_path / "journals/1/w/0.journal", [part(1, (6, 5)), part(2, (4, 5))])
    write(tmp_path / "journals/2/w/0.journal", [part(3, (6, 5))])
    kept = read_kept(tmp_path, [0, 4, 6], bound=2)
    assert {sample.prompt for sample in kept.kept} == {2, 3}
    assert kept.discarded == Counter({AFTER_CHECKPOINT: 1})


def test_the_most_of_a_sample_is_kept_once(tmp_path: Path) -> None:
    write(tmp_path / "journals/1/a/0.journal", [part(1, (0, 9), complete=False), part(2, (0, 9), complete=False)])
    write(tmp_path / "journals/1/b/0.journal", [part(1, (0, 7)), part(2, (0, 4), complete=False)])
    kept = read_kept(tmp_path, [0, 0])
    assert {sample.prompt: sample.journal for sample in kept.kept} == {
        1: "journals/1/b/0.journal",
        2: "journals/1/a/0.journal",
    }


def test_parts_after_a_gap_are_left_out(tmp_path: Path) -> None:
    parts = [part(1, (0, 3), complete=False), part(1, (0, 9), start=6), part(2, (0, 3), start=1)]
    write(tmp_path / "journals/1/a/0.journal", parts)
    kept = read_kept(tmp_path, [0, 0])
    assert [sample.prompt for sample in kept.kept] == [1]
    assert (kept.complete, kept.prefixes, kept.tokens) == (0, 1, 3)


def test_damaged_journals_cost_their_samples_only(tmp_path: Path) -> None:
    write(tmp_path / "journals/1/a/0.journal", [part(1, (0, 3)), part(2, (0, 3)), part(3, (0, 3))])
    path = tmp_path / "journals/1/a/0.journal"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    (tmp_path / "journals/1/b").mkdir()
    (tmp_path / "journals/1/b/0.journal").write_bytes(b"no journal at all")
    (tmp_path / "journals/x").mkdir()
    kept = read_kept(tmp_path, [0, 0])
    assert {sample.prompt for sample in kept.kept} == {1, 3}
    assert kept.discarded == Counter({DAMAGED: 2})


def test_files_of_which_nothing_is_kept_are_deleted_and_those_of_this_start_are_not(tmp_path: Path) -> None:
    write(tmp_path / "journals/1/a/0.journal", [part(1, (0, 3))])
    write(tmp_path / "journals/1/b/0.journal", [part(2, (0, 3))])
    write(tmp_path / "journals/2/a/0.journal", [part(4, (0, 3))])
    write(tmp_path / "journals/3/a/0.journal", [part(3, (9, 3))])
    read_kept(tmp_path, [0, 0, 0], passed=frozenset({1, 4}))
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == [
        "journals",
        "journals/1",
        "journals/1/b",
        "journals/1/b/0.journal",
        "journals/3",
        "journals/3/a",
        "journals/3/a/0.journal",
    ]


def test_journals_of_lost_workers_that_no_step_can_train_any_more_are_deleted(tmp_path: Path) -> None:
    for name in ("gone", "old", "running"):
        write(
            tmp_path / f"journals/2/{name}/0.journal", [part(1, (2, 3)), part(2, (2, 3, 5 if name == "gone" else 3, 1))]
        )
    write(tmp_path / "journals/2/running/1.journal", [part(3, (2, 3))])
    write(tmp_path / "journals/1/old/0.journal", [part(1, (1, 3))])
    delete_journals(find_outdated(tmp_path, {"journals/2/running"}, lambda newest: newest >= 5))
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.journal"))
    assert left == ["journals/2/gone/0.journal", "journals/2/running/1.journal"]


def test_files_that_killed_processes_left_half_written_are_deleted_and_those_of_running_ones_are_not(
    tmp_path: Path,
) -> None:
    for name in ("1/gone", "2/gone", "2/running"):
        write(tmp_path / "journals" / name / "0.journal", [part(1, (0, 3))])
        (tmp_path / "journals" / name / ".0.journal.part").write_bytes(b"half of it")
    read_kept(tmp_path, [0, 0])
    assert _partials(tmp_path) == ["journals/2/gone", "journals/2/running"]
    delete_journals(find_outdated(tmp_path, {"journals/2/running"}, lambda newest: True))
    assert _partials(tmp_path) == ["journals/2/running"]
    assert (tmp_path / "journals/2/gone/0.journal").exists()


def _partials(run_dir: Path) -> list[str]:
    return sorted(str(path.parent.relative_to(run_dir)) for path in run_dir.rglob(".*.part"))


def test_a_journal_that_is_still_needed_is_read_up_to_the_first_sample_that_needs_it(tmp_path: Path) -> None:
    write(tmp_path / "journals/1/gone/0.journal", [part(number, (number, 3)) for number in range(50)])
    asked: list[int] = []

    def may_train(newest: int) -> bool:
        asked.append(newest)
        return newest >= 4

    assert find_outdated(tmp_path, (), may_train) == []
    assert asked == [0, 1, 2, 3, 4]


def test_of_a_running_worker_the_file_of_the_highest_number_stays_and_links_to_nothing_do_no_harm(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "journals/1/running"
    for number in (9, 10):
        write(directory / f"{number}.journal", [part(1, (0, 3))])
    (directory / "8.journal").symlink_to(tmp_path / "nothing")
    os.utime(directory / "10.journal", (1, 1))
    delete_journals(find_outdated(tmp_path, {"journals/1/running"}, lambda newest: False))
    assert sorted(path.name for path in directory.iterdir()) == ["10.journal", "8.journal"]


def test_the_time_for_the_start_of_a_controller_follows_the_journals_that_it_reads(tmp_path: Path) -> None:
    assert journal_bytes(tmp_path) == 0
    for name in ("1/a", "1/b", "2/a"):
        path = tmp_path / "journals" / name / "0.journal"
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(1000))
    (tmp_path / "journals/2/a/1.journal").symlink_to("nothing")
    assert journal_bytes(tmp_path) == 3000


def test_journals_of_starts_that_the_run_has_not_had_are_deleted(tmp_path: Path) -> None:
    for attempt in (1, 2, 3, 11):
        write(tmp_path / f"journals/{attempt}/w/0.journal", [part(1, (0, 3))])
    (tmp_path / "journals/notes.txt").write_text("not a journal")
    delete_unknown(tmp_path, 2)
    assert sorted(path.name for path in (tmp_path / "journals").iterdir()) == ["1", "notes.txt"]
