"""The sample store: joined records, resumed runs, its size, and failures of the disk."""

import random
import sqlite3
import stat
import struct
import threading
import zlib
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from flowrt.controller.storage import sample_store
from flowrt.controller.storage.sample_store import SAMPLES, GroupEnd, SampleStore, SampleWriter
from flowrt.errors import FlowError
from flowrt.observability.stored_samples import ANY_EVALUATION, SampleFilter, SampleReader, SampleRow
from flowrt.protocol.messages import MAX_RECORD_BYTES
from flowrt.protocol.sample_records import (
    GeneratedSample,
    GroupChoice,
    SampleRecord,
    ScoredSample,
    TrainedSample,
    decode_record,
    encode_record,
    messages,
    pack_text,
)

TOKENS = 3


def scored(
    prompt: int = 1,
    member: int = 0,
    *,
    flow: str = "train",
    version: int = 0,
    reason: str = "",
    is_single: bool = False,
    completion: str = "an answer",
    reward: float = 0.5,
) -> ScoredSample:
    return ScoredSample(
        flow=flow,
        eval_name="held_out" if flow == "eval" else "",
        epoch=0,
        prompt=prompt,
        member=member,
        attempt=0,
        reward=reward,
        parts=(("exact", reward),),
        finish="length" if is_single else "stop",
        reason=reason,
        is_single=is_single,
        spans=(version, TOKENS),
        reward_s=0.01,
        data=(pack_text("a prompt"), pack_text(completion), struct.pack("<3i", 4, 5, 6)),
    )


def trained(prompt: int = 1, member: int = 0, step: int = 7) -> TrainedSample:
    logprobs, trainer_logprobs = struct.pack("<3e", -0.5, -1.0, -1.5), struct.pack("<3e", -0.25, -1.0, -2.0)
    return TrainedSample(step, 0, prompt, member, 0, 1.25, (logprobs, trainer_logprobs))


def generated() -> GeneratedSample:
    return GeneratedSample(0, 1, 0, 0, 0.75)


def data(record: SampleRecord) -> bytes:
    encoded = encode_record(record)
    assert encoded is not None
    return encoded


def writer(
    path: Path, *, per_step: int = 32, max_bytes: int = 1 << 30, run_attempt: int = 1, step: int = 0
) -> SampleWriter:
    return SampleWriter(path / SAMPLES, per_step=per_step, max_bytes=max_bytes, run_attempt=run_attempt, step=step)


def rows(path: Path, eval_name: str = "") -> tuple[SampleRow, ...]:
    return SampleReader(path).query(SampleFilter(eval_name=eval_name), limit=1_000_000).samples


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_records_of_a_sample_are_joined_in_any_order(tmp_path: Path, order: tuple[int, ...]) -> None:
    store = writer(tmp_path)
    records = [
        ([(data(scored()), 6)], []),
        ([(data(trained()), 6), (data(generated()), 6)], []),
        ([], [GroupEnd(0, 1, 7)]),
    ]
    for at in order:
        assert not store.write(*records[at])
    store.close()
    [row] = rows(tmp_path)
    sample = SampleReader(tmp_path).get(row.id)
    assert sample is not None
    assert (row.step, row.advantage, row.reward, row.parts) == (7, 1.25, 0.5, {"exact": 0.5})
    assert (row.prompt_text, row.completion, row.finish, row.tokens) == ("a prompt", "an answer", "stop", TOKENS)
    assert (sample.ids, sample.logprobs) == ((4, 5, 6), (-0.5, -1.0, -1.5))
    assert sample.trainer_logprobs == (-0.25, -1.0, -2.0)
    assert sample.versions() == (0, 0, 0)
    assert (row.staleness, row.generate_s, row.reward_s) == (7, 0.75, 0.01)
    assert not row.reason


