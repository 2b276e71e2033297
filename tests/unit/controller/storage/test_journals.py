"""Which samples of the journals are kept when a run is resumed, and why the others are discarded."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from flowrt.controller.state.kept_samples import TOO_OLD, KeptSample
from flowrt.controller.storage.journals import (
    AFTER_CHECKPOINT,
    DAMAGED,
    OTHER_ATTEMPT,
    FoundSamples,
    delete_outdated,
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
    for one in parts:
        writer.append(to_blob(one), [])
    writer.close()


def found(run_dir: Path, starts: Sequence[int], bound: int = 1, passed: frozenset[int] = frozenset()) -> FoundSamples:
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
    kept = found(tmp_path, [0, 5], passed=frozenset({0}))
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
    kept = found(tmp_path, [0, 4, 6], bound=2)
    assert {one.prompt for one in kept.kept} == {2, 3}
    assert kept.discarded == Counter({AFTER_CHECKPOINT: 1})


def test_the_most_of_a_sample_is_kept_once(tmp_path: Path) -> None:
    write(tmp_path / "journals/1/a/0.journal", [part(1, (0, 9), complete=False), part(2, (0, 9), complete=False)])
    write(tmp_path / "journals/1/b/0.journal", [part(1, (0, 7)), part(2, (0, 4), complete=False)])
    kept = found(tmp_path, [0, 0])
    assert {one.prompt: one.journal for one in kept.kept} == {
        1: "journals/1/b/0.journal",
        2: "journals/1/a/0.journal",
    }


def test_parts_after_a_gap_are_left_out(tmp_path: Path) -> None:
    parts = [part(1, (0, 3), complete=False), part(1, (0, 9), start=6), part(2, (0, 3), start=1)]
    write(tmp_path / "journals/1/a/0.journal", parts)
    kept = found(tmp_path, [0, 0])
    assert [one.prompt for one in kept.kept] == [1]
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
    kept = found(tmp_path, [0, 0])
    assert {one.prompt for one in kept.kept} == {1, 3}
    assert kept.discarded == Counter({DAMAGED: 2})


def test_files_of_which_nothing_is_kept_are_deleted_and_those_of_this_start_are_not(tmp_path: Path) -> None:
    write(tmp_path / "journals/1/a/0.journal", [part(1, (0, 3))])
    write(tmp_path / "journals/1/b/0.journal", [part(2, (0, 3))])
    write(tmp_path / "journals/2/a/0.journal", [part(4, (0, 3))])
    write(tmp_path / "journals/3/a/0.journal", [part(3, (9, 3))])
    found(tmp_path, [0, 0, 0], passed=frozenset({1, 4}))
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
    delete_outdated(tmp_path, {"journals/2/running"}, lambda newest: newest >= 5)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.journal"))
    assert left == ["journals/2/gone/0.journal", "journals/2/running/1.journal"]
