"""Files of a recording: exact, bounded, and readable up to the last complete block when truncated or damaged."""

import resource
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.events import (
    ControllerStalled,
    EndRun,
    Event,
    KernelAlive,
    MessageReceived,
    PreemptRun,
    Shutdown,
    Tick,
    WorkerConnected,
    WorkerDisconnected,
)
from flowrt.controller.state.controller_restart import (
    GroupsOpened,
    RecoveredState,
    RunPreempted,
    StageCommitted,
    WorkerDrained,
)
from flowrt.controller.state.kept_samples import KeptSample
from flowrt.controller.state.reward_history import Outcome
from flowrt.controller.storage import recording_writer
from flowrt.controller.storage.recording_format import (
    MAGIC,
    CoreInputs,
    EventBlock,
    event_data,
    event_kind,
    pack_header,
    read_event,
    unpack_header,
)
from flowrt.controller.storage.recording_format import Header as RecordingHeader
from flowrt.controller.storage.recording_writer import EventRecording
from flowrt.errors import ConfigError
from flowrt.ids import WorkerId
from flowrt.observability.recording_reader import Recordings
from flowrt.protocol import messages as m
from flowrt.protocol.codec import encode
from flowrt.protocol.messages import MESSAGES, ColumnLengths, Part, Position, Values
from tests.effort import examples
from tests.simulation.message_fuzzer import MessageFuzzer
from tests.simulation.recorded_runs import RecordedCluster, replayed_states

WORKER = WorkerId("rollout-0")
EVENTS: list[Event] = [
    MessageReceived(WORKER, m.Pull(request=1, stage="rollout", slots=3, tokens=0, step=-1)),
    WorkerConnected(worker=WORKER, role="rollout", host="höst", lanes=("gloo", "shm:1"), term=2),
    WorkerDisconnected(WORKER, "killed \udcff"),
    Tick(),
    KernelAlive(WORKER, 0.1 + 0.2),
    PreemptRun("terminated", 130, kept=4),
    Shutdown("the disk is full", 1, even_if_complete=True),
    ControllerStalled(41.25),
]
NUMBER = 13
"""A simulated run of several hundred events."""
times = st.floats(allow_nan=False)


@settings(max_examples=examples(60))
@given(st.lists(times), st.integers(0, 2**32), st.data())
def test_a_block_reads_back_exactly(instants: list[float], seed: int, data: st.DataObject) -> None:
    fuzzer = MessageFuzzer(seed)
    chosen = data.draw(st.lists(st.integers(-7, len(MESSAGES)), min_size=len(instants), max_size=len(instants)))
    events = [EVENTS[-choice] if choice < 0 else MessageReceived(WORKER, fuzzer.message()) for choice in chosen]
    numbers = st.lists(st.integers(0, 2**31 - 1), min_size=len(instants), max_size=len(instants))
    senders = data.draw(numbers)
    block = EventBlock(
        first=data.draw(st.integers(0, 2**60)),
        names=["a", "b"],
        kinds=[event_kind(event) for event in events],
        workers=[
            sender if isinstance(event, MessageReceived) else 0 for sender, event in zip(senders, events, strict=True)
        ],
        times=instants,
        data=[event_data(event) for event in events],
        counts=data.draw(numbers),
        digest=b"0123456789abcdef",
    )
    packed = msgpack.unpackb(
        msgpack.packb(block.pack(), unicode_errors="surrogatepass"), use_list=False, unicode_errors="surrogatepass"
    )
    read = EventBlock.unpack(packed)
    for index, event in enumerate(events):
        if isinstance(event, MessageReceived) and isinstance(event.message, m.Report):
            block.data[index] = encode(msgspec.structs.replace(event.message, spans=(), resources=b""))
    assert read == block
    assert [struct.pack("d", instant) for instant in read.times] == [struct.pack("d", instant) for instant in instants]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_every_kind_of_event_reads_back(event: Event) -> None:
    assert read_event(event_kind(event), WORKER, event_data(event)) == event