def test_a_drop_reason_applies_to_samples_without_their_own_reason(tmp_path: Path) -> None:
    store = writer(tmp_path)
    store.write([(data(scored(member=0, reason="timeout: f.py took more than 10 s")), 3), (data(scored(member=1)), 3)])
    store.write([], [GroupEnd(0, 1, 4, "lost: timeout; that was attempt 3")])
    store.write([(data(scored(member=2)), 5)])  # it arrives after the prompt was dropped
    store.close()
    reader = SampleReader(tmp_path)
    by_member = {row.member: row for row in rows(tmp_path)}
    assert by_member[0].reason.startswith("timeout: f.py")
    assert by_member[1].reason == by_member[2].reason == "lost: timeout; that was attempt 3"
    assert {row.step for row in by_member.values()} == {4}
    assert reader.query(SampleFilter(reason="timeout")).total == 1
    assert reader.query(SampleFilter(reason="lost")).total == 2
    assert reader.reasons() == {"timeout": 1, "lost": 2}


def test_filtered_groups_are_limited_to_per_step_rows(tmp_path: Path) -> None:
    store = writer(tmp_path, per_step=8)
    for prompt in range(5):
        store.write([(data(scored(prompt, member)), 0) for member in range(4)])
        store.write([], [GroupEnd(0, prompt, 0, "filtered: all rewards are equal")])
    store.write([(data(scored(5, member)), 0) for member in range(4)], [GroupEnd(0, 5, 0)])
    store.close()
    assert SampleReader(tmp_path).reasons() == {"filtered": 8}
    assert {row.prompt for row in rows(tmp_path)} == {0, 1, 5}
    assert SampleReader(tmp_path).left_out() == {"of filtered groups": 12}


def test_truncated_samples_of_other_groups_are_limited_per_step(tmp_path: Path) -> None:
    store = writer(tmp_path)
    store.write(
        [(data(scored(prompt, is_single=True)), step) for step in (0, 1) for prompt in range(20 * step, 20 * step + 20)]
    )
    store.close()
    assert Counter(row.step for row in rows(tmp_path)) == {0: 8, 1: 8}
    assert SampleReader(tmp_path).left_out() == {"truncated": 24}


def test_a_sample_that_is_scored_twice_has_one_row(tmp_path: Path) -> None:
    store = writer(tmp_path)
    store.write([(data(scored(reward=0.0)), 0), (data(trained()), 0), (data(scored(reward=1.0)), 0)])
    store.close()
    [row] = rows(tmp_path)
    assert (row.reward, row.advantage, row.step) == (1.0, 1.25, 7)


def test_evaluation_samples_of_each_version_have_their_own_rows(tmp_path: Path) -> None:
    store = writer(tmp_path)
    store.write([(data(scored(flow="eval", version=version)), 3) for version in (0, 10)])
    store.close()
    assert [row.step for row in rows(tmp_path, "held_out")] == [10, 0]
    assert rows(tmp_path) == ()
    assert SampleReader(tmp_path).evaluations() == ("held_out",)
    assert SampleReader(tmp_path).steps(ANY_EVALUATION) == (0, 10)


def test_samples_of_rolled_back_steps_are_kept_and_marked(tmp_path: Path) -> None:
    first = writer(tmp_path)
    first.write([(data(scored(step)), step) for step in range(4)], [GroupEnd(0, step, step) for step in range(4)])
    first.close()
    second = writer(tmp_path, run_attempt=2, step=2)
    second.write([(data(scored(2)), 2)], [GroupEnd(0, 2, 2)])
    second.close()
    rolled_back = {(row.step, row.run_attempt): row.rolled_back for row in rows(tmp_path)}
    assert rolled_back == {(0, 1): False, (1, 1): False, (2, 1): True, (3, 1): True, (2, 2): False}
    reader = SampleReader(tmp_path)
    assert reader.run_attempts() == ((1, 0), (2, 2))
    assert reader.query(SampleFilter(with_rolled_back=False)).total == 3


def test_malformed_records_are_counted_and_change_nothing_else(tmp_path: Path) -> None:
    valid = data(scored())
    malformed = [
        *(b"", b"s", b"t", b"x" + valid, valid[:-1], valid + b"\x00", b"s\xc1", b"\xff" * 100),
        data(replace(scored(), reward=float("nan"))),
        data(replace(scored(), parts=(("a", float("inf")),))),
        data(replace(scored(), flow="other")),
        data(replace(scored(), finish="other")),
        data(replace(scored(), epoch=-1)),
        data(replace(scored(), spans=(1,))),
        data(replace(scored(), spans=(0, 2**62))),
        data(replace(scored(), data=(b"", b"t", b""))),
        data(replace(scored(), data=(b"z not zlib", b"t", b""))),
        data(replace(scored(), data=(b"t\xff", b"t", b""))),
        data(replace(scored(), data=(b"t", b"t", b"abc"))),
        data(replace(trained(), advantage=float("nan"))),
        data(replace(generated(), generate_s=float("nan"))),
        data(replace(generated(), generate_s=-1.0)),
        data(replace(trained(), data=(b"a", b""))),
    ]
    store = writer(tmp_path)
    assert not store.write([(each, 0) for each in [*malformed, valid]])
    store.close()
    assert len(rows(tmp_path)) == 1
    assert SampleReader(tmp_path).left_out() == {"malformed": len(malformed)}
    for each in malformed[:8]:
        with pytest.raises(FlowError):
            decode_record(each)


def test_a_text_that_decompresses_to_too_many_bytes_is_malformed(tmp_path: Path) -> None:
    bomb = replace(scored(), data=(pack_text("x"), b"z" + zlib.compress(bytes(1 << 26)), b""))
    store = writer(tmp_path)
    store.write([(data(bomb), 0)])
    store.close()
    assert SampleReader(tmp_path).left_out() == {"malformed": 1}


def test_the_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    store = writer(tmp_path)
    store.write([(data(scored()), 0)])
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    store.close()


# ---- size


def test_the_size_is_bounded_and_flagged_samples_are_deleted_last(tmp_path: Path) -> None:
    limit = 400_000
    store = writer(tmp_path, max_bytes=limit)
    steps = 600
    for step in range(steps):
        records = [scored(step, member, completion=f"{step} " * 100) for member in range(4)]
        records[0] = replace(records[0], reason="timeout: it took too long" if step % 10 == 0 else "")
        store.write([(data(record), step) for record in records], [GroupEnd(0, step, step)])
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) < limit + 2_300_000  # and the log
    store.close()
    assert (tmp_path / SAMPLES).stat().st_size <= limit + 32_768
    stored = rows(tmp_path)
    assert {row.prompt for row in stored if row.reason} == {*range(0, steps, 10)}
    newest = {row.step for row in stored if not row.reason}
    assert {*range(steps - 50, steps)} <= newest, "the last 50 steps are whole"
    assert 10 < len(newest - {*range(steps - 50, steps)}) < steps / 2, "older ones are thinned, and not all gone"
    left_out = SampleReader(tmp_path).left_out()
    assert left_out == {"deleted": 4 * steps - len(stored)}


def test_flagged_samples_are_deleted_if_no_others_are_left(tmp_path: Path) -> None:
    limit = 200_000
    store = writer(tmp_path, max_bytes=limit)
    for step in range(300):
        store.write(
            [(data(scored(step, member, reason="error: x", completion=f"{step} " * 100)), step) for member in range(4)]
        )
    store.close()
    assert (tmp_path / SAMPLES).stat().st_size <= limit + 32_768
    assert max(row.step for row in rows(tmp_path)) == 299


# ---- limits of the event loop's side


@pytest.mark.slow
def test_records_over_the_rate_limit_are_counted_and_not_queued(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / SAMPLES, per_step=32, max_bytes=1 << 30)
    store.begin(1, 0)
    text = "".join(chr(0x4E00 + number * 7919 % 20_000) for number in range(60_000))  # hardly compressible
    records = [data(scored(prompt, completion=text)) for prompt in range(100)]
    assert len(records[0]) > 100_000
    for record in records:
        store.add([record], 0, now=10.0)
    taken = sample_store.BURST_BYTES // len(records[0])
    store.add([records[0]], 0, now=10.0 + 1.1 * len(records[0]) / sample_store.BYTES_PER_S)
    assert store.close() == []
    assert len(rows(tmp_path)) == taken
    assert SampleReader(tmp_path).left_out() == {"over the rate": 100 - taken}