def test_a_header_reads_back() -> None:
    offer = GroupsOpened(
        owner="source",
        request=1,
        flow="train",
        prompts=(3, 4),
        epoch=0,
        members=2,
        at_least=0,
        lengths=(ColumnLengths("prompt", (5, 6)),),
        tags=(),
        group=7,
        slot=20,
    )
    commit = StageCommitted(
        worker="rollout-0",
        stage="rollout",
        slots=(20,),
        leases=(3,),
        parts=(Part("response", (20,), (9,)),),
        inline=(Values("truncated", (0.0,)),),
        spans=((0, 9),),
    )
    orders = (WorkerDrained("rollout-0", True), RunPreempted("interrupted (SIGTERM)", 143, 2, 3))
    recovered = RecoveredState({"step": 3}, {"rollout-0": "rollout"}, (offer, commit), {"too old": 2}, orders)
    kept = (KeptSample(epoch=0, prompt=4, member=1, oldest=2, journal="journals/1/w/0.journal"),)
    inputs = CoreInputs("recipe = 'x'", 2, Position(step=3), recovered, (Outcome(1, 0, 3, 0.1),), "journals/2", kept)
    header = RecordingHeader(inputs=inputs, start_s=1.5, unix_s=1e9, version="0", sources="ab")
    read = unpack_header(pack_header(header))
    assert read.inputs.recovered is not None
    assert tuple(read.inputs.recovered.entries) == recovered.entries
    assert (read.start_s, read.inputs.outcomes, read.inputs.position) == (1.5, inputs.outcomes, Position(step=3))
    assert read.inputs.recovered.numbers == recovered.numbers
    assert (read.inputs.journals, read.inputs.kept) == ("journals/2", kept)


# ---- bounds


def size_of(run_dir: Path) -> int:
    return sum(path.stat().st_size for path in (run_dir / "recording").iterdir())


@pytest.mark.parametrize("limit", range(2000, 6000, 500))
def test_a_recording_stops_at_its_size_limit_and_the_run_continues(limit: int, tmp_path: Path) -> None:
    cluster = RecordedCluster(NUMBER, tmp_path, limit_bytes=limit).play()
    assert cluster.core.ended is not None
    assert cluster.recording is not None
    assert "recorder.mb" in cluster.recording.stopped()
    assert cluster.recording.stopped() == "", "a recording warns once"
    assert size_of(tmp_path) <= limit
    extent = Recordings.of(tmp_path).of_term(1).extent()
    assert "recorder.mb" in extent.stopped
    assert not extent.damage
    states = dict(replayed_states(tmp_path))
    assert states.items() <= cluster.states.items()
    assert len(states) < len(cluster.states)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limit the size of every file of this process, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_stops_the_recording_after_a_complete_block(tmp_path: Path) -> None:
    with file_size_limit(4000):
        cluster = RecordedCluster(NUMBER, tmp_path).play()
    assert cluster.recording is not None
    assert "cannot be written: File too large" in cluster.recording.stopped()
    extent = Recordings.of(tmp_path).of_term(1).extent()
    assert extent.events > 0
    assert not extent.damage
    assert dict(replayed_states(tmp_path)).items() <= cluster.states.items()


def wait_for_a_segment(run_dir: Path, deadline_s: float = 20.0) -> None:
    """Wait until the writer thread has written the beginning of a recording."""
    deadline = time.monotonic() + deadline_s
    while not any(path.stat().st_size for path in (run_dir / "recording").glob("*.fr")):
        assert time.monotonic() < deadline, f"no segment after {deadline_s:.0f} s"
        time.sleep(0.01)


def test_a_recording_stops_with_a_reason_when_the_disk_is_too_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = RecordedCluster(NUMBER, tmp_path)
    cluster.run()
    assert cluster.recording is not None
    wait_for_a_segment(tmp_path)
    assert cluster.recording.stopped() == ""
    monkeypatch.setattr(recording_writer, "MAX_PENDING_BYTES", -1)
    assert "the disk is too slow" in cluster.recording.stopped()
    cluster.recording.close()
    assert "the disk is too slow" in Recordings.of(tmp_path).of_term(1).extent().stopped


def test_a_directory_that_cannot_be_created_stops_the_recording(tmp_path: Path) -> None:
    (tmp_path / "recording").write_text("a file")
    cluster = RecordedCluster(NUMBER, tmp_path).play()
    assert cluster.recording is not None
    assert "recording cannot be written" in cluster.recording.stopped()
    assert (tmp_path / "recording").read_text() == "a file"


def test_a_term_that_is_recorded_already_is_not_overwritten(tmp_path: Path) -> None:
    states = RecordedCluster(NUMBER, tmp_path).play().states
    again = RecordedCluster(NUMBER, tmp_path).play()
    assert again.recording is not None
    assert "File exists" in again.recording.stopped()
    assert dict(replayed_states(tmp_path)) == states


def test_nothing_is_written_before_the_first_event(tmp_path: Path) -> None:
    event_recording = EventRecording(tmp_path, CoreInputs("", 1, Position()), 1_000_000)
    event_recording.begin(0.0)
    event_recording.flush()
    event_recording.close()
    assert list(tmp_path.iterdir()) == []