MEMBERS, LENGTH = 64, 32_000
KEYS = random.Random(0)
LONG_TEXT = KEYS.randbytes(LENGTH * 2).hex()
"""Four characters a token; it compresses to about half, as answers do."""
LONG_IDS = KEYS.randbytes(LENGTH * 4)
LONG_LOGPROBS = KEYS.randbytes(LENGTH * 2)


def long_group(prompt: int) -> tuple[list[bytes], list[bytes]]:
    """Records of a group of 64 samples of 32,000 tokens: of the reward worker, and of the trainer."""
    text = pack_text(LONG_TEXT)
    sample = replace(scored(prompt), spans=(0, LENGTH), data=(pack_text("a prompt"), text, LONG_IDS))
    other = replace(trained(prompt), data=(LONG_LOGPROBS, LONG_LOGPROBS))
    members = range(MEMBERS)
    return [data(replace(sample, member=member)) for member in members], [
        data(replace(other, member=member)) for member in members
    ]


def test_a_group_of_64_long_samples_is_stored_whole(tmp_path: Path) -> None:
    """All of it arrives at once, which is far more than the rate allows; a second group does not begin."""
    store = SampleStore(tmp_path / SAMPLES, per_step=32, max_bytes=1 << 30)
    store.begin(1, 0)
    (first, first_trained), (second, second_trained) = long_group(1), long_group(2)
    assert sum(map(len, first)) > 3 * sample_store.BURST_BYTES
    for records in (first, second, first_trained, second_trained):
        for message in messages(records):
            store.add(message.records, 0, now=10.0)
    assert store.close() == []
    with closing(sqlite3.connect(tmp_path / SAMPLES)) as database:
        stored = database.execute("SELECT prompt, member, ids, logprobs, trainer_logprobs FROM samples").fetchall()
    assert [(prompt, member) for prompt, member, *_ in stored] == [(1, member) for member in range(MEMBERS)]
    assert {tuple(columns) for _, _, *columns in stored} == {(LONG_IDS, LONG_LOGPROBS, LONG_LOGPROBS)}
    assert SampleReader(tmp_path).left_out() == {"over the rate": 2 * MEMBERS}


def test_a_group_waits_until_the_rate_permits_it(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / SAMPLES, per_step=32, max_bytes=1 << 30)
    (first, _), (_, _) = long_group(1), long_group(2)
    for record in first:
        store.add([record], 0, now=0.0)
    debt_s = (sum(map(len, first)) - sample_store.BURST_BYTES) / sample_store.BYTES_PER_S
    store.add([data(scored(2))], 0, now=debt_s)
    store.add([data(scored(3))], 0, now=debt_s + 1.0)
    store.add([data(scored(2, 1))], 0, now=1e6)  # its first record was left out: it stays so
    store.begin(1, 0)
    assert store.close() == []
    assert {row.prompt for row in rows(tmp_path)} == {1, 3}


def test_a_message_that_is_too_long_is_counted(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / SAMPLES, per_step=32, max_bytes=1 << 30)
    store.begin(1, 0)
    store.add([bytes(MAX_RECORD_BYTES), b"x"], 0, now=0.0)
    store.close()
    assert SampleReader(tmp_path).left_out() == {"malformed": 2}


def test_records_are_sent_in_messages_of_limited_length() -> None:
    records = [bytes([number]) * 100_000 for number in range(7)]
    sent = list(messages(records))
    assert [len(message.records) for message in sent] == [2, 2, 2, 1]
    assert [record for message in sent for record in message.records] == records


def test_long_texts_and_tokens_are_cut_to_fit_a_record() -> None:
    text = "".join(chr(0x4E00 + number * 7919 % 20_000) for number in range(400_000))
    sample = decode_record(
        data(replace(scored(), spans=(0, 200_000), data=(pack_text("p"), pack_text(text), bytes(800_000))))
    )
    assert isinstance(sample, ScoredSample)
    assert sample.data[2] == b""
    long = decode_record(data(replace(trained(), data=(bytes(600_000), bytes(600_000)))))
    assert isinstance(long, TrainedSample)
    assert long.data == (b"", b"")