def test_an_event_whose_handling_failed_is_recorded_without_commands(tmp_path: Path) -> None:
    event_recording = EventRecording(tmp_path, CoreInputs("", 1, Position()), 1_000_000)
    event_recording.begin(0.0)
    for handled in (True, False, True, False, False):
        event_recording.add(Tick(), 1.0, [EndRun("the end", 0)] if handled else [], [b""] if handled else [])
    event_recording.close()
    [block] = Recordings.of(tmp_path).of_term(1).blocks()
    assert block.counts == [1, 0, 1, 0, 0]


def test_files_are_readable_for_their_owner_only(tmp_path: Path) -> None:
    RecordedCluster(NUMBER, tmp_path).play()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "recording").iterdir()} == {0o600}
    assert (tmp_path / "recording").stat().st_mode & 0o777 == 0o700


# ---- damage


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedCluster:
    """A run whose recording has several segments."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recording_writer, "SEGMENT_BYTES", 800)
        return RecordedCluster(NUMBER, tmp_path_factory.mktemp("recorded")).play()


def copy_of(cluster: RecordedCluster, directory: Path) -> list[Path]:
    """Copy the recording; returns the segments of the copy."""
    shutil.rmtree(directory / "recording", ignore_errors=True)
    shutil.copytree(cluster.run_dir / "recording", directory / "recording")
    return sorted((directory / "recording").iterdir())


def assert_replays_up_to_the_damage(cluster: RecordedCluster, directory: Path) -> None:
    whole = Recordings.of(cluster.run_dir).of_term(1).extent()
    assert whole.is_complete
    try:
        extent = Recordings.of(directory).of_term(1).extent()
    except ConfigError as error:
        message = str(error)
    else:
        assert extent == whole or extent.damage or not extent.is_complete
        assert extent.events <= whole.events
        assert dict(replayed_states(directory)).items() <= cluster.states.items()
        return
    assert "no recording of" in message


@settings(max_examples=examples(60))
@given(st.data())
def test_a_recording_with_a_changed_byte_is_replayed_up_to_it(
    recorded: RecordedCluster, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.getbasetemp() / "changed"
    path = data.draw(st.sampled_from(copy_of(recorded, directory)))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    assert_replays_up_to_the_damage(recorded, directory)


@settings(max_examples=examples(60))
@given(st.data())
def test_a_truncated_recording_is_replayed_up_to_its_end(
    recorded: RecordedCluster, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.getbasetemp() / "cut"
    path = data.draw(st.sampled_from(copy_of(recorded, directory)))
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    assert_replays_up_to_the_damage(recorded, directory)


def test_a_recording_of_another_version_is_refused(recorded: RecordedCluster, tmp_path: Path) -> None:
    first = copy_of(recorded, tmp_path)[0]
    first.write_bytes(b"flowrt recording 1\n" + first.read_bytes()[len(MAGIC) :])
    with pytest.raises(ConfigError, match="is a recording of another version of flowrt: replay it with that version"):
        Recordings.of(tmp_path)


def test_a_missing_segment_is_named(recorded: RecordedCluster, tmp_path: Path) -> None:
    segments = copy_of(recorded, tmp_path)
    assert len(segments) > 2
    segments[1].unlink()
    extent = Recordings.of(tmp_path).of_term(1).extent()
    assert "segment 1 of term 1 is missing" in extent.damage
    assert extent.events > 0
    segments[0].unlink()
    with pytest.raises(ConfigError, match="the first segment of term 1 is missing"):
        Recordings.of(tmp_path)


def test_sent_messages_count_as_waiting_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may be a thousand times as long as its request."""
    monkeypatch.setattr(recording_writer, "MAX_PENDING_BYTES", 10_000)
    release = threading.Event()
    write = recording_writer._SegmentWriter.write

    def wait_and_write(
        writer: recording_writer._SegmentWriter, rows: list[recording_writer.Row], *, ends_block: bool
    ) -> None:
        release.wait(60.0)
        write(writer, rows, ends_block=ends_block)

    monkeypatch.setattr(recording_writer._SegmentWriter, "write", wait_and_write)
    cluster = RecordedCluster(NUMBER, tmp_path)
    recorded = cluster.recording
    assert recorded is not None
    recorded.add(Tick(), 0.0, (), (b"x" * 10_001,))
    recorded.flush()
    try:
        assert "the disk is too slow" in recorded.stopped()
    finally:
        release.set()
        recorded.close()