# ---- failures


def test_a_full_disk_gives_one_notice_and_unwritten_samples_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_store, "RETRY_S", 0.0)
    store = writer(tmp_path)
    store.write([(data(scored(0)), 0)])
    database = store._opened()
    [(pages,)] = database.execute("PRAGMA page_count").fetchall()
    database.execute(f"PRAGMA max_page_count={pages}")
    big = [(data(scored(prompt, completion="x y" * 4000 + str(prompt))), 0) for prompt in range(1, 400)]
    notices = [store.write(big)]
    assert "database or disk is full" in notices[0]
    assert notices[0].startswith("samples are not stored")
    monkeypatch.setattr(sample_store, "RETRY_S", 60.0)
    assert store.write([(data(scored(500)), 0)]) == f"samples are stored in {tmp_path / SAMPLES} again"
    store.close()
    assert {row.prompt for row in rows(tmp_path)} == {0, 500}
    assert SampleReader(tmp_path).left_out() == {"not written": 399}


def test_a_damaged_file_gives_one_notice_and_is_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_store, "RETRY_S", 0.0)
    content = b"not a database, long enough to be looked at " * 100
    (tmp_path / SAMPLES).write_bytes(content)
    store = SampleStore(tmp_path / SAMPLES, per_step=32, max_bytes=1 << 30)
    store.begin(2, 5)
    notices: list[str] = []
    for step in range(3):
        store.add([data(scored(step))], step, 0.0)
        store.ended(GroupEnd(0, step, step))
        notices += store.tick()
    notices += store.close()
    assert len(notices) == 1
    assert "file is not a database" in notices[0]
    assert (tmp_path / SAMPLES).read_bytes() == content


def test_the_store_is_readable_while_it_is_written(tmp_path: Path) -> None:
    """Readers do not fail and do not block the writer."""
    store = writer(tmp_path, max_bytes=300_000)
    store.write([(data(scored()), 0)])
    failures: list[str] = []
    is_over = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not is_over.is_set():
            try:
                seen.append(SampleReader(tmp_path).query(SampleFilter(grep="answer|1"), limit=1000).total)
            except FlowError as error:
                failures.append(str(error))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    notices = [store.write([(data(scored(step, completion=f"{step} " * 100)), step)]) for step in range(1, 400)]
    is_over.set()
    for thread in threads:
        thread.join()
    store.close()
    assert not failures
    assert not any(notices)
    assert len(seen) > 3


# ---- choice


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_group_choice_has_the_given_share_and_is_deterministic(share: float) -> None:
    chosen = GroupChoice(seed=3, share=share)
    count = sum(chosen(epoch, prompt) for epoch in range(2) for prompt in range(2000))
    assert abs(count - 4000 * share) <= 4 * (4000 * share * (1 - share)) ** 0.5
    assert [chosen(0, prompt) for prompt in range(50)] == [
        GroupChoice(seed=3, share=share)(0, prompt) for prompt in range(50)
    ]


def test_another_seed_chooses_other_groups() -> None:
    first, second = GroupChoice(seed=0, share=0.5), GroupChoice(seed=1, share=0.5)
    assert [first(0, prompt) for prompt in range(64)] != [second(0, prompt) for prompt in range(64)]


def test_the_columns_are_those_of_the_formats_page(tmp_path: Path) -> None:
    store = writer(tmp_path)
    store.write([])
    store.close()
    with sqlite3.connect(tmp_path / SAMPLES) as database:
        columns = [name for _, name, *_ in database.execute("PRAGMA table_info(samples)")]
    database.close()
    assert columns == [
        *("id", "step", "run_attempt", "flow", "eval_name", "epoch", "prompt", "member", "attempt", "reward", "parts"),
        *("finish", "reason", "version_min", "version_max", "spans", "tokens", "prompt_text", "completion", "ids"),
        *("logprobs", "trainer_logprobs", "advantage", "generate_s", "reward_s", "flagged"),
    ]
